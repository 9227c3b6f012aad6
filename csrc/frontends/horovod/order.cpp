#include "frontends/horovod/order.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "lanes/threads.h"
#include "transport/error_text.h"

namespace fusedcomm::horovod {
namespace {

// Submitted operations are gathered so long for one message, unless somebody waits for one of them: as long as
// Horovod's cycles.
constexpr std::chrono::milliseconds kBatch{1};
// After a failure, what is under way may still end for so long, and rank 0 has so long to answer a shutdown().
constexpr std::chrono::seconds kGrace{5};
// An operation that has failed waits so long for rank 0's word about who is lost.
constexpr std::chrono::seconds kExplanation{3};
constexpr std::chrono::hours kForever{24 * 365};
// A message that is longer comes in parts of this size.
constexpr int64_t kPartNbytes = 1 << 16;
// Messages that may be on their way: each is kept until it has left.
constexpr size_t kMaxSent = 256;
constexpr int kTag = 1;

}  // namespace

Order::Order(const Options& options, BackendPtr control, Start start, Negotiator::Mismatch mismatch,
             Negotiator::Say say)
    : options_(options), control_(std::move(control)), start_(std::move(start)) {
  if (options_.rank == 0) {
    negotiator_ = std::make_unique<Negotiator>(options_.size, options_.sets, options_.negotiator, std::move(mismatch),
                                               std::move(say));
  }
  const int num_peers = options_.size == 1 ? 0 : options_.rank == 0 ? options_.size - 1 : 1;
  num_left_ = num_peers + 1;
  const auto run = [this](auto function) {
    threads_.push_back(start_thread("fc-order", [this, function] {
      function();
      std::lock_guard<std::mutex> lock(mutex_);
      --num_left_;
      changed_.notify_all();
    }));
  };
  for (int i = 0; i < num_peers; ++i) {
    run([this, peer = options_.rank == 0 ? i + 1 : 0] { receive(peer); });
  }
  run([this] { batch(); });
}

Order::~Order() { shutdown(); }

void Order::submit(const RequestPtr& request, bool at_once) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) throw std::runtime_error(failure_);
    const Key key(request->set, request->entry.operation->key);
    const auto [first, last] = requests_.equal_range(key);
    const auto is_refused = [](const auto& each) { return !each.second->entry.problem.empty(); };
    if (request->entry.problem.empty() && !std::all_of(first, last, is_refused)) {
      throw std::invalid_argument(
          "fusedcomm: " + key.second + " is under way on rank " + std::to_string(options_.rank) +
          ", so it cannot be submitted again: synchronize its handle first, or use another name");
    }
    requests_.emplace(key, request);
    queue_.push_back(request);
    if (!at_once && !is_rung_) ring();
  }
  if (at_once) flush();
}

bool Order::poll(const RequestPtr& request) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (request->is_done) return true;
    if (!failure_.empty()) return Clock::now() > failed_at_ + kGrace;
    if (queue_.empty()) return false;
  }
  flush();
  return false;
}

std::string Order::wait(const RequestPtr& request) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!request->is_done && !queue_.empty()) {
    lock.unlock();
    flush();
    lock.lock();
  }
  changed_.wait(lock, [&] { return request->is_done || !failure_.empty(); });
  changed_.wait_until(lock, failed_at_ + kGrace, [&] { return request->is_done; });
  if (!std::exchange(request->is_done, true)) return failure_;
  std::string error = request->error;
  if (!request->has_moved || error.empty()) return error;
  // A backend says that a connection has ended, but not whose. Rank 0 will know.
  if (changed_.wait_for(lock, kExplanation, [this] { return !failure_.empty(); })) {
    error = failure_ + " (" + error + ")";
  }
  lock.unlock();
  leave(error);  // the other ranks wait for this one
  return error;
}

std::string Order::failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Order::leave(const std::string& why) {
  negotiator_ ? end(why) : static_cast<void>(send(0, MessageType::kLeaving, why));
}

