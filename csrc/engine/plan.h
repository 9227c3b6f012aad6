// How a bucket will travel: which sum, how it is cut, and where the mean is taken. Decided here, from the numbers
// that every rank shares, so that all ranks decide alike.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "codec/slices.h"
#include "wire/layout.h"

namespace fusedcomm {

enum class Sum : uint8_t {
  kAuto,
  kExact,    // all-reduce in fp32
  kDirect,   // all-reduce in the 16-bit wire dtype; the transport rounds at every addition
  kTwoShot,  // all-to-all, fp32 sum in rank order by the owner, one re-encode, all-gather
  kOneShot   // all-gather of everybody's encoded chunk, fp32 sum in rank order by each: nothing is encoded twice
};

// "auto", "exact", "direct", "two-shot", "one-shot"; anything else throws std::invalid_argument.
Sum sum_from_name(const std::string& name);
std::string sum_name(Sum sum);

struct WireConfig {
  Wire wire = Wire::kBf16;
  Sum sum = Sum::kAuto;
  int64_t block_numel = kDefaultBlockNumel;
  double predivide = 0;  // fp16 only; 0: chosen here
  int64_t max_chunk_nbytes = 512 << 10;
  int64_t num_slots = 4;                   // chunks that may be under way at once
  bool rotate = false;                     // mix runs of elements before quantising, against outliers
  std::vector<StreamWire> others;          // that some parameters have instead of `wire`; numels are not used
  bool stochastic = false;                 // rounding; else to nearest
  uint64_t seed = 0;                       // of the noise
  std::optional<ResidualFormat> feedback;  // error feedback, if any
  int64_t ranks_per_host = 1;              // more than one: sums have two levels, first over the ranks of a host
  Wire local_wire = Wire::kBf16;           // within a host; without scales
};

// How a parameter travels: 0 in the configuration's wire, k > 0 in others[k - 1], kExact in fp32.
inline constexpr int kExactWire = -1;
// `number` ≥ 0.
StreamWire stream_wire(const WireConfig& config, int number);

struct BucketPlan {
  Sum sum = Sum::kExact;
  bool in_place = false;  // the collective works on the bucket's own memory; nothing is packed or unpacked
  // Two-shot, one-shot: one for each wire in the bucket, whose numbers are in `wires`; else one for the whole bucket.
  std::vector<BucketLayout> layouts;
  std::vector<int> wires;
  // Two-shot on two levels: what is packed, and what the sums over a host's ranks are taken from. Else empty.
  std::vector<BucketLayout> host_layouts;
  // That unpack sums: everybody's in a one-shot, chunk_nbytes() apart.
  int64_t num_messages = 1;
  float pack_scale = 1;
  float reduce_scale = 1;  // two-shot only
  float unpack_scale = 1;
  std::string reason;  // why not what the configuration's wire would lead one to expect; empty if it is

  // 0 of a bucket that is not planned, because the codec does not carry it.
  int64_t num_chunks() const { return layouts.empty() ? 0 : layouts.front().num_chunks; }
  int64_t chunk_nbytes() const { return layouts.empty() ? 0 : layouts.front().chunk_nbytes(); }
  // Of the message within a host; 0 if there is none.
  int64_t host_chunk_nbytes() const { return host_layouts.empty() ? 0 : host_layouts.front().chunk_nbytes(); }
  bool on_two_levels() const { return !host_layouts.empty(); }
  // Sums are of what our encoders have made: rounded once by each, to nearest or not, and fed back.
  bool sums_codes() const { return sum == Sum::kTwoShot || sum == Sum::kOneShot; }
  // What pack writes.
  const std::vector<BucketLayout>& packed_layouts() const { return on_two_levels() ? host_layouts : layouts; }
  // Of the exact stream, which the first layout has.
  int64_t exact_numel() const { return layouts.empty() ? 0 : layouts.front().exact_numel; }
};

// Buckets of at most this many gradient bytes are summed exactly when the sum is left to us: on them an exact
// all-reduce takes as long as the two collectives of a two-shot, and 1.3 times as long as the one of a one-shot
// (bench/hook_overhead.py --ranks 2, buckets of 4 KiB): so little time that what is exact is worth it.
inline constexpr int64_t kSmallBucketNbytes = 16 << 10;

// Throws std::invalid_argument naming the field, its value and what is possible.
void check_config(const WireConfig& config);

// lossy_numels: by the number of the wire, missing ones are 0. in_one_run: the gradients lie one after another, so that
// a collective may work on their own memory.
BucketPlan plan_bucket(const WireConfig& config, int world_size, GradDtype dtype, int64_t exact_numel,
                       const std::vector<int64_t>& lossy_numels, bool in_one_run = true);

// Upper bound of chunk_nbytes() and host_chunk_nbytes() over every bucket: the size of one workspace. The module does
// not bound it more tightly, since what a reducer will bring cannot be told for sure from it (parameters frozen, tied
// or ignored since).
int64_t workspace_nbytes(const WireConfig& config, int world_size);
// Whether what the codec encodes is summed in one shot; on one level.
bool is_one_shot(const WireConfig& config, int world_size);

// Bytes that one rank sends for this bucket: (p−1)/p of each chunk for each of two collectives. A ring all-reduce
// sends as much; a one-shot p−1 times the chunk, as much if p is 2. On two levels: of a host's L ranks, (L−1)/L of a
// chunk in the local wire, then (H−1)/H of an L-th of a chunk to the other H−1 hosts, twice, then (L−1)/L of a chunk.
int64_t sent_nbytes(const BucketPlan& plan, int world_size);
// Those of them that go to other hosts. All-reduces are counted as a ring that leaves each host once.
int64_t sent_between_hosts_nbytes(const BucketPlan& plan, int world_size, int64_t ranks_per_host);

}  // namespace fusedcomm
