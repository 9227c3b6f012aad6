#include "gradients/bucket.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "engine/stage.h"
#include "wire/layout.h"

namespace fusedcomm {
namespace {

std::byte* address_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

}  // namespace

Gradients::Gradients(at::Tensor flat, std::vector<SlicePlace> places, int64_t num_rows)
    : in_one_run_(true), places_(std::move(places)), num_rows_(num_rows) {
  tensors_.push_back(std::move(flat));
  for (const SlicePlace& place : places_) numel_ += num_rows * place.numel;
  if (!is_sparse()) origin_ = address_of(front());
}

Gradients::Gradients(std::vector<at::Tensor> apart) : tensors_(apart.begin(), apart.end()), in_one_run_(false) {
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
    numel_ += tensor.numel();
    if (tensor.numel() != 0) lowest = std::min(lowest, reinterpret_cast<uintptr_t>(address_of(tensor)));
  }
  if (lowest == UINTPTR_MAX) lowest = 0;
  origin_ = reinterpret_cast<std::byte*>(lowest - lowest % kAlignNbytes);
  const auto element_nbytes = static_cast<int64_t>(front().element_size());
  places_.reserve(tensors_.size());
  for (const at::Tensor& tensor : tensors_) {
    places_.push_back({tensor.numel() == 0 ? 0 : (address_of(tensor) - origin_) / element_nbytes,
                       static_cast<int64_t>(tensor.numel())});
  }
}

at::Tensor Gradients::view(size_t index) const {
  if (in_one_run_) return front().narrow(0, places_[index].offset, places_[index].numel);
  return tensors_[index].as_strided({places_[index].numel}, {1});
}

at::Tensor Gradients::flattened() const {
  if (in_one_run_) return front();
  std::vector<at::Tensor> views;
  views.reserve(size());
  for (size_t i = 0; i < size(); ++i) views.push_back(view(i));
  return at::cat(views);
}

void Gradients::zero() const {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& tensor : tensors_) is_sparse() ? tensor._values().zero_() : tensor.zero_();
}

void Gradients::assign(const at::Tensor& flat) const {
  int64_t begin = 0;
  for (size_t i = 0; i < size(); ++i) {
    view(i).copy_(flat.narrow(0, begin, places_[i].numel));
    begin += places_[i].numel;
  }
}

Bucket::Bucket(size_t index_of_bucket, bool is_last_one, std::vector<at::Tensor> parameters_in_order,
               GradientsPtr where, Kind what)
    : index(index_of_bucket),
      is_last(is_last_one),
      parameters(std::move(parameters_in_order)),
      gradients(std::move(where)),
      kind(std::move(what)) {
  TORCH_CHECK_VALUE(parameters.size() == gradients->size(), "fusedcomm: ", bucket_name(index), " has ",
                    parameters.size(), " parameters and ", gradients->size(), " gradients");
}

}  // namespace fusedcomm
