#include "engine/plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "wire/names.h"

namespace fusedcomm {
namespace {

constexpr std::pair<const char*, Sum> kSumNames[] = {{"auto", Sum::kAuto},
                                                     {"exact", Sum::kExact},
                                                     {"direct", Sum::kDirect},
                                                     {"two-shot", Sum::kTwoShot},
                                                     {"one-shot", Sum::kOneShot}};

bool is_16_bit(Wire wire) { return wire == Wire::kBf16 || wire == Wire::kFp16; }

// With every rank's fp16 value divided by f and the sum multiplied by f/p afterwards, f = p cannot overflow but loses
// small values, f = 1 the reverse; a power of two near √p halves the risk on both sides (as FSDP does).
double balanced_predivide(int world_size) { return std::exp2(std::ceil(std::log2(world_size) / 2)); }

Sum choose_sum(const WireConfig& config, int world_size, GradDtype dtype, int64_t exact_numel,
               const std::vector<StreamWire>& streams, std::string* reason) {
  if (config.sum != Sum::kAuto) return config.sum;
  int64_t numel = exact_numel;
  bool rounds = false;
  for (const StreamWire& stream : streams) {
    numel += stream.numel;
    rounds = rounds || stream.wire != Wire::kFp32;
  }
  if (numel == exact_numel && dtype == GradDtype::kFloat32) {
    if (config.wire != Wire::kFp32) *reason = "every parameter in it is exempt";
    return Sum::kExact;
  }
  const Sum of_codes = is_one_shot(config, world_size) ? Sum::kOneShot : Sum::kTwoShot;
  // Half-precision gradients under an fp32 wire: we add in rank order, so the result is the same everywhere.
  if (!rounds && dtype != GradDtype::kFloat32) return of_codes;
  if (!rounds && config.ranks_per_host == 1) return Sum::kExact;
  if (dtype == GradDtype::kFloat32 && numel * grad_nbytes(dtype) <= kSmallBucketNbytes) {
    *reason = "small: an exact sum takes little longer, if at all";
    return Sum::kExact;
  }
  return of_codes;
}

// As Config(wires=…) would say it.
std::string of_others(const WireConfig& config) { return "wires={…: '" + wire_name(config.others.front().wire) + "'}"; }

}  // namespace

Sum sum_from_name(const std::string& name) {
  for (const auto& [known, sum] : kSumNames) {
    if (name == known) return sum;
  }
  throw std::invalid_argument("sum='" + name +
                              "' is not known: use 'auto', 'exact', 'direct', 'two-shot' or 'one-shot'");
}

std::string sum_name(Sum sum) {
  for (const auto& [name, known] : kSumNames) {
    if (sum == known) return name;
  }
  throw std::invalid_argument("not a sum");
}

bool is_one_shot(const WireConfig& config, int world_size) {
  if (config.sum != Sum::kAuto) return config.sum == Sum::kOneShot;
  // Two ranks send as many bytes by either, but in one shot a value is rounded once and goes through one collective.
  return world_size <= 2 && config.ranks_per_host == 1;
}

void check_config(const WireConfig& config) {
  check_block_numel(config.block_numel);
  if (config.rotate && !has_scales(config.wire)) {
    throw std::invalid_argument("Blocks(rotate=True) is for wires with scales (" +
                                wire_names(/*with_scales_only=*/true) + "), not wire='" + wire_name(config.wire) +
                                "', which rounds each element by itself");
  }
  if (config.sum == Sum::kDirect && !is_16_bit(config.wire)) {
    throw std::invalid_argument("sum='direct' adds in the wire dtype, which must be bf16 or fp16, not wire='" +
                                wire_name(config.wire) +
                                "': use sum='two-shot' for wires with scales, sum='exact' for fp32");
  }
  if (config.sum == Sum::kExact && (config.wire != Wire::kFp32 || !config.others.empty())) {
    const bool is_wire = config.wire != Wire::kFp32;
    throw std::invalid_argument("sum='exact' is an fp32 all-reduce and cannot carry " +
                                (is_wire ? "wire='" + wire_name(config.wire) + "'" : of_others(config)) +
                                ": use wire='fp32' with it, and no other wires");
  }
  if (config.sum == Sum::kDirect && !config.others.empty()) {
    throw std::invalid_argument("sum='direct' adds the whole bucket in one dtype, " + wire_name(config.wire) +
                                ", and cannot carry " + of_others(config) +
                                ": use sum='two-shot' where parameters have wires of their own");
  }
  for (const StreamWire& stream : config.others) check_stream_wire(stream);
  const bool rounds = config.wire != Wire::kFp32 || !config.others.empty();
  if ((config.feedback || config.stochastic) && (!rounds || config.sum == Sum::kDirect)) {
    throw std::invalid_argument(
        (config.feedback ? "Feedback('" + std::string(kResidualFormatNames[static_cast<int>(*config.feedback)]) + "')"
                         : "Rounding('stochastic')") +
        (rounds ? " needs a sum of what our encoders send, which sum='direct' is not: use "
                  "sum='two-shot' or 'one-shot', where the transport does not round"
                : " has nothing to do with wire='fp32', which rounds nothing"));
  }
  if (config.predivide != 0 && (config.wire != Wire::kFp16 || !(config.predivide > 0) ||
                                !std::isfinite(static_cast<float>(1 / config.predivide)) ||
                                !std::isfinite(static_cast<float>(config.predivide)))) {
    throw std::invalid_argument("predivide=" + std::to_string(config.predivide) + " is not possible with wire='" +
                                wire_name(config.wire) +
                                "': it must be positive and finite, and only wire='fp16' has use for it");
  }
  if (config.ranks_per_host < 1 || has_scales(config.local_wire)) {
    throw std::invalid_argument("ranks_per_host=" + std::to_string(config.ranks_per_host) + ", local_wire='" +
                                wire_name(config.local_wire) +
                                "' is not possible: use 1 or more, and fp32, bf16 or fp16");
  }
  if (config.ranks_per_host > 1 && config.sum != Sum::kAuto && config.sum != Sum::kTwoShot) {
    throw std::invalid_argument("sum='" + sum_name(config.sum) +
                                "' has one level: use sum='two-shot' or 'auto' with hosts");
  }
  if (config.max_chunk_nbytes < 4096) {
    throw std::invalid_argument("chunk_nbytes=" + std::to_string(config.max_chunk_nbytes) +
                                " is not possible: use at least 4096 bytes");
  }
  if (config.num_slots < 1 || config.num_slots > 64) {
    throw std::invalid_argument("chunks_in_flight=" + std::to_string(config.num_slots) +
                                " is not possible: use 1 to 64");
  }
}

StreamWire stream_wire(const WireConfig& config, int number) {
  if (number > 0) return config.others.at(static_cast<size_t>(number) - 1);
  return {config.wire, config.block_numel, config.rotate, 0};
}

namespace {

// The most that a chunk may have so that its message within a host has at most config.max_chunk_nbytes, too.
int64_t max_chunk_nbytes(const WireConfig& config, const std::vector<StreamWire>& streams, int64_t exact_numel) {
  if (config.ranks_per_host == 1) return config.max_chunk_nbytes;
  int64_t nbytes = 0, local_nbytes = 0;
  for (const StreamWire& stream : streams) {
    const int64_t exact = &stream == streams.data() ? exact_numel : 0;
    nbytes += part_layout(stream.wire, stream.block_numel, exact, stream.numel).nbytes;
    local_nbytes += part_layout(config.local_wire, stream.block_numel, exact, stream.numel).nbytes;
  }
  const int64_t num_chunks = ceil_div(std::max(nbytes, local_nbytes), config.max_chunk_nbytes);
  return num_chunks <= 1 ? config.max_chunk_nbytes : std::max<int64_t>(1, nbytes / num_chunks);
}

}  // namespace

BucketPlan plan_bucket(const WireConfig& config, int world_size, GradDtype dtype, int64_t exact_numel,
                       const std::vector<int64_t>& lossy_numels) {
  BucketPlan plan;
  std::vector<StreamWire> streams;
  int64_t lossy_numel = 0;
  for (size_t number = 0; number < lossy_numels.size(); ++number) {
    if (lossy_numels[number] == 0) continue;
    streams.push_back(stream_wire(config, static_cast<int>(number)));
    streams.back().numel = lossy_numels[number];
    plan.wires.push_back(static_cast<int>(number));
    lossy_numel += lossy_numels[number];
  }
  if (streams.empty()) {
    streams.push_back(stream_wire(config, 0));
    plan.wires.push_back(0);
  }
  plan.sum = choose_sum(config, world_size, dtype, exact_numel, streams, &plan.reason);
  const double p = world_size;

  if (plan.sums_codes()) {
    const double predivide = config.predivide != 0 ? config.predivide : 1;
    plan.pack_scale = static_cast<float>(1 / predivide);
    if (plan.sum == Sum::kOneShot) {
      plan.num_messages = world_size;
      plan.unpack_scale = static_cast<float>(predivide / p);
      plan.layouts = bucket_layouts(streams, 1, exact_numel, config.max_chunk_nbytes);
      return plan;
    }
    plan.reduce_scale = static_cast<float>(predivide / p);
    plan.layouts = bucket_layouts(streams, world_size, exact_numel, max_chunk_nbytes(config, streams, exact_numel));
    if (config.ranks_per_host > 1) {
      plan.host_layouts = host_layouts(plan.layouts, config.local_wire, config.ranks_per_host);
    }
    return plan;
  }

  // An all-reduce has one dtype: what is exempt in an exact bucket needs no section of its own.
  StreamWire whole = streams.front();
  plan.wires = {};
  if (plan.sum == Sum::kExact) {
    whole = {Wire::kFp32, config.block_numel, false, lossy_numel + exact_numel};
    exact_numel = 0;
    plan.pack_scale = static_cast<float>(1 / p);  // before the sum, as DDP's own all-reduce does: the same bits
    plan.in_place = dtype == GradDtype::kFloat32;
  } else {
    if (exact_numel != 0) {
      throw std::invalid_argument(
          "sum='direct' adds the whole bucket in one 16-bit dtype and cannot carry exempt "
          "elements: use sum='two-shot', or let none be exempt");
    }
    const double predivide = config.predivide != 0       ? config.predivide
                             : whole.wire == Wire::kFp16 ? balanced_predivide(world_size)
                                                         : 1;
    plan.pack_scale = static_cast<float>(1 / predivide);
    plan.unpack_scale = static_cast<float>(predivide / p);
  }
  plan.layouts = bucket_layouts({whole}, 1, exact_numel, config.max_chunk_nbytes);
  return plan;
}

int64_t workspace_nbytes(const WireConfig& config, int world_size) {
  // Each layout's part is rounded up to one more grain and each of its three sections to 16 bytes.
  int64_t slack = 0;
  for (int number = 0; number <= static_cast<int>(config.others.size()); ++number) {
    const StreamWire stream = stream_wire(config, number);
    const int64_t grain = grain_numel(stream.wire, stream.block_numel);
    const int64_t local = config.ranks_per_host > 1 ? codes_nbytes(config.local_wire, grain) : 0;
    slack += std::max(codes_nbytes(stream.wire, grain) + scales_nbytes(stream.wire, 1), local) + 4 * kAlignNbytes;
  }
  return round_up(config.max_chunk_nbytes + world_size * slack, kAlignNbytes);
}

int64_t sent_nbytes(const BucketPlan& plan, int world_size) {
  if (plan.layouts.empty()) return 0;
  if (plan.sum == Sum::kOneShot) return plan.chunk_nbytes() * plan.num_chunks() * (world_size - 1);
  if (plan.on_two_levels()) {
    const int64_t local = plan.host_layouts.front().num_parts;
    const int64_t within = plan.host_chunk_nbytes() + plan.chunk_nbytes();
    return plan.num_chunks() * (within - within / local) + sent_between_hosts_nbytes(plan, world_size, local);
  }
  const int64_t nbytes = plan.in_place ? plan.layouts.front().lossy_numel * 4 : plan.chunk_nbytes() * plan.num_chunks();
  return 2 * nbytes * (world_size - 1) / world_size;
}

int64_t sent_between_hosts_nbytes(const BucketPlan& plan, int world_size, int64_t ranks_per_host) {
  if (!plan.on_two_levels()) return sent_nbytes(plan, world_size) / ranks_per_host;
  const int64_t num_hosts = world_size / ranks_per_host;
  return 2 * plan.num_chunks() * plan.layouts.front().part_stride * (num_hosts - 1);
}

}  // namespace fusedcomm
