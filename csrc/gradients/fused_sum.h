// Sums tensors over ranks with the engine, in the wires of their names.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gradients/synchronizer.h"

namespace fusedcomm {

// The name of a tensor, not its memory, says which wire it has, whether it is exact, and which residual is its own. One
// thread at a time may call it.
class FusedSum {
 public:
  explicit FusedSum(std::shared_ptr<Synchronizer> synchronizer) : synchronizer_(std::move(synchronizer)) {}

  // Replaces the tensors by their mean over the ranks × factor. Every rank must make the same calls in the same order,
  // with the same names, shapes, dtypes and factors. Returns at once.
  //
  // names: of the tensors; what has a name has the same shape and dtype in every call.
  // tensors: fp32, bf16 or fp16, all of one dtype and on one device, dense. They are read and written where they lie.
  // factor: the world size for a sum. Sums of whole numbers that the wire can hold are exact.
  // ends_step: whether the statistics count a step with this sum.
  //
  // Returns the future of the sum: on an accelerator, a stream that waits for it has the sum.
  //
  // Throws ValueError if the tensors are not as said above.
  FuturePtr run(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors, double factor,
                bool ends_step = false);

  const std::shared_ptr<Synchronizer>& synchronizer() const { return synchronizer_; }

 private:
  // A tensor without memory that stands for the parameter of this name.
  const at::Tensor& parameter(const std::string& name, const at::Tensor& like);
  // The index of the record of these parameters, which stays the same while they come together.
  size_t index_of(const std::vector<at::Tensor>& parameters, double factor);

  const std::shared_ptr<Synchronizer> synchronizer_;
  std::unordered_map<std::string, at::Tensor> parameters_;  // by name
  // The index of what has come together, and its factor.
  std::map<std::pair<std::vector<const void*>, double>, size_t> indices_;
};

}  // namespace fusedcomm
