// Gradients in memory: contiguous runs of elements.
#pragma once

#include <cstdint>
#include <vector>

namespace fusedcomm {

enum class GradDtype : uint8_t { kFloat32, kBFloat16, kFloat16 };

inline constexpr int64_t grad_nbytes(GradDtype dtype) { return dtype == GradDtype::kFloat32 ? 4 : 2; }

// A contiguous run of gradient elements. `data` need only be aligned to the element. Null: a hole, whose elements are
// zeros that are never written.
struct Slice {
  void* data = nullptr;
  int64_t numel = 0;
};

// Slices one after another. Element i of the list is in slice k if starts[k] ≤ i < starts[k + 1].
class SliceList {
 public:
  // Drops an empty slice. data: null for a hole. Merges a slice with the one before it if it follows that one in
  // memory. Throws std::invalid_argument if numel is negative or dtype is not the list's.
  void append(void* data, int64_t numel, GradDtype dtype);
  int64_t numel() const { return starts_.back(); }
  GradDtype dtype() const { return dtype_; }
  const std::vector<Slice>& slices() const { return slices_; }
  const std::vector<int64_t>& starts() const { return starts_; }  // one entry more than slices()

 private:
  std::vector<Slice> slices_;
  std::vector<int64_t> starts_ = {0};
  GradDtype dtype_ = GradDtype::kFloat32;
};

}  // namespace fusedcomm
