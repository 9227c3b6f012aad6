#include "gradients/fused_sum.h"

#include "gradients/grad_dtype.h"

namespace fusedcomm {
namespace {

void check(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK_VALUE(!names.empty() && names.size() == tensors.size(), "fusedcomm: a sum in a wire has ", names.size(),
                    " names and ", tensors.size(), " tensors: give as many names as tensors, at least one");
  for (size_t i = 0; i < names.size(); ++i) {
    TORCH_CHECK_VALUE(has_wire_format(tensors[i].scalar_type()), "fusedcomm: ", names[i], " is ",
                      tensors[i].scalar_type(),
                      ", which no wire carries: use float32, bfloat16 or float16, or no wire");
  }
}

}  // namespace

FuturePtr FusedSum::run(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors, double factor,
                        bool ends_step) {
  check(names, tensors);
  auto gradients = std::make_shared<const Gradients>(tensors);
  std::vector<at::Tensor> parameters;
  parameters.reserve(names.size());
  for (size_t i = 0; i < names.size(); ++i) parameters.push_back(parameter(names[i], gradients->tensors()[i]));
  const size_t index = index_of(parameters, factor);
  return synchronizer_->run({index, ends_step, std::move(parameters), std::move(gradients), NamedSum{factor}});
}

const at::Tensor& FusedSum::parameter(const std::string& name, const at::Tensor& like) {
  at::Tensor& parameter = parameters_[name];
  if (parameter.defined()) {
    TORCH_CHECK_VALUE(parameter.sizes() == like.sizes() && parameter.scalar_type() == like.scalar_type(),
                      "fusedcomm: ", name, " is ", like.scalar_type(), " of shape ", like.sizes(), ", and was ",
                      parameter.scalar_type(), " of shape ", parameter.sizes(),
                      ": convert parameters before, or attach anew");
    return parameter;
  }
  parameter = at::empty({}, like.options().requires_grad(false)).expand(like.sizes());
  synchronizer_->know(parameter, name);
  return parameter;
}

size_t FusedSum::index_of(const std::vector<at::Tensor>& parameters, double factor) {
  std::vector<const void*> key;
  key.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) key.push_back(parameter.unsafeGetTensorImpl());
  return indices_.emplace(std::make_pair(std::move(key), factor), indices_.size()).first->second;
}

}  // namespace fusedcomm
