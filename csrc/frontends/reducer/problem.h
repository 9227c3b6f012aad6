// Tells the other ranks that this rank cannot go on with a backward pass. They would otherwise wait for its buckets
// until the process group's timeout.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fusedcomm {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

class Problem {
 public:
  // `store`: has a prefix that only the ranks of one reducer use.
  explicit Problem(StorePtr store);

  // Publishes `text`, unless another rank was first.
  void publish(const std::string& text);
  // Tells that `rank` waits in backward pass number `pass`: a rank that waits for it elsewhere then knows where it is.
  void note_pass(int rank, int64_t pass);
  // What a rank has published; empty if none has, or if the store does not answer.
  std::string read();

 private:
  // A request to the store may never end, and then goes on when its function here has returned: it must own what it
  // captures.
  using Request = std::function<void(c10d::Store&)>;
  struct Desk;

  // Runs `request` with a connection of this object's own, on a thread, and waits two seconds for it at most. Returns
  // whether it has succeeded. It is not begun while an earlier one is late. If the store cannot be cloned, as one that
  // was written in Python, it fails, and the others learn by the group's timeout.
  bool ask(Request request);

  std::shared_ptr<Desk> desk_;
};

}  // namespace fusedcomm
