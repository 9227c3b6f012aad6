#include "transport/link_timer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace fusedcomm {

double all_to_all_s(const BackendPtr& backend, int64_t nbytes, int rounds) {
  TORCH_CHECK(rounds >= 2, "fusedcomm: timing a link takes at least two rounds, not ", rounds);
  const auto bytes = at::TensorOptions().dtype(at::kByte);
  at::Tensor send = at::zeros({backend->getSize() * nbytes}, bytes), receive = at::zeros_like(send);
  std::vector<int64_t> equal_parts;
  std::vector<double> seconds;
  for (int round = 0; round < rounds; ++round) {
    const auto began = std::chrono::steady_clock::now();
    backend->alltoall_base(receive, send, equal_parts, equal_parts)->wait();
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  // Why not the shortest: ranks do not begin together, so one may find all messages there already, and a shaped link
  // carries its first bytes faster. Why not the median: a thread that wakes late adds milliseconds to about every
  // fourth round.
  std::nth_element(seconds.begin(), seconds.begin() + 1, seconds.end());
  std::vector<at::Tensor> second{at::full({1}, seconds[1], at::kDouble)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  backend->allreduce(second, options)->wait();
  return second[0].item<double>();
}

}  // namespace fusedcomm
