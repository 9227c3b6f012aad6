#include "transport/exchange.h"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <iterator>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "lanes/threads.h"
#include "transport/wire_tensor.h"

namespace fusedcomm {
namespace {

// Exchanges use the tags from 1 to kNumTags, one after another; the sentinels use kSentinelTag.
constexpr int kNumTags = 1 << 30;
constexpr int kSentinelTag = 0;
// kPeerPoll: time between two looks for lost peers. kAtOnce: timeout of a wait that only asks whether a message has
// ended. kLong: a message that is incomplete for this long is named in errors.
constexpr std::chrono::milliseconds kPeerPoll{500}, kAtOnce{1}, kLong{5000};
constexpr char kClosed[] = "its channel has been closed";
// An error names at most this many peers beside the first.
constexpr size_t kNamedPeers = 8;

}  // namespace

Exchange::Exchange(BackendPtr backend, int max_sending, std::string peer)
    : backend_(std::move(backend)),
      max_sending_(static_cast<size_t>(max_sending)),
      peer_(std::move(peer)),
      timeout_(backend_->getBackendOptions()->timeout),
      lost_(static_cast<size_t>(backend_->getSize())) {}

Exchange::~Exchange() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    // Aborts the current wait. The waiting thread does not wait for the items behind it.
    for (Item& item : posted_) {
      for (const Pending& pending : item.works) pending.work->abort();
    }
    to_post_.notify_one();
    to_wait_.notify_one();
  }
  if (poster_.joinable()) poster_.join();
  if (waiter_.joinable()) waiter_.join();
}

void Exchange::start(const WireSpan& send, const WireSpan& receive, Lane::Completion done) {
  const int rank = backend_->getRank(), size = backend_->getSize();
  const int64_t nbytes = receive.nbytes / size;
  const auto part = [nbytes](const WireSpan& of, int64_t index) {
    return WireSpan{of.data + index * nbytes, nbytes, of.owner};
  };
  const auto sent_to = [&](int peer) { return send.nbytes == nbytes ? send : part(send, peer); };
  Item item;
  for (int step = 1; step < size; ++step) {  // in this order not all ranks send to the same rank first
    const int to = (rank + step) % size, from = (rank + size - step) % size;
    item.sends.push_back({to, sent_to(to)});
    item.receives.push_back({from, part(receive, from)});
  }
  item.own_from = sent_to(rank);
  item.own_to = part(receive, rank);
  item.done = std::move(done);
  if (size == 1) {
    copy_own(item);
    item.done(nullptr);
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (!poster_.joinable()) {
    poster_ = start_thread("fc-post", [this] { post(); });
  }
  if (!waiter_.joinable()) {  // an earlier call may have failed to start the second thread
    waiter_ = start_thread("fc-wait", [this] { wait(); });
  }
  item.tag = next_tag_ = next_tag_ % kNumTags + 1;  // never kSentinelTag
  started_.push_back(std::move(item));
  to_post_.notify_one();
}

void Exchange::copy_own(const Item& item) {
  const WireSpan &from = item.own_from, &to = item.own_to;
  if (from.data != to.data) std::memcpy(to.data, from.data, static_cast<size_t>(to.nbytes));
}

template <typename Call>
void Exchange::attempt(Item* item, const Call& call) {
  if (item->error) return;
  try {
    call();
  } catch (...) {
    item->error = std::current_exception();
  }
}

std::string Exchange::between(int peer) const { return "between this rank and " + peer_ + std::to_string(peer) + ": "; }

template <typename Call>
auto Exchange::between(int peer, const Call& call) const {
  try {
    return call();
  } catch (const std::exception& error) {
    throw std::runtime_error(between(peer) + error.what());
  }
}

template <typename Call>
void Exchange::begin(Item* item, const Message& message, const Call& call) const {
  std::vector<at::Tensor> bytes = {as_tensor(message.bytes, at::kByte)};
  try {
    item->works.push_back({message.peer, call(bytes)});
  } catch (const std::exception& error) {
    item->not_begun.emplace(message.peer, between(message.peer) + error.what());
  }
}

void Exchange::post_receives(Item* item) {
  item->posted = Clock::now();
  for (const Message& message : item->receives) {
    begin(item, message, [&](auto& bytes) { return backend_->recv(bytes, message.peer, item->tag); });
  }
}

void Exchange::post_sends(Item* item) {
  for (const Message& message : item->sends) {
    begin(item, message, [&](auto& bytes) { return backend_->send(bytes, message.peer, item->tag); });
  }
  copy_own(*item);
}

void Exchange::look(std::unique_lock<std::mutex>* lock) {
  const int tag = posted_.empty() ? 0 : posted_.front().tag;
  if (tag == 0 || tag != std::exchange(looked_at_, tag)) return;
  lock->unlock();
  auto lost = sentinels_->look();
  for (auto& [peer, error] : lost) {
    try {
      between(peer, [&error = error] { std::rethrow_exception(error); });
    } catch (...) {
      error = std::current_exception();
    }
  }
  lock->lock();
  for (const auto& [peer, error] : lost) lost_[static_cast<size_t>(peer)] = error;
  if (lost.empty() || posted_.empty()) return;
  for (const Pending& pending : posted_.front().works) pending.work->abort();
}

bool Exchange::may_send() const {
  return !unsent_.empty() && (stopping_ || max_sending_ == 0 || posted_.size() < max_sending_);
}

void Exchange::post() {
  sentinels_ = std::make_unique<PeerSentinels>(backend_, kSentinelTag);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto has_work = [this] { return stopping_ || !started_.empty() || may_send(); };
  for (;;) {
    if (posted_.empty()) {
      to_post_.wait(lock, has_work);
    } else if (!to_post_.wait_for(lock, kPeerPoll, has_work)) {
      look(&lock);
      continue;
    }
    if (started_.empty() && unsent_.empty()) break;
    std::deque<Item> items = std::exchange(started_, {});
    const bool is_open = !stopping_;
    lock.unlock();
    for (Item& item : items) {
      if (is_open) attempt(&item, [this, &item] { post_receives(&item); });
    }
    lock.lock();
    std::move(items.begin(), items.end(), std::back_inserter(unsent_));
    while (may_send()) {
      Item item = std::move(unsent_.front());
      unsent_.pop_front();
      lock.unlock();
      if (is_open) attempt(&item, [this, &item] { post_sends(&item); });
      lock.lock();
      posted_.push_back(std::move(item));
      to_wait_.notify_one();
    }
  }
  has_posted_all_ = true;
  to_wait_.notify_one();
}

std::exception_ptr Exchange::lost(int peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) throw std::runtime_error(kClosed);
  return lost_[static_cast<size_t>(peer)];
}

