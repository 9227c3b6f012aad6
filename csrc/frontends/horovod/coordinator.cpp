// The calls, the thread, and how everything ends. issue.cpp issues collectives.
#include "frontends/horovod/coordinator.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "lanes/threads.h"

namespace fusedcomm::horovod {
namespace {

// After a failure, what is under way may still end for so long.
constexpr std::chrono::seconds kGrace{5};
constexpr int kClosingTimeoutMs = 5000;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

std::vector<int> peers_of(int rank, int size) {
  if (rank != 0) return {0};
  std::vector<int> peers;
  for (int peer = 1; peer < size; ++peer) peers.push_back(peer);
  return peers;
}

}  // namespace

Coordinator::Coordinator(const Options& options, Say say, OpenWire open_wire)
    : options_(options),
      say_(std::move(say)),
      open_wire_(std::move(open_wire)),
      links_(options.sockets, options.size == 1 ? std::vector<int>() : peers_of(options.rank, options.size)) {
  if (options_.rank == 0) {
    negotiator_ = std::make_unique<Negotiator>(
        options_.size, options_.negotiator, [this](int rank, const std::string& message) { send(rank, message); }, say_,
        [this](int set) {
          std::lock_guard<std::mutex> lock(mutex_);
          const auto found = sets_.find(set);
          return found != sets_.end() && found->second.num_under_way > 0;
        });
  }
  thread_ = start_thread("fc-coordinator", [this] { run(); });
}

Coordinator::~Coordinator() { shutdown(); }

void Coordinator::add_set(int number, std::vector<int> ranks, BackendPtr backend) {
  std::lock_guard<std::mutex> lock(mutex_);
  Set& set = sets_[number];
  if (backend) set.plain = std::make_shared<PlainCollectives>(std::move(backend));
  changes_.push_back({number, std::move(ranks)});
  links_.wake();
}

void Coordinator::remove_set(int number) {
  std::lock_guard<std::mutex> lock(mutex_);
  sets_.erase(number);
  changes_.push_back({number, {}});
  links_.wake();
}

int Coordinator::submit(RequestPtr request) {
  request->enqueued = enqueued(request->inputs);
  std::lock_guard<std::mutex> lock(mutex_);
  const int handle = next_handle_++;
  if (!failure_.empty()) throw std::runtime_error(failure_);
  const auto found = sets_.find(request->set);
  if (found == sets_.end() || !found->second.plain) {
    throw std::invalid_argument("fusedcomm: rank " + std::to_string(options_.rank) + " is no member of process set " +
                                std::to_string(request->set) + ", so it cannot submit " + request->signature.key());
  }
  Set& set = found->second;
  request->key = request->signature.key();
  request->handle = handle;
  request->submitted = Clock::now();
  if (!set.requests.emplace(request->key, request).second) {
    throw std::invalid_argument("fusedcomm: " + request->key + " is under way on rank " +
                                std::to_string(options_.rank) +
                                ", so it cannot be submitted again: synchronize its handle first, or use another name");
  }
  handles_[handle] = request;
  set.unreported.push_back(std::move(request));
  links_.wake();
  return handle;
}

bool Coordinator::poll(int handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const Request& request = *handles_.at(handle);
  if (request.is_done) return true;
  return !failure_.empty() && Clock::now() > failed_at_ + kGrace;
}

Result Coordinator::wait(int handle) {
  std::unique_lock<std::mutex> lock(mutex_);
  const RequestPtr request = handles_.at(handle);
  changed_.wait(lock, [&] { return request->is_done || !failure_.empty(); });
  if (!changed_.wait_until(lock, failed_at_ + kGrace, [&] { return request->is_done; })) {
    request->is_done = true;
    request->result.error = failure_;
  }
  handles_.erase(handle);
  return request->result;
}

bool Coordinator::is_idle() const {
  return std::all_of(sets_.begin(), sets_.end(), [](const auto& set) { return set.second.num_under_way == 0; });
}

void Coordinator::shutdown() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!thread_.joinable()) return;
  if (!std::exchange(is_leaving_, true)) {
    leaving_since_ = Clock::now();
    outbox_.push_back(text_message(MessageType::kLeaving, "fusedcomm: rank " + std::to_string(options_.rank) +
                                                              " called shutdown(), which ends it on every rank"));
  }
  links_.wake();
  lock.unlock();
  thread_.join();
  lock.lock();
  // Collectives that every member has issued end by themselves. Their backend cannot be freed before.
  if (changed_.wait_until(lock, failed_at_ + kGrace, [this] { return is_idle(); })) return;
  for (auto& [number, set] : sets_) {
    if (set.plain && set.num_under_way != 0) set.plain->abandon();
  }
}

