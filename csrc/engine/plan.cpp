#include "engine/plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace fusedcomm {
namespace {

// Bytes; more than any bucket has, so the bucket is cut into one chunk.
constexpr int64_t kOneChunk = int64_t{1} << 62;

// Where the transport adds in fp16, each rank's values are divided by f, and the sum is multiplied by f/p afterwards.
// f = p cannot overflow but loses small values; f = 1 is the reverse. A power of two near √p halves the risk on both
// sides (as FSDP does).
double balanced_predivide(int world_size) { return std::exp2(std::ceil(std::log2(world_size) / 2)); }

// The sum of buckets that the codec sums.
Sum sum_of_codes(const WireConfig& config, int world_size) {
  if (config.sum != Sum::kAuto) return config.sum;
  // Two ranks send as many bytes with either sum, but a one-shot rounds a value once and needs one collective.
  return world_size <= 2 && config.ranks_per_host == 1 ? Sum::kOneShot : Sum::kTwoShot;
}

Sum choose_sum(const WireConfig& config, int world_size, GradDtype dtype, const ListNumels& numels,
               const std::vector<WireFormat>& formats, std::string* reason) {
  if (config.sum != Sum::kAuto) return config.sum;
  bool rounds = false, all_exact = true;
  for (const WireFormat& format : formats) {
    all_exact = all_exact && format.numel == 0;
    rounds = rounds || format.wire != Wire::kFp32;
  }
  if (all_exact && dtype == GradDtype::kFloat32) {
    if (config.wire != Wire::kFp32) *reason = "every parameter in it is exempt";
    return Sum::kExact;
  }
  const Sum of_codes = sum_of_codes(config, world_size);
  // Half-precision gradients and an fp32 wire: the codec adds in rank order, so the result is the same everywhere.
  if (!rounds && dtype != GradDtype::kFloat32) return of_codes;
  if (!rounds && config.ranks_per_host == 1) return Sum::kExact;
  if (dtype == GradDtype::kFloat32 && numels.whole * grad_nbytes(dtype) <= kSmallBucketNbytes) {
    *reason = "small: an exact sum takes hardly longer";
    return Sum::kExact;
  }
  return of_codes;
}

// The most bytes of a chunk with which its message within a host has at most config.max_chunk_nbytes, too. `formats`
// and exact_numel may be of one of `num_rows` rows; the bytes are then of a chunk of that row.
int64_t max_chunk_nbytes(const WireConfig& config, const std::vector<WireFormat>& formats, int64_t exact_numel,
                         int64_t num_rows = 1) {
  const int64_t most = std::max<int64_t>(1, config.max_chunk_nbytes / num_rows);
  if (config.ranks_per_host == 1) return most;
  int64_t nbytes = 0, local_nbytes = 0;
  for (const WireFormat& format : formats) {
    const int64_t exact = &format == formats.data() ? exact_numel : 0;
    nbytes += part_layout(format.wire, format.block_numel, exact, format.numel).nbytes;
    local_nbytes += part_layout(config.local_wire, format.block_numel, exact, format.numel).nbytes;
  }
  const int64_t num_chunks = ceil_div(std::max(nbytes, local_nbytes), most);
  return num_chunks <= 1 ? most : std::max<int64_t>(1, nbytes / num_chunks);
}

// The formats of the bucket's lossy elements; if it has none, one format of no elements. Appends their wire numbers to
// `wires`.
std::vector<WireFormat> formats_of(const WireConfig& config, const std::vector<int64_t>& lossy_numels,
                                   std::vector<int>* wires) {
  std::vector<WireFormat> formats;
  for (size_t number = 0; number < lossy_numels.size(); ++number) {
    if (lossy_numels[number] == 0) continue;
    formats.push_back(wire_format(config, static_cast<int>(number), lossy_numels[number]));
    wires->push_back(static_cast<int>(number));
  }
  if (formats.empty()) {
    formats.push_back(wire_format(config, 0, 0));
    wires->push_back(0);
  }
  return formats;
}

// A factor as the product of `near_one`, of magnitude above 1/2 and at most 1, and `power`, a power of two.
struct SplitFactor {
  double near_one = 1, power = 1;
};

SplitFactor split(double factor) {
  int exponent = 0;
  const double fraction = std::frexp(factor, &exponent);
  // The power must be a normal float. 0, Inf and NaN have none.
  if (!std::isnormal(factor) || std::abs(exponent) > 100) return {1, factor};
  const bool is_power = std::abs(fraction) == 0.5;
  return {is_power ? 2 * fraction : fraction, std::exp2(is_power ? exponent - 1 : exponent)};
}

// Sets the layouts and scales of a bucket that the codec sums.
void plan_sum_of_codes(const WireConfig& config, int world_size, int64_t exact_numel,
                       const std::vector<WireFormat>& formats, double factor, BucketPlan* plan) {
  if (!plan->encodes_sums()) {
    plan->unpack_scale = static_cast<float>(factor / world_size);
    plan->layouts = bucket_layouts(formats, 1, exact_numel, config.max_chunk_nbytes);
    return;
  }
  // The encoded sum is at most as large as the mean, so it overflows no earlier. Unpack multiplies by a power of two,
  // which rounds nothing.
  const SplitFactor parts = split(factor);
  plan->reduce_scale = static_cast<float>(parts.near_one / world_size);
  plan->unpack_scale = static_cast<float>(parts.power);
  plan->layouts = bucket_layouts(formats, world_size, exact_numel, max_chunk_nbytes(config, formats, exact_numel));
  if (config.ranks_per_host > 1) {
    plan->host_layouts = host_layouts(plan->layouts, config.local_wire, config.ranks_per_host);
  }
}

// Sets the layouts and scales of a bucket that the transport sums. An all-reduce has one dtype, so exempt parameters of
// an exact bucket need no section of their own.
void plan_all_reduce(const WireConfig& config, int world_size, GradDtype dtype, bool in_one_run,
                     const ListNumels& numels, const std::vector<WireFormat>& formats, std::optional<double> factor,
                     bool has_heads, BucketPlan* plan) {
  WireFormat whole = formats.front();
  plan->wires = {};
  if (plan->sum == Sum::kExact) {
    whole = {Wire::kFp32, kDefaultBlockNumel, numels.whole};
    if (factor) {
      plan->unpack_scale = static_cast<float>(*factor / world_size);
    } else {
      // Scale before the sum, as DDP's own all-reduce does: this gives the same bits.
      plan->pack_scale = static_cast<float>(1.0 / world_size);
      plan->in_place = in_one_run && dtype == GradDtype::kFloat32 && !has_heads;
    }
  } else {
    if (has_heads) {
      throw std::invalid_argument(
          "sum='direct' adds everything in one 16-bit dtype and cannot carry the ranks' weights, which "
          "Config(weighted=…) and Join(divide_by_initial_world_size=False) need: use sum='two-shot'");
    }
    if (numels.exact != 0) {
      throw std::invalid_argument(
          "sum='direct' adds the whole bucket in one 16-bit dtype and cannot carry exempt "
          "elements: use sum='two-shot', or exempt no parameter");
    }
    const double predivide = whole.wire == Wire::kFp16 ? balanced_predivide(world_size) : 1;
    plan->pack_scale = static_cast<float>(1 / predivide);
    plan->unpack_scale = static_cast<float>(predivide * factor.value_or(1) / world_size);
  }
  plan->layouts = bucket_layouts({whole}, 1, 0, plan->in_place ? kOneChunk : config.max_chunk_nbytes);
}

// The layouts of a row collective, whose rows have these formats and exact elements.
RowLayouts plan_rows(const WireConfig& config, int world_size, const std::vector<WireFormat>& formats,
                     int64_t exact_numel, BucketPlan* plan) {
  plan->ranks_per_host = config.ranks_per_host;
  return row_layouts(formats, world_size, exact_numel, max_chunk_nbytes(config, formats, exact_numel, world_size));
}

void set_steps(std::vector<Step> steps, BucketPlan* plan) {
  plan->workspace = workspace_of(steps);
  plan->steps = std::make_shared<const std::vector<Step>>(std::move(steps));
}

}  // namespace

