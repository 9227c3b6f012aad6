// Calls to a store on a thread of their own, since one may block for ever: the process that hosts the store may be
// stopped, and then not even a store's own timeout ends all of its calls.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fusedcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

class Courier {
 public:
  // What it captures must be its own: if it takes too long it goes on after send() has returned.
  using Errand = std::function<void(c10d::Store&)>;

  // `store` belongs to the courier alone: a client's blocking call keeps others of the same client waiting.
  explicit Courier(StorePtr store);
  ~Courier() { stop(); }
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // Returns what went wrong, empty if nothing did. One errand at a time: while one is late, others are not begun. The
  // first that throws is run once more, on a new clone of the store: a connection that failed does not come back by
  // itself. So an errand must be one that can be run twice.
  std::string send(Errand errand, std::chrono::duration<double> limit);
  // Whether the last errand has thrown, or the one under way has and is run once more.
  bool has_failed() const;
  // Why no errand is run any more: the store threw again. Empty: they are.
  std::string loss() const;
  // Ends the thread, or leaves it to itself if the store does not let it go. A send() under way returns.
  void stop();

 private:
  struct Desk;
  const std::shared_ptr<Desk> desk_;
  std::thread thread_;
};

}  // namespace fusedcomm
