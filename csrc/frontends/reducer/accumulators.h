// Hooks on the nodes of autograd that add up the gradients of parameters. The hooks are native: they take no GIL.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace fusedcomm {

// What synchronizes the gradient of a parameter now: a GradReducer or a DistributedDataParallel. Empty if nothing does.
std::string synchronized_by(const at::Tensor& parameter);

// The hooks of one reducer. Not thread-safe. They stay until remove().
class Accumulators {
 public:
  // Called with the index of a parameter whose gradient has been added up, and the tensor that was added to it.
  using OnGradient = std::function<void(size_t index, const at::Tensor& added)>;

  // `parameters`: also those that are frozen now. Something else may synchronize none of them.
  Accumulators(const std::vector<at::Tensor>& parameters, OnGradient on_gradient);
  ~Accumulators() { remove(); }
  Accumulators(const Accumulators&) = delete;
  Accumulators& operator=(const Accumulators&) = delete;

  // What synchronizes the parameter beside this reducer; empty if nothing does. Cheap unless hooks have been added
  // since the last call.
  std::string taken_by(size_t index);
  // Whether the parameter's gradients still come to its hook. Another dtype or device gives a parameter a new node.
  bool sees(size_t index, const at::Tensor& parameter) const;
  void remove();

 private:
  // A pointer; its type differs between versions of torch.
  using NodePtr = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  struct Hooked {
    NodePtr node;  // held, because a parameter only refers to it weakly
    uintptr_t key = 0;
    size_t num_hooks = 0;  // of the node, when they were last looked through
  };
  std::vector<Hooked> hooked_;
};

}  // namespace fusedcomm
