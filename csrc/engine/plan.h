// How a bucket will travel: which sum, how it is cut, and where the mean is taken. Decided here, from the numbers
// that every rank shares, so that all ranks decide alike.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "codec/slices.h"
#include "engine/config.h"
#include "engine/sums.h"
#include "wire/layout.h"

namespace fusedcomm {

struct BucketPlan {
  Sum sum = Sum::kExact;
  // The collective works on the bucket's own memory, in one chunk; nothing is packed or unpacked.
  bool in_place = false;
  // Where the codec sums: one for each wire in the bucket, whose numbers are in `wires`; else one for the whole bucket.
  std::vector<BucketLayout> layouts;
  std::vector<int> wires;
  // Two-shot on two levels: what is packed, and what the sums over a host's ranks are taken from. Else empty.
  std::vector<BucketLayout> host_layouts;
  // What happens to each chunk; made once, with the plan. Null if the bucket is not planned.
  std::shared_ptr<const std::vector<Step>> steps;
  Workspace workspace;  // the buffers that the steps need
  float pack_scale = 1;
  float reduce_scale = 1;  // only where sums are encoded again
  float unpack_scale = 1;
  std::string reason;  // why not what the configuration's wire would lead one to expect; empty if it is

  // 0 of a bucket that is not planned, because the codec does not carry it.
  int64_t num_chunks() const { return layouts.empty() ? 0 : layouts.front().num_chunks; }
  int64_t chunk_nbytes() const { return layouts.empty() ? 0 : layouts.front().chunk_nbytes(); }
  // Of the message within a host; 0 if there is none.
  int64_t host_chunk_nbytes() const { return host_layouts.empty() ? 0 : host_layouts.front().chunk_nbytes(); }
  bool on_two_levels() const { return !host_layouts.empty(); }
  // Sums are of what our encoders have made: rounded once by each, to nearest or not, and fed back.
  bool sums_codes() const { return adder_of(sum) != Adder::kTransport; }
  // Whether the sums are encoded again.
  bool encodes_sums() const { return adder_of(sum) == Adder::kOwner; }
  // What pack writes.
  const std::vector<BucketLayout>& packed_layouts() const { return on_two_levels() ? host_layouts : layouts; }
  // Of the exact stream, which the first layout has.
  int64_t exact_numel() const { return layouts.empty() ? 0 : layouts.front().exact_numel; }
};

// Buckets of at most this many gradient bytes are summed exactly when the sum is left to us: on them an exact
// all-reduce takes as long as the two collectives of a two-shot, and 1.3 times as long as the one of a one-shot
// (bench/hook_overhead.py --ranks 2, buckets of 4 KiB): so little time that what is exact is worth it.
inline constexpr int64_t kSmallBucketNbytes = 16 << 10;

// lossy_numels: by the number of the wire, missing ones are 0. in_one_run: the gradients lie one after another, so that
// a collective may work on their own memory.
BucketPlan plan_bucket(const WireConfig& config, int world_size, GradDtype dtype, int64_t exact_numel,
                       const std::vector<int64_t>& lossy_numels, bool in_one_run = true);

// Upper bound of chunk_nbytes() and host_chunk_nbytes() over every bucket. The module does not bound it more tightly,
// since what a reducer will bring cannot be told for sure from it (parameters frozen, tied or ignored since).
int64_t workspace_nbytes(const WireConfig& config, int world_size);
// Buffers that are large enough for a chunk of any bucket.
Workspace workspace_of(const WireConfig& config, int world_size);
// Whether what the codec encodes is summed by every rank, from everybody's message; on one level.
bool is_one_shot(const WireConfig& config, int world_size);

// Bytes that one rank sends for this bucket, added up over its steps.
int64_t sent_nbytes(const BucketPlan& plan);
// Bytes of these that go to other hosts. A collective of all ranks counts as a ring that leaves each host once.
int64_t sent_between_hosts_nbytes(const BucketPlan& plan, int64_t ranks_per_host);

}  // namespace fusedcomm
