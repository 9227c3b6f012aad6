#include "codec/slices.h"

#include <cstddef>
#include <stdexcept>
#include <string>

namespace fusedcomm {

void SliceList::append(void* data, int64_t numel, GradDtype dtype) {
  if (numel < 0) throw std::invalid_argument("a slice of " + std::to_string(numel) + " elements is not possible");
  if (numel == 0) return;
  if (slices_.empty()) {
    dtype_ = dtype;
  } else if (dtype != dtype_) {
    throw std::invalid_argument("all slices of a list must have one dtype");
  }
  const int64_t end = starts_.back() + numel;
  if (!slices_.empty()) {
    Slice& last = slices_.back();
    const bool is_hole = data == nullptr;
    if (is_hole
            ? last.data == nullptr
            : last.data != nullptr && static_cast<std::byte*>(last.data) + last.numel * grad_nbytes(dtype) == data) {
      last.numel += numel;
      starts_.back() = end;
      return;
    }
  }
  slices_.push_back({data, numel});
  starts_.push_back(end);
}

}  // namespace fusedcomm
