// Where gradients lie in memory: runs of elements, laid end to end.
#pragma once

#include <cstdint>
#include <vector>

namespace fusedcomm {

enum class GradDtype : uint8_t { kFloat32, kBFloat16, kFloat16 };

inline constexpr int64_t grad_nbytes(GradDtype dtype) { return dtype == GradDtype::kFloat32 ? 4 : 2; }

// A contiguous run of gradient elements; `data` need only be aligned to its element.
struct Slice {
  void* data = nullptr;
  int64_t numel = 0;
};

// Slices laid end to end: element i of the stream lives in the slice whose [starts[k], starts[k+1]) holds i.
class Stream {
 public:
  // Empty slices are dropped; a slice that continues the one before it in memory is merged with it.
  void append(void* data, int64_t numel, GradDtype dtype);
  int64_t numel() const { return starts_.back(); }
  GradDtype dtype() const { return dtype_; }
  const std::vector<Slice>& slices() const { return slices_; }
  const std::vector<int64_t>& starts() const { return starts_; }  // one more entry than slices

 private:
  std::vector<Slice> slices_;
  std::vector<int64_t> starts_ = {0};
  GradDtype dtype_ = GradDtype::kFloat32;
};

}  // namespace fusedcomm
