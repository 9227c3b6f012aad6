// Tells the other ranks that this rank cannot go on with a backward pass. They would otherwise wait for its buckets
// until the process group's timeout.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "transport/store_client.h"

namespace fusedcomm {

class Problem {
 public:
  // `store`: has a prefix that only the ranks of one reducer use.
  explicit Problem(StorePtr store) : client_(std::move(store), std::chrono::seconds(2)) {}

  // Publishes `text`, unless another rank was first.
  void publish(const std::string& text);
  // Tells that `rank` waits in backward pass number `pass`: a rank that waits for it elsewhere then knows where it is.
  void note_pass(int rank, int64_t pass);
  // What a rank has published; empty if none has, or if the store does not answer.
  std::string read();

 private:
  // Returns whether the request has succeeded: if not, the others learn by the group's timeout.
  bool ask(StoreClient::Request request);

  StoreClient client_;
};

}  // namespace fusedcomm
