// What a bucket reads and writes for one parameter: its gradient where it lies, or a copy that goes back when the
// backward pass ends.
#pragma once

#include <ATen/ATen.h>

namespace fusedcomm {

struct BucketGradient {
  at::Tensor tensor;
  // False if `tensor` is the memory of the parameter's gradient.
  bool is_copy = false;
};

// `is_kept`: whether the parameter's gradient must not change before write_back(). `arriving`: the tensor that autograd
// has just added to the gradient and still holds; undefined if there is none.
//
// A copy is made if
//   - there is no gradient: it is zeros;
//   - `is_kept`;
//   - the gradient has other strides than the parameter, gaps in memory or a lazy conjugation: every rank must send its
//     elements in the same order;
//   - something else uses the gradient's memory: the backward pass may still read it, while the bucket writes the mean
//     there.
//
// `sparse_dims`: of gradients of the parameter that travel as sparse tensors; 0: they travel as dense ones. A gradient
// of the other kind is converted.
BucketGradient bucket_gradient(const at::Tensor& parameter, int64_t sparse_dims, bool is_kept,
                               const at::Tensor& arriving);

// Zeros in the place of the parameter's gradient, a copy; without elements if it is sparse.
BucketGradient zero_gradient(const at::Tensor& parameter, int64_t sparse_dims);

// Gives the parameter the mean. `result`: the tensor of its BucketGradient, or the mean of a sparse one. A gradient
// that was sparse stays so, and one that was not there gets `sparse_dims`.
void write_back(const at::Tensor& parameter, const at::Tensor& result, int64_t sparse_dims);

// Tells autograd that the bucket has written to the parameter's gradient.
void mark_written(const at::Tensor& parameter);

}  // namespace fusedcomm
