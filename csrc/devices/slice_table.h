// Where the elements of a slice list lie in memory, as device code reads it.
//
// Device code works tile by tile. A tile is at most `tile_numel` consecutive elements of one section of one part;
// tiles are counted from their part's begin. The tables give the first element of every slice and the slice's place in
// memory. For every tile they also give the slice that holds its first element, so that no tile has to search for it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "wire/layout.h"

namespace fusedcomm {

// A slice of a bucket whose address is not known yet.
struct SlicePlace {
  int64_t offset = 0;  // elements from the bucket's origin
  int64_t numel = 0;
};

struct SliceTable {
  std::vector<int64_t> starts;   // each slice's first element in the list, then the list's numel
  std::vector<int64_t> offsets;  // elements from the origin to each slice
  std::vector<int32_t> first;    // slice of each tile's first element, by part of the bucket, then by tile; num_slices
                                 // past the list's end
};

inline int64_t tiles_per_part(int64_t part_numel, int64_t tile_numel) { return ceil_div(part_numel, tile_numel); }

// Makes the table of the layout's exact slices if `exact`, else of its lossy ones. Empty slices keep their entry.
// Throws std::invalid_argument if the slices do not add up to the layout's elements.
inline SliceTable slice_table(const BucketLayout& layout, bool exact, const std::vector<SlicePlace>& slices,
                              int64_t tile_numel) {
  if (tile_numel < 1) throw std::invalid_argument("slice_table: tile_numel must be at least 1");
  SliceTable table;
  table.starts.push_back(0);
  for (const SlicePlace& slice : slices) {
    table.offsets.push_back(slice.offset);
    table.starts.push_back(table.starts.back() + slice.numel);
  }
  const int64_t numel = exact ? layout.exact_numel : layout.lossy_numel;
  if (table.starts.back() != numel) {
    throw std::invalid_argument("slice_table: the slices hold " + std::to_string(table.starts.back()) +
                                " elements, the layout " + std::to_string(numel));
  }
  const int64_t part_numel = exact ? layout.part.exact_numel : layout.part.lossy_numel;
  const auto num_slices = static_cast<int32_t>(slices.size());
  for (int64_t part = 0; part < layout.num_chunks * layout.num_parts; ++part) {
    for (int64_t tile = 0; tile < tiles_per_part(part_numel, tile_numel); ++tile) {
      const int64_t begin = part * part_numel + tile * tile_numel;
      const auto after = std::upper_bound(table.starts.begin(), table.starts.end(), begin);
      table.first.push_back(begin < numel ? static_cast<int32_t>(after - table.starts.begin()) - 1 : num_slices);
    }
  }
  return table;
}

}  // namespace fusedcomm