bool Order::shutdown() {
  if (threads_.empty()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  if (!std::exchange(has_left_, true)) {
    const std::string rank = "fusedcomm: rank " + std::to_string(options_.rank) + " called shutdown(), ";
    const std::string why = has_given_up_ ? failure_ : rank + "which ends it on every rank";
    lock.unlock();
    leave(why);
    lock.lock();
    changed_.wait_for(lock, kGrace, [this] { return num_left_ == 0 || has_given_up_; });
    if (num_left_ != 0) {
      lock.unlock();
      fail(rank + "and rank 0 does not answer");
      lock.lock();
      // A peer that is stopped says nothing, and its connection stays open.
      has_aborted_ = true;
      for (const auto& [peer, work] : receiving_) work->abort();
      changed_.wait_for(lock, kGrace, [this] { return num_left_ == 0; });
    }
  }
  const bool has_ended = num_left_ == 0;
  lock.unlock();
  if (!has_ended) return false;
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  return true;
}

// The queue's requests that rank 0 may be told of now, which leave it. With the mutex.
Order::Requests Order::take_due() {
  Requests due, rest;
  for (RequestPtr& request : std::exchange(queue_, {})) {
    const Operation& operation = *request->entry.operation;
    const auto first_of_key = requests_.lower_bound(Key(request->set, operation.key));
    // After a join the others would go on without what this rank has submitted before.
    request->is_told = first_of_key->second == request && !(operation.is_join && !rest.empty());
    (request->is_told ? due : rest).push_back(std::move(request));
  }
  queue_ = std::move(rest);
  return due;
}

// Tells rank 0 what has been submitted since the last call.
void Order::flush() {
  if (negotiator_) {
    std::lock_guard<std::recursive_mutex> turn(turn_);
    Requests due;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      due = take_due();
    }
    return guard("what rank 0 has submitted", [&] {
      for (const RequestPtr& request : due) negotiator_->add(request->set, 0, request->entry);
      emit();
    });
  }
  std::lock_guard<std::recursive_mutex> send_lock(send_mutex_);  // messages in the order of the queue
  // In the order of the queue: a join is for all sets, and comes after what was submitted before.
  std::vector<std::pair<int, std::vector<Entry>>> runs;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const RequestPtr& request : take_due()) {
      if (runs.empty() || runs.back().first != request->set) runs.emplace_back(request->set, std::vector<Entry>());
      runs.back().second.push_back(request->entry);
    }
  }
  for (auto& [set, entries] : runs) {
    Message out(MessageType::kReady, set);
    out(entries);
    send(0, out);
  }
}

void Order::batch() {
  while (true) {
    Negotiator::Stalls stalls;
    if (negotiator_) {
      std::lock_guard<std::recursive_mutex> turn(turn_);
      guard("the look for stalls", [&] { stalls = negotiator_->look_for_stalls(); });
      is_watching_ = stalls.next.has_value();
      if (!stalls.fatal.empty()) end(stalls.fatal);
    }
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto is_due = [this] { return is_rung_ || !failure_.empty(); };
      stalls.next ? static_cast<void>(bell_.wait_until(lock, *stalls.next, is_due)) : bell_.wait(lock, is_due);
      is_rung_ = false;
      if (!failure_.empty()) return;
      if (!queue_.empty()) {
        lock.unlock();
        std::this_thread::sleep_for(kBatch);
      }
    }
    flush();
  }
}

// Ends everything with the text of what the function throws: no other rank can tell it.
template <typename Function>
void Order::guard(const std::string& what, Function function) {
  try {
    function();
  } catch (const std::exception& failure) {
    leave(failed_text(what, failure.what()));
  }
}

c10::intrusive_ptr<c10d::Work> Order::send(int peer, MessageType type, std::string text) {
  std::lock_guard<std::recursive_mutex> lock(send_mutex_);
  Message out(type, 0);
  out(text);
  return send(peer, out);
}

c10::intrusive_ptr<c10d::Work> Order::send(int peer, const Message& message) {
  std::lock_guard<std::recursive_mutex> lock(send_mutex_);
  const auto nbytes = static_cast<int64_t>(message.bytes().size() + sizeof(int64_t));
  const at::Tensor all = at::empty({nbytes}, at::kByte);
  auto* const to = static_cast<char*>(all.data_ptr());
  std::memcpy(to, &nbytes, sizeof nbytes);
  std::memcpy(to + sizeof nbytes, message.bytes().data(), message.bytes().size());
  try {
    for (int64_t at = 0; at < nbytes; at += kPartNbytes) {
      std::vector<at::Tensor> part = {all.narrow(0, at, std::min(kPartNbytes, nbytes - at))};
      sent_.push_back(control_->send(part, peer, kTag));
    }
    for (; sent_.size() > kMaxSent; sent_.pop_front()) sent_.front()->wait(kForever);
    return sent_.back();
  } catch (const std::exception&) {  // the peer is lost, which its thread tells
    return {};
  }
}

