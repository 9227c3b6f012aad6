// Sums of so few bytes that they travel with the messages about them, on the CPU.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fusedcomm::horovod {

enum class Op : int8_t { kAverage, kSum, kMin, kMax, kProduct };

struct Reduction {
  Op op = Op::kSum;
  double prescale = 1, postscale = 1;
};

// A rank's part: contiguous tensors of one dtype.
std::string small_part(const Reduction& as, const std::vector<at::Tensor>& inputs);
// The reduction of all parts, in the order of ranks. Parts of ranks that have joined are empty.
std::string small_sum(const Reduction& as, const std::vector<std::string>& parts);
// Writes the result. size: the number of ranks.
void write_small(const Reduction& as, const std::string& sum, int64_t size, const std::vector<at::Tensor>& outputs);

}  // namespace fusedcomm::horovod
