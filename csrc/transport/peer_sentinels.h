// Finds the lost ranks of a gloo backend. Gloo reports a lost rank only to a message under way with it, so each peer
// has a posted receive that it never answers.
#pragma once

#include <exception>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "transport/wire_tensor.h"

namespace fusedcomm {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Not thread-safe: only one thread at a time may use it.
class PeerSentinels {
 public:
  // `tag`: a tag that no message on this backend has.
  PeerSentinels(BackendPtr backend, int tag);
  // If nothing else holds the backend, it ends here: gloo's waits for its collectives, which may wait for a rank that
  // takes no part, until the process group's timeout. This waits some seconds at most. Call it without the GIL.
  ~PeerSentinels();
  PeerSentinels(const PeerSentinels&) = delete;
  PeerSentinels& operator=(const PeerSentinels&) = delete;

  // Returns the ranks whose connections have ended since the last look, each with the backend's error. Does not wait.
  std::vector<std::pair<int, std::exception_ptr>> look();

 private:
  struct Sentinel {
    int peer;
    c10::intrusive_ptr<c10d::Work> work;  // null: the receive could not be posted
    std::exception_ptr error;             // why it could not be posted
    bool ended = false;                   // whether look() has returned the peer
  };
  BackendPtr backend_;
  std::vector<Sentinel> sentinels_;
};

}  // namespace fusedcomm