void Order::receive(int peer) {
  const at::Tensor buffers[2] = {at::empty({kPartNbytes}, at::kByte), at::empty({kPartNbytes}, at::kByte)};
  const auto begin = [&](int index) {
    std::vector<at::Tensor> tensors = {buffers[index]};
    const auto work = control_->recv(tensors, peer, kTag);
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_aborted_) work->abort();
    return receiving_[peer] = work;
  };
  try {
    auto receiving = begin(0);
    std::string data;
    int64_t nbytes = 0;
    for (int turn = 0;; turn = 1 - turn) {
      if (!receiving->wait(kForever)) return;  // shutdown() has ended it
      // The next message finds its buffer while this one is read.
      receiving = begin(1 - turn);
      const auto* const received = static_cast<const char*>(buffers[turn].data_ptr());
      if (data.empty()) std::memcpy(&nbytes, received, sizeof nbytes);
      data.append(received, static_cast<size_t>(std::min(kPartNbytes, nbytes - static_cast<int64_t>(data.size()))));
      if (static_cast<int64_t>(data.size()) < nbytes) continue;
      bool is_last = false;
      guard("a message of rank " + std::to_string(peer),
            [&] { is_last = handle(peer, Message(data.substr(sizeof nbytes))); });
      if (is_last) return;
      data.clear();
    }
  } catch (const std::exception&) {  // gloo's
    const std::string why = "fusedcomm: rank " + std::to_string(peer) +
                            " ended its connection: its process has ended, or its host cannot be reached";
    negotiator_ ? end(why) : fail(why);
  }
}

bool Order::handle(int peer, Message in) {
  switch (in.type()) {
    case MessageType::kReady: {
      std::lock_guard<std::recursive_mutex> turn(turn_);
      for (Entry& entry : in.get<std::vector<Entry>>()) negotiator_->add(in.set(), peer, std::move(entry));
      emit();
      return false;
    }
    case MessageType::kExecute:
      issue(in.set(), in.get<Buckets>());
      return false;
    case MessageType::kLeaving:
      end(in.get<std::string>());
      return false;
    case MessageType::kEnd:
      fail(in.get<std::string>());
      if (const auto bye = send(0, MessageType::kBye, "")) bye->wait(kGrace);
      return true;
    case MessageType::kBye:
      return true;
  }
  return false;
}

// Sends what is due, and issues it here. On rank 0, with its turn.
void Order::emit() {
  if (!failure().empty()) return;
  for (int set = 0; set < static_cast<int>(options_.sets.size()); ++set) {
    if (!negotiator_->is_due(set, false) || !negotiator_->is_due(set, is_busy(set))) continue;
    Buckets buckets = negotiator_->take(set);
    Message out(MessageType::kExecute, set);
    out(buckets);
    const std::vector<int>& ranks = options_.sets[static_cast<size_t>(set)];
    for (const int rank : ranks) {
      if (rank != 0) send(rank, out);
    }
    if (std::find(ranks.begin(), ranks.end(), 0) != ranks.end()) issue(set, std::move(buckets));
  }
  if (is_watching_) return;
  const Negotiator::Stalls stalls = negotiator_->look_for_stalls();
  if (!stalls.next && stalls.fatal.empty()) return;
  is_watching_ = true;  // the batch thread does from here on
  std::lock_guard<std::mutex> lock(mutex_);
  ring();
}

// Wakes up the batch thread. With the mutex.
void Order::ring() {
  is_rung_ = true;
  bell_.notify_all();
}

// Whether a bucket of the set is under way here: what becomes ready then travels together, after it.
bool Order::is_busy(int set) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool is_busy = num_under_way_[set] > 0;
  rings_at_end_ = rings_at_end_ || is_busy;
  return is_busy;
}