// When a peer is known to be lost, everything that it sent has been read, so an incomplete message stays incomplete. A
// peer that has left after its last message is not an error.
void Exchange::end_those_of_lost_peers(Item* item, int* waiting_for) {
  for (Pending& pending : item->works) {
    *waiting_for = pending.peer;
    const std::exception_ptr error = lost(pending.peer);
    if (pending.ended || !error) continue;
    try {
      pending.ended = pending.work->wait(kAtOnce);
    } catch (...) {
      std::rethrow_exception(error);
    }
  }
}

bool Exchange::end_all(Item* item, Clock::time_point deadline, int* waiting_for) {
  for (Pending& pending : item->works) {
    *waiting_for = pending.peer;
    if (!pending.ended && !lost(pending.peer)) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
      pending.ended = between(pending.peer, [&] { return pending.work->wait(std::max(left, kAtOnce)); });
    }
    if (!pending.ended) return false;
  }
  return true;
}

void Exchange::wait_for(Item* item) {
  const Clock::time_point deadline = Clock::now() + timeout_;  // however often look() aborts its waits
  int waiting_for = 0;
  try {
    if (const auto first = item->not_begun.begin(); first != item->not_begun.end()) {
      waiting_for = first->first;
      throw std::runtime_error(first->second);
    }
    do {
      end_those_of_lost_peers(item, &waiting_for);
    } while (!end_all(item, deadline, &waiting_for));
  } catch (const std::exception& error) {
    const bool is_closed_here = Clock::now() >= deadline || lost(waiting_for);
    throw std::runtime_error(error.what() + others_awaited(item, waiting_for, is_closed_here));
  }
}

std::string Exchange::others_awaited(Item* item, int failed, bool is_closed_here) {
  std::map<int, std::string> found = item->not_begun;
  found.erase(failed);
  for (const Pending& pending : item->works) {
    if (pending.ended || pending.peer == failed || found.count(pending.peer) != 0) continue;
    try {
      if (const std::exception_ptr error = lost(pending.peer)) std::rethrow_exception(error);
      if (is_closed_here) continue;
      pending.work->abort();
      between(pending.peer, [&] { return pending.work->wait(kAtOnce); });
    } catch (const std::exception& error) {
      found[pending.peer] = error.what();
    }
  }
  // These waits come last, because the backend closes all connections when a wait times out. Peers whose messages may
  // still be on their way would then take this rank for lost, so without a long wait nothing is asked.
  const Clock::duration waited = Clock::now() - item->posted;
  const bool is_long = waited >= std::min<Clock::duration>(timeout_ / 2, kLong);
  std::ostringstream seconds;
  seconds << std::fixed << std::setprecision(1) << std::chrono::duration<double>(waited).count();
  for (Pending& pending : item->works) {
    if (!is_long || pending.ended || pending.peer == failed || found.count(pending.peer) != 0) continue;
    try {
      while (!pending.work->wait(kAtOnce)) continue;  // false: look() has aborted it
    } catch (const std::exception&) {
      found[pending.peer] = between(pending.peer) + "not complete after " + seconds.str() + " s";
    }
  }
  std::string text;
  size_t num_left = found.size();
  for (const auto& [peer, what] : found) {
    if (num_left + kNamedPeers == found.size()) break;
    text += "; " + what;
    --num_left;
  }
  return num_left == 0 ? text : text + "; and " + std::to_string(num_left) + " more peers";
}

void Exchange::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    to_wait_.wait(lock, [this] { return has_posted_all_ || !posted_.empty(); });
    if (posted_.empty()) return;
    Item& item = posted_.front();  // stays in posted_, so that the destructor can abort its waits
    if (stopping_ && !item.error) item.error = std::make_exception_ptr(std::runtime_error(kClosed));
    lock.unlock();
    attempt(&item, [this, &item] { wait_for(&item); });
    lock.lock();
    Item ended = std::move(item);
    posted_.pop_front();
    if (may_send()) to_post_.notify_one();
    lock.unlock();
    ended.works.clear();  // the backend must not hold the bytes when `done` lets others use them
    ended.done(ended.error);
    ended = {};
    lock.lock();
  }
}

}  // namespace fusedcomm
