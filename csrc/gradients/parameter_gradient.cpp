#include "gradients/parameter_gradient.h"

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>

namespace fusedcomm {
namespace {

// Whether `tensor` is strided, uses `storage` and is not `gradient` itself.
bool is_another_user(const at::Tensor& tensor, const c10::Storage& storage, const at::Tensor& gradient) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl() &&
         tensor.unsafeGetTensorImpl() != gradient.unsafeGetTensorImpl();
}

// The tensor that `view` is a view of, if nothing but `view` holds it; else undefined.
at::Tensor base_held_by(const at::Tensor& view) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(view);
  if (meta == nullptr || !meta->has_bw_view()) return {};
  const at::Tensor& base = meta->get_backward_view().base_;
  return base.use_count() == 1 ? base : at::Tensor();
}

// Strided tensors that use the memory of `gradient`, without `arriving` and what ends with it: a linear layer's
// gradient arrives as a view of its transpose.
size_t num_users(const at::Tensor& gradient, const at::Tensor& arriving) {
  const c10::Storage& storage = gradient.storage();
  size_t count = storage.use_count();
  if (!is_another_user(arriving, storage, gradient)) return count;
  count -= 1;
  if (is_another_user(base_held_by(arriving), storage, gradient)) count -= 1;
  return count;
}

// Uninitialized, in the order of memory that autograd gives gradients of this parameter.
at::Tensor empty_gradient(const at::Tensor& parameter) {
  const at::TensorOptions options = parameter.options().requires_grad(false);
  if (parameter.is_non_overlapping_and_dense()) {
    return at::empty_strided(parameter.sizes(), parameter.strides(), options);
  }
  return at::empty(parameter.sizes(), options);
}

// A dense copy of `gradient`, which may be sparse, in the order of memory of gradients of this parameter.
BucketGradient copied(const at::Tensor& parameter, const at::Tensor& gradient) {
  return {empty_gradient(parameter).copy_(gradient.is_sparse() ? gradient.to_dense() : gradient), true};
}

}  // namespace

BucketGradient zero_gradient(const at::Tensor& parameter, int64_t sparse_dims) {
  if (sparse_dims == 0) return {empty_gradient(parameter).zero_(), true};
  return {at::_sparse_coo_tensor_with_dims(sparse_dims, parameter.dim() - sparse_dims, parameter.sizes(),
                                           parameter.options().requires_grad(false).layout(at::kSparse)),
          true};
}

BucketGradient bucket_gradient(const at::Tensor& parameter, int64_t sparse_dims, bool is_kept,
                               const at::Tensor& arriving) {
  const at::NoGradGuard no_grad;
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return zero_gradient(parameter, sparse_dims);
  if (sparse_dims != 0) return {gradient.is_sparse() ? gradient : gradient.to_sparse(sparse_dims), true};
  if (gradient.is_sparse()) return copied(parameter, gradient);
  const bool lies_as_sent = !gradient.is_conj() && !gradient.is_neg() && gradient.is_non_overlapping_and_dense() &&
                            torch::autograd::utils::obeys_layout_contract(gradient, parameter);
  if (!is_kept && lies_as_sent && num_users(gradient, arriving) == 1) return {gradient, false};
  return copied(parameter, gradient);
}

void write_back(const at::Tensor& parameter, const at::Tensor& result, int64_t sparse_dims) {
  const at::NoGradGuard no_grad;
  at::Tensor& gradient = parameter.mutable_grad();
  if (gradient.defined()) sparse_dims = gradient.is_sparse() ? gradient.sparse_dim() : 0;
  const bool takes_elements = gradient.defined() && !gradient.is_sparse() && !result.is_sparse() &&
                              at::has_internal_overlap(gradient) != at::MemOverlap::Yes;
  if (takes_elements) {
    gradient.copy_(result);
  } else {
    gradient = sparse_dims != 0 && !result.is_sparse() ? result.to_sparse(sparse_dims) : result;
  }
}

void mark_written(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (gradient.defined() && !gradient.is_inference()) torch::autograd::impl::bump_version(gradient);
}

}  // namespace fusedcomm