void Order::issue(int set, Buckets buckets) {
  for (std::vector<Response>& bucket : buckets) {
    const Issue here = issue_of(set, std::move(bucket));
    if (here.responses.empty()) continue;
    const Response& front = here.responses.front();
    std::string error = front.error;
    Futures futures;
    if (error.empty() && front.sum.defined()) {
      if (const RequestPtr& request = here.requests.front()) request->entry.part.copy_(front.sum);
    } else if (error.empty() && !front.operation->is_join) {
      try {
        futures = start_(here);
      } catch (const std::exception& failure) {
        error = failed_text(front.operation->key, failure.what());
        leave(error);  // the other ranks wait for this one
      }
    }
    if (!futures.empty()) {
      follow(futures, set, front.operation->key, here.requests);
      continue;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (here.requests.front()) here.requests.front()->number = front.number;
    finish(here.requests, error);
  }
}

std::string Order::failed_text(const std::string& key, const std::string& why) const {
  return "fusedcomm: " + key + " failed on rank " + std::to_string(options_.rank) + ": " + why;
}

void Order::follow(const Futures& futures, int set, const std::string& key, Requests requests) {
  struct Bucket {
    Requests requests;
    size_t num_left;
    std::string error;
  };
  const auto bucket = std::make_shared<Bucket>(Bucket{std::move(requests), futures.size(), ""});
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ++num_left_;
    ++num_under_way_[set];
    for (const RequestPtr& request : bucket->requests) {
      if (request) request->has_moved = true;
    }
  }
  const auto ended = [this, bucket, set, key](c10::ivalue::Future& future) {
    const std::string error = future.hasError() ? error_text(future.exception_ptr()) : "";
    std::lock_guard<std::mutex> lock(mutex_);
    if (bucket->error.empty() && !error.empty()) bucket->error = failed_text(key, error);
    if (--bucket->num_left > 0) return;
    --num_left_;
    --num_under_way_[set];
    if (std::exchange(rings_at_end_, false)) ring();
    finish(bucket->requests, bucket->error);
  };
  for (const auto& future : futures) future->addCallback(ended, /*uses_future=*/false);
}

Order::Issue Order::issue_of(int set, std::vector<Response> bucket) {
  Issue found{set, {}, {}};
  std::lock_guard<std::mutex> lock(mutex_);
  // The requests of a rank that has failed are gone. Without this it would take part as if it had joined, with zeros.
  if (!failure_.empty()) return found;
  for (Response& response : bucket) {
    const Key key(set, response.operation->key);
    const auto own = requests_.lower_bound(key);
    const bool is_own = own != requests_.end() && own->first == key && own->second->is_told;
    if (!is_own && !(response.error.empty() && response.operation->may_lack_joined)) continue;
    found.requests.push_back(is_own ? own->second : nullptr);
    found.responses.push_back(std::move(response));
    if (!is_own) continue;
    const auto next = requests_.erase(own);
    if (next != requests_.end() && next->first == key) ring();  // its turn has come
  }
  return found;
}

void Order::finish(const Requests& requests, const std::string& error) {
  for (const RequestPtr& request : requests) {
    if (!request || request->is_done) continue;  // wait() has given it up after a failure
    request->is_done = true;
    request->error = error;
  }
  changed_.notify_all();
}

void Order::give_up(const std::string& why) {
  fail(why);
  std::lock_guard<std::mutex> lock(mutex_);
  has_given_up_ = true;
  changed_.notify_all();
}

// On rank 0: tells every rank, and sends nothing more.
void Order::end(const std::string& why) {
  std::lock_guard<std::recursive_mutex> turn(turn_);
  if (std::exchange(has_ended_all_, true)) return;  // not after fail(): the other ranks wait for this at their end
  for (int rank = 1; rank < options_.size; ++rank) send(rank, MessageType::kEnd, why);
  fail(why);
}

void Order::fail(const std::string& why) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!failure_.empty()) return;
  failure_ = why;
  failed_at_ = Clock::now();
  queue_.clear();
  for (const auto& [key, request] : std::exchange(requests_, {})) {
    request->is_done = true;
    request->error = why;
  }
  bell_.notify_all();
  changed_.notify_all();
}

}  // namespace fusedcomm::horovod
