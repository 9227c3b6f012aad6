#include "frontends/reducer/gradient.h"

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>

namespace fusedcomm {
namespace {

// Strided tensors that use the memory of `gradient`, without `arriving`.
size_t num_users(const at::Tensor& gradient, const at::Tensor& arriving) {
  const c10::Storage& storage = gradient.storage();
  const bool arrives_there = arriving.defined() && arriving.layout() == at::kStrided && arriving.has_storage() &&
                             arriving.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl() &&
                             arriving.unsafeGetTensorImpl() != gradient.unsafeGetTensorImpl();
  return storage.use_count() - (arrives_there ? 1 : 0);
}

// Uninitialized, in the order of memory that autograd gives gradients of this parameter.
at::Tensor empty_gradient(const at::Tensor& parameter) {
  const at::TensorOptions options = parameter.options().requires_grad(false);
  if (parameter.is_non_overlapping_and_dense()) {
    return at::empty_strided(parameter.sizes(), parameter.strides(), options);
  }
  return at::empty(parameter.sizes(), options);
}

}  // namespace

BucketGradient zero_gradient(const at::Tensor& parameter, bool is_sparse) {
  const at::NoGradGuard no_grad;
  if (!is_sparse) return {empty_gradient(parameter).zero_(), true};
  // As an embedding's: indices of rows.
  return {at::_sparse_coo_tensor_with_dims(1, parameter.dim() - 1, parameter.sizes(),
                                           parameter.options().requires_grad(false).layout(at::kSparse)),
          true};
}

BucketGradient bucket_gradient(const at::Tensor& parameter, bool is_sparse, bool is_kept, const at::Tensor& arriving) {
  const at::NoGradGuard no_grad;
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return zero_gradient(parameter, is_sparse);
  if (gradient.is_sparse()) return {gradient, true};
  const bool lies_as_sent = !gradient.is_conj() && !gradient.is_neg() && gradient.is_non_overlapping_and_dense() &&
                            torch::autograd::utils::obeys_layout_contract(gradient, parameter);
  if (!is_kept && lies_as_sent && num_users(gradient, arriving) == 1) return {gradient, false};
  return {empty_gradient(parameter).copy_(gradient), true};
}

void write_back(const at::Tensor& parameter, const at::Tensor& result) {
  const at::NoGradGuard no_grad;
  at::Tensor& gradient = parameter.mutable_grad();
  const bool takes_elements = gradient.defined() && !gradient.is_sparse() && !result.is_sparse() &&
                              at::has_internal_overlap(gradient) != at::MemOverlap::Yes;
  if (takes_elements) {
    gradient.copy_(result);
  } else {
    gradient = result;
  }
}

void mark_written(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (gradient.defined() && !gradient.is_inference()) torch::autograd::impl::bump_version(gradient);
}

}  // namespace fusedcomm
