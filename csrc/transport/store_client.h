// Requests to a store that may never be answered: its host may be stopped or cut off.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fusedcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// A TCPStore over a connection of its own, which a wait of other code does not delay; any other store as it is. Each
// request has a thread, which knows nothing of Python: it may end while the interpreter does.
class StoreClient {
 public:
  // It must own what it captures, because it may go on when ask() has returned and when this object has ended.
  using Request = std::function<void(c10d::Store&)>;

  StoreClient(StorePtr store, std::chrono::milliseconds timeout);

  // Runs `request`. The first one connects, which takes the store's own timeout if its host is gone. If `request`
  // throws, connects again, repeats it, and throws what it throws then. Returns false if it has not ended within the
  // timeout: the next one then throws what it has thrown. Returns false without beginning it if an earlier one has not
  // ended, or if the system has no thread left.
  bool ask(Request request);
  // The error after which the last request has connected again; empty if there was none.
  std::string problem() const;

 private:
  struct Desk;
  std::shared_ptr<Desk> desk_;
  std::chrono::milliseconds timeout_;
};

}  // namespace fusedcomm
