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
// `is_sparse`: whether gradients of the parameter are sparse. A sparse gradient is returned as it is.
BucketGradient bucket_gradient(const at::Tensor& parameter, bool is_sparse, bool is_kept, const at::Tensor& arriving);

// Gives the parameter the mean. `result`: the tensor of its BucketGradient, or the mean of a sparse one.
void write_back(const at::Tensor& parameter, const at::Tensor& result);

// Tells autograd that the bucket has written to the parameter's gradient.
void mark_written(const at::Tensor& parameter);

}  // namespace fusedcomm
