// The places in memory of a slice list's elements, as device code reads them.
//
// Device code works tile by tile. A tile is at most `tile_numel` consecutive elements of one section of one part;
// tiles are counted from their part's begin. Within a tile it works by *vectors*, kAlignNbytes of gradients. A vector
// lies in one *run*, which is one or more slices that follow each other in memory and in the list, or in a hole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "wire/layout.h"

namespace fusedcomm {

// A slice of a bucket whose address is not known yet, or a hole of its list.
struct SlicePlace {
  int64_t offset = 0;  // elements from the bucket's origin; kHole for a hole
  int64_t numel = 0;

  bool is_hole() const { return offset == kHole; }
};

struct SliceTable {
  // One entry for each tile, by part of the bucket, then by tile.
  std::vector<int64_t> tile_offset;  // elements from the origin to its first element, if tile_run is positive; else 0
  std::vector<int32_t> tile_run;     // tile_numel: the tile is whole, in one run, and aligned; -1: one of its runs is
                                     // not aligned; else 0
  std::vector<int32_t> first;        // the last run whose first vector is not behind the tile's, or 0; one entry more
  // One entry for each run. There is at least one run, which may be empty.
  std::vector<int32_t> vectors;  // number of its first vector in the list
  std::vector<int64_t> starts;   // its first element in the list
  std::vector<int64_t> ends;     // the element behind its last one
  std::vector<int64_t> deltas;   // elements from the origin, less elements of the list
  // Each slice's first element in the list, 0 for the first slice, then the list's numel.
  std::vector<int64_t> slice_starts;
};

inline int64_t tiles_per_part(int64_t part_numel, int64_t tile_numel) { return ceil_div(part_numel, tile_numel); }

// Fills in the tables of runs and of slices. Returns the list's numel.
inline int64_t add_runs(const std::vector<SlicePlace>& slices, int64_t vector_numel, SliceTable* table) {
  int64_t at = 0;
  for (const SlicePlace& slice : slices) {
    if (!slice.is_hole()) table->slice_starts.push_back(table->slice_starts.empty() ? 0 : at);
    const int64_t delta = slice.offset - at;
    const bool goes_on = !table->ends.empty() && table->ends.back() == at && table->deltas.back() == delta;
    if (!slice.is_hole() && slice.numel != 0) {
      if (goes_on) {
        table->ends.back() += slice.numel;
      } else {
        table->vectors.push_back(static_cast<int32_t>(at / vector_numel));
        table->starts.push_back(at);
        table->ends.push_back(at + slice.numel);
        table->deltas.push_back(delta);
      }
    }
    at += slice.numel;
  }
  table->slice_starts.push_back(at);
  if (table->vectors.empty()) {
    table->vectors.push_back(0);
    for (auto* of_run : {&table->starts, &table->ends, &table->deltas}) of_run->push_back(0);
  }
  return at;
}

// Makes the table of the layout's exact slices if `exact`, else of its lossy ones. grad_nbytes: bytes of an element in
// memory. Throws std::invalid_argument if the slices do not add up to the layout's elements, or are more than 2^31
// vectors.
inline SliceTable slice_table(const BucketLayout& layout, bool exact, const std::vector<SlicePlace>& slices,
                              int64_t tile_numel, int64_t grad_nbytes) {
  const int64_t vector_numel = kAlignNbytes / grad_nbytes;
  if (tile_numel < 1) throw std::invalid_argument("slice_table: tile_numel must be at least 1");
  const int64_t numel = exact ? layout.exact_numel : layout.lossy_numel;
  if (numel / vector_numel >= std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("slice_table: a bucket of " + std::to_string(numel) +
                                " elements is too large for the GPU's tables: make smaller buckets");
  }
  SliceTable table;
  const int64_t found = add_runs(slices, vector_numel, &table);
  if (found != numel) {
    throw std::invalid_argument("slice_table: the slices hold " + std::to_string(found) + " elements, the layout " +
                                std::to_string(numel));
  }
  const int64_t part_numel = exact ? layout.part.exact_numel : layout.part.lossy_numel;
  const auto last = static_cast<int32_t>(table.vectors.size()) - 1;
  int32_t run = 0;
  for (int64_t part = 0; part < layout.num_chunks * layout.num_parts; ++part) {
    for (int64_t inside = 0; inside < part_numel; inside += tile_numel) {
      const int64_t begin = part * part_numel + inside, end = begin + std::min(tile_numel, part_numel - inside);
      while (run < last && table.vectors[run + 1] <= begin / vector_numel) ++run;
      bool aligned = true;
      for (int32_t i = run; i <= last && table.starts[i] < end; ++i) {
        aligned = aligned && (table.ends[i] <= begin || table.deltas[i] % vector_numel == 0);
      }
      const bool whole = end - begin == tile_numel && table.starts[run] <= begin && table.ends[run] >= end;
      table.tile_offset.push_back(whole ? begin + table.deltas[run] : 0);
      table.tile_run.push_back(!aligned ? -1 : whole ? static_cast<int32_t>(tile_numel) : 0);
      table.first.push_back(run);
    }
  }
  table.first.push_back(last);
  return table;
}

}  // namespace fusedcomm
