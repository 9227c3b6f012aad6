// Runs requests to a store on a thread of its own. A request may block forever: if the process that hosts the store is
// stopped, not even the store's own timeout ends every request.
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
  // One or more requests to the store. It must own what it captures: after a timeout it goes on when send() has
  // returned.
  using Errand = std::function<void(c10d::Store&)>;

  // The courier uses a clone of `store`, because a blocking call of a client delays all other calls of that client. Its
  // thread makes the clone: if the host of a TCPStore is gone, that waits for the store's whole timeout. Errands that
  // are sent meanwhile wait for the clone; if it fails, they fail.
  explicit Courier(StorePtr store);
  ~Courier() { stop(); }
  Courier(const Courier&) = delete;
  Courier& operator=(const Courier&) = delete;

  // Runs `errand` and waits up to `timeout` for its end. Returns what went wrong, or nothing if it succeeded. Errands
  // run one at a time: while one is late, send() returns at once with a problem. The first errand that throws runs once
  // more, on a new clone of the store, because a failed connection does not recover by itself. An errand must therefore
  // be safe to run twice.
  std::optional<StoreProblem> send(Errand errand, std::chrono::duration<double> timeout);
  // Why no more errands are run: the store could not be cloned, or an errand threw although the store had been cloned
  // after an earlier error. Nothing while errands are run.
  std::optional<std::string> loss() const;
  // Ends the thread, or detaches it if a request blocks. A send() under way returns.
  void stop();

 private:
  struct Desk;
  const std::shared_ptr<Desk> desk_;
  std::thread thread_;
};

}  // namespace fusedcomm
