// Moves a message to another layout of the same elements: the layout for another number of ranks, for example. Codes,
// scales and exact elements stay as they are, because cuts fall between blocks (layout.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "wire/layout.h"

namespace fusedcomm {

namespace relayout_detail {

// One section of a part: `numel` elements from byte `offset` of the part, `nbytes` for each `unit` elements.
struct Section {
  int64_t numel, offset, unit, nbytes;
};

// The offset in bytes, in the messages of all chunks, of element `at` of the slice list, which is the first of a unit.
inline int64_t place(const BucketLayout& layout, const Section& section, int64_t at) {
  const int64_t part = at / section.numel, in_part = at % section.numel;
  return part * layout.part_stride + layout.part_offset + section.offset + in_part / section.unit * section.nbytes;
}

template <class Copy>
void visit(const BucketLayout& from, const Section& source, const BucketLayout& to, const Section& target,
           const Copy& copy) {
  if (source.numel == 0 || target.numel == 0) return;
  const int64_t end =
      std::min(from.num_chunks * from.num_parts * source.numel, to.num_chunks * to.num_parts * target.numel);
  for (int64_t at = 0; at < end;) {
    const int64_t run = std::min({source.numel - at % source.numel, target.numel - at % target.numel, end - at});
    copy(place(from, source, at), place(to, target, at), run / source.unit * source.nbytes);
    at += run;
  }
}

}  // namespace relayout_detail

// Calls copy(offset in the old messages, offset in the new ones, nbytes), in bytes, for every run of bytes that stays
// together. What no call writes in the new messages must be zero: it is padding. Throws std::invalid_argument if the
// layouts are not of the same elements in the same format.
template <class Copy>
void relayout(const BucketLayout& from, const BucketLayout& to, const Copy& copy) {
  if (from.wire != to.wire || from.block_numel != to.block_numel || from.exact_numel != to.exact_numel ||
      from.lossy_numel != to.lossy_numel) {
    throw std::invalid_argument("relayout: the layouts are not of the same elements");
  }
  using relayout_detail::Section;
  const auto visit = [&](auto section) {
    relayout_detail::visit(from, section(from.part), to, section(to.part), copy);
  };
  visit([](const PartLayout& part) { return Section{part.exact_numel, 0, 1, 4}; });
  const int64_t grain = grain_numel(from.wire, from.block_numel);
  if (has_scales(from.wire)) {
    const int64_t nbytes = scales_nbytes(from.wire, 1);
    visit([&](const PartLayout& part) { return Section{part.lossy_numel, part.scale_offset, grain, nbytes}; });
  }
  const int64_t nbytes = codes_nbytes(from.wire, grain);
  visit([&](const PartLayout& part) { return Section{part.lossy_numel, part.code_offset, grain, nbytes}; });
}

}  // namespace fusedcomm
