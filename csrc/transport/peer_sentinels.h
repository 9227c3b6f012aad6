// Tells which ranks of a gloo backend are lost. Gloo says so only to whoever has a message under way with them, so each
// peer has a receive that it never answers.
#pragma once

#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "transport/wire_tensor.h"

namespace fusedcomm {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// One thread at a time.
class PeerSentinels {
 public:
  // `tag`: of messages that nobody sends on this backend.
  PeerSentinels(BackendPtr backend, int tag);
  PeerSentinels(const PeerSentinels&) = delete;
  PeerSentinels& operator=(const PeerSentinels&) = delete;

  // Ranks whose connection has ended since the last look, and what the backend says of it. Returns at once.
  std::vector<std::pair<int, std::exception_ptr>> look();

 private:
  struct Sentinel {
    int peer;
    c10::intrusive_ptr<c10d::Work> work;  // null: it could not be posted
    std::exception_ptr error;             // why
    bool ended = false;
  };
  const BackendPtr backend_;
  std::vector<Sentinel> sentinels_;
};

}  // namespace fusedcomm
