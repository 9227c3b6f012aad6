// How the codec walks a message: by units of work, which are pieces of a part's sections, and by the slices that
// hold the elements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codec/args.h"
#include "codec/kernel_table.h"

namespace fusedcomm {

// Elements in a unit. A multiple of every block, large enough that handing a unit to a thread costs little, and small
// enough that several threads can share a 1 MiB chunk.
inline constexpr int64_t kUnitNumel = 32 << 10;
static_assert(kUnitNumel % kMaxBlockNumel == 0, "units must fall on the block grid");

inline Format format_of(Wire wire) {
  return wire == Wire::kBf16 ? Format::kBf16 : wire == Wire::kFp16 ? Format::kFp16 : Format::kFp32;
}

inline Format format_of(GradDtype dtype) {
  return dtype == GradDtype::kBFloat16 ? Format::kBf16 : dtype == GradDtype::kFloat16 ? Format::kFp16 : Format::kFp32;
}

inline int index_of(Format format) { return static_cast<int>(format); }

// ---- units of work

// Elements [first, first + numel) of one section of one part, padding included.
struct Unit {
  int64_t part;
  bool exact;
  int64_t first;
  int64_t numel;
};

// The units of a chunk: for each part those of its exact section, then those of its lossy section.
class Units {
 public:
  Units(const PartLayout& part, int64_t num_parts)
      : part_(part),
        num_exact_(ceil_div(part.exact_numel, kUnitNumel)),
        num_per_part_(num_exact_ + ceil_div(part.lossy_numel, kUnitNumel)),
        count_(num_per_part_ * num_parts) {}

  int64_t count() const { return count_; }

  Unit operator[](int64_t index) const {
    const int64_t within = index % num_per_part_;
    const bool exact = within < num_exact_;
    const int64_t first = (exact ? within : within - num_exact_) * kUnitNumel;
    const int64_t section_numel = exact ? part_.exact_numel : part_.lossy_numel;
    return {index / num_per_part_, exact, first, std::min(kUnitNumel, section_numel - first)};
  }

  // The first unit of a part also zeroes the padding of the part's sections.
  bool is_first_of_part(int64_t index) const { return index % num_per_part_ == 0; }

 private:
  const PartLayout& part_;
  int64_t num_exact_;
  int64_t num_per_part_;
  int64_t count_;
};

// Bytes from the start of a message to this layout's piece of a part.
inline int64_t part_place(const BucketLayout& layout, int64_t part) {
  return part * layout.part_stride + layout.part_offset;
}

// The bytes of a unit. `part` is the start of the layout's piece of the unit's part.
template <class Byte>
struct Section {
  Section(const BucketLayout& layout, const Unit& unit, Byte* part) {
    if (unit.exact) {
      codes = part + unit.first * 4;
      return;
    }
    codes = part + layout.part.code_offset + codes_nbytes(layout.wire, unit.first);
    scales = part + layout.part.scale_offset + scales_nbytes(layout.wire, unit.first / layout.block_numel);
  }
  // The codes; in the exact section the fp32 values.
  Byte* codes;
  // Meaningful only in the lossy section of a wire with scales.
  Byte* scales = nullptr;
};

inline void zero(std::byte* begin, std::byte* end) { std::memset(begin, 0, static_cast<size_t>(end - begin)); }

inline void zero_padding(const BucketLayout& layout, std::byte* part) {
  const PartLayout& p = layout.part;
  const int64_t num_blocks = ceil_div(p.lossy_numel, layout.block_numel);
  zero(part + p.exact_numel * 4, part + p.scale_offset);
  zero(part + p.scale_offset + scales_nbytes(layout.wire, num_blocks), part + p.code_offset);
  zero(part + p.code_offset + codes_nbytes(layout.wire, p.lossy_numel), part + p.nbytes);
}

// The elements of the slice list that the unit covers, where `range` is what its part's section covers. Fewer than
// unit.numel, or none, where the list ends.
inline Range covered(const Range& range, const Unit& unit) {
  const int64_t begin = std::min(range.begin + unit.first, range.end);
  return {begin, std::min(begin + unit.numel, range.end)};
}

// ---- slices

// Walks the elements of `range` in a slice list, one contiguous run after another.
class Cursor {
 public:
  Cursor(const SliceList& list, const Range& range)
      : list_(list), nbytes_(grad_nbytes(list.dtype())), position_(range.begin), end_(range.end) {
    const auto& starts = list.starts();
    slice_ = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), position_) - starts.begin()) - 1;
  }

  int64_t remaining() const { return end_ - position_; }
  int64_t run_numel() const { return std::min(end_, list_.starts()[slice_ + 1]) - position_; }
  // Null in a hole.
  std::byte* data() const {
    if (list_.slices()[slice_].data == nullptr) return nullptr;
    return static_cast<std::byte*>(list_.slices()[slice_].data) + (position_ - list_.starts()[slice_]) * nbytes_;
  }
  // `numel` is at most run_numel().
  void advance(int64_t numel) {
    position_ += numel;
    if (position_ == list_.starts()[slice_ + 1]) ++slice_;
  }

 private:
  const SliceList& list_;
  int64_t nbytes_;
  int64_t position_;
  int64_t end_;
  size_t slice_;
};

}  // namespace fusedcomm
