#include "exchange.h"

#include <ATen/ATen.h>
#include <pthread.h>

#include <cstring>
#include <stdexcept>
#include <utility>

namespace fusedcomm {
namespace {

constexpr int kNumTags = 1 << 30;
constexpr char kClosed[] = "its channel has been closed";

// A view of wire bytes that keeps them alive for as long as the backend holds it.
std::vector<at::Tensor> as_tensors(const WireSpan& span) {
  return {at::for_blob(span.data, {span.nbytes})
              .deleter([owner = span.owner](void*) {})
              .options(at::TensorOptions().dtype(at::kByte))
              .make_tensor()};
}

void name_thread(std::thread* thread, const char* name) {
#if defined(__linux__)
  pthread_setname_np(thread->native_handle(), name);
#endif
}

}  // namespace

Exchange::~Exchange() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    // The one that is waited for ends; those behind it are not waited for.
    for (Item& item : posted_) {
      for (const WorkPtr& work : item.works) work->abort();
    }
    changed_.notify_all();
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
  for (int step = 1; step < size; ++step) {  // so that not all send to the same rank first
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
    poster_ = std::thread([this] { post(); });
    name_thread(&poster_, "fc-post");
    waiter_ = std::thread([this] { wait(); });
    name_thread(&waiter_, "fc-wait");
  }
  item.tag = next_tag_ = (next_tag_ + 1) % kNumTags;
  started_.push_back(std::move(item));
  changed_.notify_all();
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

void Exchange::post_receives(Item* item) {
  for (const Message& message : item->receives) {
    std::vector<at::Tensor> bytes = as_tensors(message.bytes);
    item->works.push_back(backend_->recv(bytes, message.peer, item->tag));
  }
}

void Exchange::post_sends(Item* item) {
  for (const Message& message : item->sends) {
    std::vector<at::Tensor> bytes = as_tensors(message.bytes);
    item->works.push_back(backend_->send(bytes, message.peer, item->tag));
  }
  copy_own(*item);
}

void Exchange::post() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !started_.empty(); });
    if (started_.empty()) break;
    std::deque<Item> items = std::exchange(started_, {});
    const bool is_open = !stopping_;
    lock.unlock();
    if (is_open) {
      for (Item& item : items) attempt(&item, [this, &item] { post_receives(&item); });
    }
    for (Item& item : items) {
      if (is_open) attempt(&item, [this, &item] { post_sends(&item); });
      lock.lock();
      posted_.push_back(std::move(item));
      changed_.notify_all();
      lock.unlock();
    }
    lock.lock();
  }
  has_posted_all_ = true;
  changed_.notify_all();
}

void Exchange::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return has_posted_all_ || !posted_.empty(); });
    if (posted_.empty()) return;
    Item& item = posted_.front();  // stays there for the destructor
    if (stopping_ && !item.error) item.error = std::make_exception_ptr(std::runtime_error(kClosed));
    lock.unlock();
    attempt(&item, [&item] {
      for (const WorkPtr& work : item.works) {
        if (!work->wait()) throw std::runtime_error(kClosed);
      }
    });
    lock.lock();
    Item ended = std::move(item);
    posted_.pop_front();
    lock.unlock();
    ended.works.clear();  // the backend's hold on the bytes ends before somebody else may use them
    ended.done(ended.error);
    ended = {};
    lock.lock();
  }
}

}  // namespace fusedcomm
