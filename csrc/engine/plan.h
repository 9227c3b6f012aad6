// The plan of a bucket: its sum, its chunks and parts, and where its gradients are scaled to the mean. It is made from
// numbers that all ranks share, so all ranks decide alike.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
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
  // If the codec sums, one layout for each wire in the bucket; else one for the whole bucket.
  std::vector<BucketLayout> layouts;
  // The wire number of each layout; empty if the transport sums.
  std::vector<int> wires;
  // Sums on two levels: the layouts of the messages within a host, which pack writes and the local reduce reads. Else
  // empty, as for an all-gather, which sums nothing.
  std::vector<BucketLayout> host_layouts;
  // Row collectives: the layouts of the messages that the first encoder writes, see RowLayouts: all rows for a
  // reduce-scatter, this rank's row for an all-gather. Empty for other buckets.
  std::vector<BucketLayout> encoded_rows;
  int64_t ranks_per_host = 1;  // of rows; more than 1: on two levels
  bool gathers = false;        // an all-gather
  int64_t kept_nbytes = 0;     // that an all-gather keeps for those that gather again
  bool has_heads = false;      // each part of a message begins with the rank's weight
  // The steps of each chunk. Null if the bucket is not planned.
  std::shared_ptr<const std::vector<Step>> steps;
  Workspace workspace;     // the buffers that the steps need
  float pack_scale = 1;    // multiplies gradients before the transport adds them; 1 where the codec adds
  float reduce_scale = 1;  // multiplies sums before they are encoded again
  float unpack_scale = 1;  // multiplies what unpack decodes
  std::string reason;      // why the sum is not the one that the configuration's wire suggests; empty if it is

  // 0 if the bucket is not planned because the codec does not carry it.
  int64_t num_chunks() const { return layouts.empty() ? 0 : layouts.front().num_chunks; }
  int64_t chunk_nbytes() const { return layouts.empty() ? 0 : layouts.front().chunk_nbytes(); }
  // Bytes of a chunk's message within a host; 0 on one level.
  int64_t host_chunk_nbytes() const { return host_layouts.empty() ? 0 : host_layouts.front().chunk_nbytes(); }
  bool on_two_levels() const { return !host_layouts.empty(); }
  // Whether it goes over the links of a host, those between hosts, and those of a host again.
  bool has_three_wires() const { return on_two_levels() || ranks_per_host > 1; }
  // Whether the codec adds what encoders have made. Only then does error feedback apply.
  bool sums_codes() const { return adder_of(sum) != Adder::kTransport; }
  // Whether the sums are encoded again.
  bool encodes_sums() const { return adder_of(sum) == Adder::kOwner; }
  // The layouts of the messages that the first encoder with error feedback writes.
  const std::vector<BucketLayout>& encoded_layouts() const { return encoded_rows.empty() ? layouts : encoded_rows; }
  // The layouts of the messages that pack writes.
  const std::vector<BucketLayout>& packed_layouts() const { return on_two_levels() ? host_layouts : encoded_layouts(); }
  // Rows: the row that a part of a message holds. On two levels the parts of a local rank follow each other, one for
  // each host (see Place::part), and the ranks of a host are consecutive.
  int64_t row_of_part(int64_t part, int64_t num_rows) const {
    const int64_t num_hosts = num_rows / ranks_per_host;
    return ranks_per_host == 1 ? part : part % num_hosts * ranks_per_host + part / num_hosts;
  }
  // Exact elements, which the first layout has.
  int64_t exact_numel() const { return layouts.empty() ? 0 : layouts.front().exact_numel; }
};

using BucketPlanPtr = std::shared_ptr<const BucketPlan>;

// With Sum::kAuto, fp32 buckets of at most this many gradient bytes are summed exactly. For buckets of 4 KiB an exact
// all-reduce takes as long as the two collectives of a two-shot, and 1.3 times as long as the one of a one-shot
// (bench/hook_overhead.py --ranks 2). Exact sums cost so little time there that they are worth it.
inline constexpr int64_t kSmallBucketNbytes = 16 << 10;

// The elements of a bucket's slice lists, holes included.
struct ListNumels {
  int64_t exact = 0;
  std::vector<int64_t> lossy;  // by wire number; missing ones are 0
  int64_t whole = 0;           // of one list of all slices, exact and lossy, as an all-reduce takes them
};

// The lists of slices (elements, wire number or kExactWire). With in_one_run they lie one after another, else each is a
// tensor of its own. grad_nbytes: bytes of an element in memory.
ListNumels list_numels(const std::vector<std::pair<int64_t, int>>& slices, int64_t grad_nbytes, bool in_one_run);

// Plans a bucket with lists of these elements. in_one_run: the gradients are contiguous, so that a collective may work
// on their own memory. Throws std::invalid_argument if sum='direct' would have to carry exact elements.
//
// factor: the result is the mean × factor. It is applied where it costs no rounding, so with factor = world_size whole
// numbers that the wire can hold give their exact sum. Without a factor the result is the mean, with the bits of DDP's
// own all-reduce where the sum is exact.
//
// has_heads: whether the messages carry the ranks' weights. Throws std::invalid_argument for sum='direct' with them.
BucketPlan plan_bucket(const WireConfig& config, int world_size, GradDtype dtype, const ListNumels& numels,
                       bool in_one_run = true, std::optional<double> factor = std::nullopt, bool has_heads = false);

// Plans a reduce-scatter of rows, one for each rank, whose lists have these elements. Rank r gets the sum of the ranks'
// rows r × factor, added in fp32 in the order of ranks; on two levels first those of each host, then those of hosts. On
// two levels the ranks of a host must be consecutive.
BucketPlan plan_reduce_scatter(const WireConfig& config, int world_size, const ListNumels& numels, double factor,
                               bool has_heads = false);
// What an all-gather has to do with others of the same rows: nothing; it keeps, on two levels, what this rank receives
// of other hosts; or it gathers again, within hosts, what one of them has kept.
enum class Keeping : uint8_t { kNothing, kKeeps, kAgain };
// Plans an all-gather of rows with these elements: every rank gets the rows of all.
BucketPlan plan_all_gather(const WireConfig& config, int world_size, const ListNumels& numels,
                           Keeping keeping = Keeping::kNothing);

// An upper bound of chunk_nbytes() and host_chunk_nbytes() for any bucket. The module's parameters give no tighter
// bound, because some may have been frozen, tied or ignored since.
int64_t workspace_nbytes(const WireConfig& config, int world_size);
// Buffers that are large enough for a chunk of any bucket.
Workspace workspace_of(const WireConfig& config, int world_size);
// Whether buckets that the codec sums are summed in a one-shot.
bool is_one_shot(const WireConfig& config, int world_size);

// Bytes that one rank sends for this bucket, added up over its steps; 0 if the bucket is not planned.
int64_t sent_nbytes(const BucketPlan& plan);
// The part of sent_nbytes() that goes to other hosts; see Step::sent_between_hosts_nbytes().
int64_t sent_between_hosts_nbytes(const BucketPlan& plan, int64_t ranks_on_host, int64_t links_of_host);

}  // namespace fusedcomm
