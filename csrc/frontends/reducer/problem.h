// Tells the other ranks that this rank cannot go on with a backward pass. They would otherwise wait for its buckets
// until the process group's timeout.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "watch/courier.h"

namespace fusedcomm {

class Problem {
 public:
  // `store`: has a prefix that only the ranks of one reducer use.
  explicit Problem(StorePtr store) : store_(std::move(store)) {}

  // Publishes `text`, unless another rank was first. A store that does not answer within kStoreTimeout is left alone.
  void publish(const std::string& text);
  // Tells that `rank` waits in backward pass number `pass`: a rank that waits for it elsewhere then knows where it is.
  void note_pass(int rank, int64_t pass);
  // What a rank has published; empty if none has, or if the store does not answer within kStoreTimeout.
  std::string read();

 private:
  static constexpr std::chrono::seconds kStoreTimeout{2};

  // The thread that asks the store: made when it is first needed. If the store cannot be cloned, as one that was
  // written in Python, its errands fail, and the others learn by the group's timeout.
  Courier& courier();

  StorePtr store_;
  std::unique_ptr<Courier> courier_;
};

}  // namespace fusedcomm