std::string Coordinator::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Coordinator::start_events(bool mark_cycles) {
  std::lock_guard<std::mutex> lock(mutex_);
  keeps_events_ = true;
  marks_cycles_ = mark_cycles;
}

std::vector<Event> Coordinator::take_events() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(events_, {});
}

void Coordinator::run() {
  while (!has_ended_) {
    send_outbox();
    while (!inbox_.empty()) {
      const std::string message = std::move(inbox_.front());
      inbox_.pop_front();
      handle_message(0, message);
    }
    if (negotiator_ && !has_ended_) {
      const double now_s = seconds_since(began_);
      negotiator_->emit();
      negotiator_->look_for_stalls(now_s);
    }
    if (has_ended_) break;
    const int timeout_ms = wait_ms();
    links_.wait(
        timeout_ms, [this](int peer, const std::string& message) { handle_message(peer, message); },
        [this](int peer) { on_lost(peer); });
  }
  options_.rank == 0 ? links_.close_after_peers(kClosingTimeoutMs) : links_.hang_up(kClosingTimeoutMs);
}

int Coordinator::wait_ms() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!inbox_.empty() || !outbox_.empty()) return 0;
  double wait_s = negotiator_ ? negotiator_->next_look_s(seconds_since(began_)) : -1;
  if (is_leaving_) {
    const double left_s = std::max(0.0, kClosingTimeoutMs / 1e3 - seconds_since(leaving_since_));
    wait_s = wait_s < 0 ? left_s : std::min(wait_s, left_s);
  }
  return wait_s < 0 ? -1 : static_cast<int>(std::ceil(wait_s * 1e3));
}

void Coordinator::send_outbox() {
  std::unique_lock<std::mutex> lock(mutex_);
  report();
  const std::deque<std::string> outbox = std::exchange(outbox_, {});
  const auto changes = std::exchange(changes_, {});
  const bool gives_up = is_leaving_ && seconds_since(leaving_since_) > kClosingTimeoutMs / 1e3;
  lock.unlock();
  if (negotiator_) {
    for (const SetChange& change : changes) {
      change.ranks.empty() ? negotiator_->remove_set(change.set)
                           : negotiator_->add_set(change.set, change.ranks, seconds_since(began_));
    }
  }
  for (const std::string& message : outbox) send(0, message);
  if (!gives_up || has_ended_) return;
  lock.lock();
  fail_all("fusedcomm: rank " + std::to_string(options_.rank) + " called shutdown(), and rank 0 does not answer");
}

void Coordinator::send(int rank, const std::string& message) {
  if (rank == options_.rank) {
    inbox_.push_back(message);
  } else {
    links_.send(rank, message);
  }
}

void Coordinator::on_lost(int rank) {
  if (has_ended_) return;
  const std::string why = "fusedcomm: rank " + std::to_string(rank) +
                          " ended its connection: its process has ended, or its host cannot be reached";
  if (negotiator_) return negotiator_->end(why);
  std::lock_guard<std::mutex> lock(mutex_);
  fail_all(why);
}

void Coordinator::handle_message(int from, const std::string& message) {
  Reader in(message);
  const auto type = in.number<MessageType>();
  switch (type) {
    case MessageType::kReady:
      return negotiator_->on_ready(from, Ready::read(in), seconds_since(began_));
    case MessageType::kLeaving:
      return negotiator_->end(in.text());
    case MessageType::kExecute:
      if (!has_ended_) execute(Execute::read(in));
      return;
    case MessageType::kEnd:
      if (has_ended_) return;
      std::lock_guard<std::mutex> lock(mutex_);
      fail_all(in.text());
  }
}

void Coordinator::fail_all(const std::string& why) {
  has_ended_ = true;
  if (!failure_.empty()) return;
  failure_ = why;
  failed_at_ = Clock::now();
  for (auto& [number, set] : sets_) {
    set.unreported.clear();
    for (auto request = set.requests.begin(); request != set.requests.end();) {
      Request& of = *request->second;
      if (of.is_issued) {
        ++request;
        continue;
      }
      of.is_done = true;
      of.result.error = why;
      request = set.requests.erase(request);
    }
  }
  changed_.notify_all();
}

}  // namespace fusedcomm::horovod
