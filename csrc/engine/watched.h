// What a watch sees of an engine: its board, and its first failure, whose text the watch completes. The watch is a
// thread of Python's (fusedcomm/ranks/watch.py). A failing thread waits for it here, without the interpreter and no
// longer than `limit`: a watch that cannot run, since another thread holds the interpreter, does not hold back an
// error.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "devices/device.h"
#include "engine/board.h"

namespace fusedcomm {

class Watched {
 public:
  using Seconds = std::chrono::duration<double>;

  // limit: how long explain() waits; 0: it does not wait.
  Watched(std::shared_ptr<Board> board, std::shared_ptr<const Device> device, Seconds limit)
      : board_(std::move(board)), device_(std::move(device)), limit_(limit) {}
  Watched(const Watched&) = delete;
  Watched& operator=(const Watched&) = delete;

  // Returns what the watch knows of the other ranks after this failure, for people; empty if it has ended, or has found
  // nothing within `limit`. Later failures get the answer to the first one.
  std::string explain(const std::string& failure) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!failure_) failure_ = failure;
    changed_.notify_all();
    changed_.wait_for(lock, limit_, [this] { return has_ended_ || explanation_; });
    return explanation_.value_or("");
  }
  // Ends the watch: a call of explain() or wait() under way returns.
  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    has_ended_ = true;
    changed_.notify_all();
  }

  // For the watch's thread only: the functions below.

  // Call it once on the thread, before the others.
  void enter_thread() const { device_->enter_watching_thread(); }
  // The board. Asks the device only about a job that has not moved for `still`.
  Board::View view(Seconds still) const {
    return board_->view(Board::Clock::now() - std::chrono::duration_cast<Board::Clock::duration>(still));
  }
  // Waits for `timeout`. `for_failure`: or until there is a failure without an explanation. Returns false as soon as
  // the watch has to end.
  bool wait(Seconds timeout, bool for_failure) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, timeout, [&] { return has_ended_ || (for_failure && failure_ && !explanation_); });
    return !has_ended_;
  }
  // The first failure; nothing if there is none.
  std::optional<std::string> failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }
  void answer(std::string explanation) {
    std::lock_guard<std::mutex> lock(mutex_);
    explanation_ = std::move(explanation);
    changed_.notify_all();
  }

 private:
  const std::shared_ptr<Board> board_;
  const std::shared_ptr<const Device> device_;
  const Seconds limit_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool has_ended_ = false;
  std::optional<std::string> failure_, explanation_;
};

}  // namespace fusedcomm