ListNumels list_numels(const std::vector<std::pair<int64_t, int>>& slices, int64_t grad_nbytes, bool in_one_run) {
  const Holes empty(grad_nbytes, in_one_run);
  Holes exact = empty, whole = empty;
  std::vector<Holes> lossy;
  int64_t offset = 0;
  for (const auto& [numel, wire] : slices) {
    if (wire != kExactWire) lossy.resize(std::max(lossy.size(), static_cast<size_t>(wire) + 1), empty);
    (wire == kExactWire ? exact : lossy[static_cast<size_t>(wire)]).append(offset, numel);
    whole.append(offset, numel);
    offset += numel;
  }
  ListNumels numels{exact.numel(), {}, whole.numel()};
  for (const Holes& list : lossy) numels.lossy.push_back(list.numel());
  return numels;
}

BucketPlan plan_bucket(const WireConfig& config, int world_size, GradDtype dtype, const ListNumels& numels,
                       bool in_one_run, std::optional<double> factor, bool has_heads) {
  BucketPlan plan;
  plan.has_heads = has_heads;
  const std::vector<WireFormat> formats = formats_of(config, numels.lossy, &plan.wires);
  plan.sum = choose_sum(config, world_size, dtype, numels, formats, &plan.reason);
  if (plan.sums_codes()) {
    plan_sum_of_codes(config, world_size, numels.exact, formats, factor.value_or(1), &plan);
  } else {
    plan_all_reduce(config, world_size, dtype, in_one_run, numels, formats, factor, has_heads, &plan);
  }
  if (has_heads) {
    add_heads(&plan.layouts);
    add_heads(&plan.host_layouts);
  }
  ChunkShape shape{world_size, plan.chunk_nbytes(), plan.in_place};
  if (plan.in_place) shape.nbytes = plan.layouts.front().lossy_numel * grad_nbytes(GradDtype::kFloat32);
  shape.ranks_per_host = config.ranks_per_host;
  shape.host_nbytes = plan.host_chunk_nbytes();
  shape.keeps_messages = config.keeps_messages;
  set_steps(steps_of(plan.sum, shape), &plan);
  return plan;
}

