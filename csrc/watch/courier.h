// Calls to a store on a thread of their own. A call may block for ever: the process that hosts the store may be
// stopped, and then not even the store's own timeout ends all calls.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "watch/store_problem.h"

namespace fusedcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

class Courier {
 public:
  // It must own what it captures: if it takes too long, it goes on after send() has returned.
  using Errand = std::function<void(c10d::Store&)>;

  // `store` belongs to the courier alone: a client's blocking call keeps other calls of the same client waiting.
  explicit Courier(StorePtr store);
  ~Courier() { stop(); }
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // Returns what went wrong, if anything did. One errand at a time: while one is late, no other begins. The first
  // errand that throws is run once more, on a new clone of the store, since a failed connection does not come back by
  // itself: an errand must be one that can be run twice.
  std::optional<StoreProblem> send(Errand errand, std::chrono::duration<double> timeout);
  // Why no errand is run any more: the store threw again. Empty: errands are run.
  std::optional<std::string> loss() const;
  // Ends the thread, or leaves it to itself if the store does not let it go. A send() under way returns.
  void stop();

 private:
  struct Desk;
  const std::shared_ptr<Desk> desk_;
  std::thread thread_;
};

}  // namespace fusedcomm
