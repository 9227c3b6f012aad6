#include "gradients/bucket.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>

#include "wire/layout.h"

namespace fusedcomm {
namespace {

std::byte* address_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

}  // namespace

Gradients::Gradients(at::Tensor flat, const std::vector<int64_t>& numels)
    : tensors_({std::move(flat)}), in_one_run_(true), numels_(numels) {
  offsets_.reserve(numels.size());
  for (const int64_t numel : numels) {
    offsets_.push_back(numel_);
    numel_ += numel;
  }
  if (!is_sparse()) origin_ = address_of(front());
}

Gradients::Gradients(std::vector<at::Tensor> apart) : tensors_(std::move(apart)), in_one_run_(false) {
  TORCH_CHECK_VALUE(!tensors_.empty(), "fusedcomm: a bucket has no gradients");
  uintptr_t lowest = UINTPTR_MAX;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    at::Tensor& tensor = tensors_[i];
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(), "fusedcomm: gradient ",
                      i, " of a bucket has sizes ", tensor.sizes(), " and is sparse or has gaps in memory: make it ",
                      "contiguous, or pass a sparse one in a bucket of its own");
    if (tensor.is_complex()) tensor = at::view_as_real(tensor);
    TORCH_CHECK_VALUE(tensor.scalar_type() == front().scalar_type() && tensor.device() == front().device(),
                      "fusedcomm: gradient ", i, " of a bucket is ", tensor.scalar_type(), " on ", tensor.device(),
                      ", the first is ", front().scalar_type(), " on ", front().device(),
                      ": a bucket has one dtype and one device");
    numels_.push_back(tensor.numel());
    numel_ += tensor.numel();
    if (tensor.numel() != 0) lowest = std::min(lowest, reinterpret_cast<uintptr_t>(address_of(tensor)));
  }
  if (lowest == UINTPTR_MAX) lowest = 0;
  origin_ = reinterpret_cast<std::byte*>(lowest - lowest % kAlignNbytes);
  const auto element_nbytes = static_cast<int64_t>(front().element_size());
  for (const at::Tensor& tensor : tensors_) {
    offsets_.push_back(tensor.numel() == 0 ? 0 : (address_of(tensor) - origin_) / element_nbytes);
  }
}

std::vector<at::Tensor> Gradients::storages() const {
  if (is_sparse()) return {front()._indices(), front()._values()};
  return tensors_;
}

at::Tensor Gradients::view(size_t index) const {
  if (in_one_run_) return front().narrow(0, offsets_[index], numels_[index]);
  return tensors_[index].as_strided({numels_[index]}, {1});
}

at::Tensor Gradients::flattened() const {
  if (in_one_run_) return front();
  std::vector<at::Tensor> views;
  views.reserve(size());
  for (size_t i = 0; i < size(); ++i) views.push_back(view(i));
  return at::cat(views);
}

void Gradients::assign(const at::Tensor& flat) const {
  int64_t begin = 0;
  for (size_t i = 0; i < size(); ++i) {
    view(i).copy_(flat.narrow(0, begin, numels_[i]));
    begin += numels_[i];
  }
}

Bucket::Bucket(size_t index_in_pass, bool is_last_of_pass, std::vector<at::Tensor> parameters, GradientsPtr where)
    : index(index_in_pass), is_last(is_last_of_pass), gradients(std::move(where)) {
  const std::vector<int64_t>&numels = gradients->numels(), &offsets = gradients->offsets();
  TORCH_CHECK_VALUE(parameters.size() == numels.size(), "fusedcomm: bucket ", index, " has ", parameters.size(),
                    " parameters and ", numels.size(), " gradients");
  const auto element_nbytes = static_cast<int64_t>(gradients->front().element_size());
  pieces.reserve(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::byte* const origin = gradients->origin();
    pieces.push_back({std::move(parameters[i]), origin ? origin + offsets[i] * element_nbytes : nullptr, numels[i]});
  }
}

}  // namespace fusedcomm