BucketPlan plan_reduce_scatter(const WireConfig& config, int world_size, const ListNumels& numels, double factor,
                               bool has_heads) {
  BucketPlan plan;
  plan.has_heads = has_heads;
  const std::vector<WireFormat> formats = formats_of(config, numels.lossy, &plan.wires);
  plan.sum = Sum::kOneShot;  // as there, each rank's codec adds what all encoders have made
  RowLayouts rows = plan_rows(config, world_size, formats, numels.exact, &plan);
  plan.layouts = std::move(rows.own);
  plan.encoded_rows = std::move(rows.all);
  if (config.ranks_per_host > 1) {
    plan.host_layouts = host_layouts(plan.encoded_rows, config.local_wire, config.ranks_per_host);
  }
  if (has_heads) {
    for (auto* layouts : {&plan.layouts, &plan.encoded_rows, &plan.host_layouts}) add_heads(layouts);
  }
  plan.unpack_scale = static_cast<float>(factor);
  ChunkShape shape{world_size, world_size * plan.chunk_nbytes()};
  shape.ranks_per_host = config.ranks_per_host;
  shape.host_nbytes = plan.host_chunk_nbytes();
  set_steps(steps_of_reduce_scatter(shape), &plan);
  return plan;
}

BucketPlan plan_all_gather(const WireConfig& config, int world_size, const ListNumels& numels, Keeping keeping) {
  BucketPlan plan;
  const std::vector<WireFormat> formats = formats_of(config, numels.lossy, &plan.wires);
  plan.sum = Sum::kTwoShot;  // as there, a rank receives a part from each
  plan.gathers = true;
  RowLayouts rows = plan_rows(config, world_size, formats, numels.exact, &plan);
  plan.layouts = std::move(rows.all);
  plan.encoded_rows = std::move(rows.own);
  ChunkShape shape{world_size, plan.chunk_nbytes()};
  shape.ranks_per_host = config.ranks_per_host;
  shape.keeps_messages = keeping != Keeping::kNothing && config.ranks_per_host > 1;
  if (shape.keeps_messages) plan.kept_nbytes = plan.num_chunks() * plan.chunk_nbytes() / config.ranks_per_host;
  const bool is_again = shape.keeps_messages && keeping == Keeping::kAgain;
  set_steps(is_again ? steps_of_all_gather_again(shape) : steps_of_all_gather(shape), &plan);
  return plan;
}

int64_t workspace_nbytes(const WireConfig& config, int world_size) {
  // A layout's part may be rounded up by one grain. Its exact elements are rounded up to kMaxVectorNumel, and its three
  // sections to kAlignNbytes.
  int64_t slack = kHeadNbytes;
  for (int number = 0; number <= static_cast<int>(config.others.size()); ++number) {
    const WireFormat format = wire_format(config, number, 0);
    const int64_t grain = grain_numel(format.wire, format.block_numel);
    const int64_t local = config.ranks_per_host > 1 ? codes_nbytes(config.local_wire, grain) : 0;
    slack += std::max(codes_nbytes(format.wire, grain) + scales_nbytes(format.wire, 1), local) + 4 * kMaxVectorNumel +
             3 * kAlignNbytes;
  }
  return round_up(config.max_chunk_nbytes + world_size * slack, kAlignNbytes);
}

Workspace workspace_of(const WireConfig& config, int world_size) {
  const int64_t nbytes = workspace_nbytes(config, world_size);
  if (is_one_shot(config, world_size)) return {0, world_size * nbytes};
  return {nbytes, nbytes};
}

bool is_one_shot(const WireConfig& config, int world_size) {
  return adder_of(sum_of_codes(config, world_size)) == Adder::kEveryRank;
}

int64_t sent_nbytes(const BucketPlan& plan) {
  int64_t sent = 0;
  if (plan.steps) {
    for (const Step& step : *plan.steps) sent += step.sent_nbytes(plan.num_chunks());
  }
  return sent;
}

int64_t sent_between_hosts_nbytes(const BucketPlan& plan, int64_t ranks_on_host, int64_t links_of_host) {
  int64_t sent = 0;
  if (plan.steps) {
    for (const Step& step : *plan.steps) {
      sent += step.sent_between_hosts_nbytes(plan.num_chunks(), ranks_on_host, links_of_host);
    }
  }
  return sent;
}

}  // namespace fusedcomm
