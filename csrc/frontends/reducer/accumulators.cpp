#include "frontends/reducer/accumulators.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <typeinfo>

namespace fusedcomm {
namespace {

class GradientHook : public torch::autograd::FunctionPostHook {
 public:
  GradientHook(std::shared_ptr<const Accumulators::OnGradient> on_gradient, size_t index)
      : on_gradient_(std::move(on_gradient)), index_(index) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    (*on_gradient_)(index_, inputs.empty() ? at::Tensor() : inputs.front());
    return outputs;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(false,
                "fusedcomm: compiled autograd would compile the reducer's hooks, which cannot be compiled: leave out "
                "torch._dynamo.config.compiled_autograd. torch.compile of the module itself is supported");
  }

 private:
  const std::shared_ptr<const Accumulators::OnGradient> on_gradient_;
  const size_t index_;
};

// Works for a frozen parameter, too: the node exists from now on, whether or not gradients come.
auto accumulator_of(const at::Tensor& parameter) {
  const bool is_frozen = !parameter.requires_grad();
  if (is_frozen) parameter.set_requires_grad(true);
  auto node = torch::autograd::impl::grad_accumulator(parameter);
  if (is_frozen) parameter.set_requires_grad(false);
  return node;
}

// Empty if none of the node's hooks, except the one with this key, synchronizes gradients.
std::string taken_by_hook(const torch::autograd::Node& node, uintptr_t own_key) {
  for (const auto& hook : node.post_hooks()) {
    if (reinterpret_cast<uintptr_t>(hook.get()) == own_key) continue;
    if (dynamic_cast<const GradientHook*>(hook.get()) != nullptr) return "another fusedcomm.GradReducer";
    // The type is compared by its name, because its header includes all of compiled autograd.
    if (c10::demangle(typeid(*hook).name()) == "torch::autograd::utils::LambdaPostHook")
      return "a DistributedDataParallel";
  }
  return "";
}

}  // namespace

std::string synchronized_by(const at::Tensor& parameter) {
  if (!torch::autograd::isDifferentiableType(parameter.scalar_type())) return "";  // as quantized weights
  return taken_by_hook(*accumulator_of(parameter), /*own_key=*/0);
}

Accumulators::Accumulators(const std::vector<at::Tensor>& parameters, OnGradient on_gradient) {
  hooked_.reserve(parameters.size());
  const auto shared = std::make_shared<const OnGradient>(std::move(on_gradient));
  for (size_t i = 0; i < parameters.size(); ++i) {
    Hooked hooked{accumulator_of(parameters[i])};
    hooked.key = hooked.node->add_post_hook(std::make_unique<GradientHook>(shared, i));
    hooked.num_hooks = hooked.node->post_hooks().size();
    hooked_.push_back(std::move(hooked));
  }
}

std::string Accumulators::taken_by(size_t index) {
  Hooked& hooked = hooked_[index];
  const size_t num_hooks = hooked.node->post_hooks().size();
  if (num_hooks == hooked.num_hooks) return "";
  hooked.num_hooks = num_hooks;
  return taken_by_hook(*hooked.node, hooked.key);
}

bool Accumulators::sees(size_t index, const at::Tensor& parameter) const {
  return torch::autograd::impl::try_get_grad_accumulator(parameter) == hooked_[index].node;
}

void Accumulators::remove() {
  for (const Hooked& hooked : hooked_) hooked.node->del_post_hook(hooked.key);
  hooked_.clear();
}

}  // namespace fusedcomm
