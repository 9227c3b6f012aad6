#include "plan.h"

#include <cmath>
#include <stdexcept>
#include <utility>

#include "wire_names.h"

namespace fusedcomm {
namespace {

constexpr std::pair<const char*, Sum> kSumNames[] = {
    {"auto", Sum::kAuto}, {"exact", Sum::kExact}, {"direct", Sum::kDirect}, {"two-shot", Sum::kTwoShot}};

bool is_16_bit(Wire wire) { return wire == Wire::kBf16 || wire == Wire::kFp16; }

// With every rank's fp16 value divided by f and the sum multiplied by f/p afterwards, f = p cannot overflow but loses
// small values, f = 1 the reverse; a power of two near √p halves the risk on both sides (as FSDP does).
double balanced_predivide(int world_size) { return std::exp2(std::ceil(std::log2(world_size) / 2)); }

Sum choose_sum(const WireConfig& config, int world_size, GradDtype dtype, int64_t exact_numel, int64_t lossy_numel,
               std::string* reason) {
  if (config.sum != Sum::kAuto) return config.sum;
  if (lossy_numel == 0 && dtype == GradDtype::kFloat32) {
    if (config.wire != Wire::kFp32) *reason = "every parameter in it is exempt";
    return Sum::kExact;
  }
  // Half-precision gradients under an fp32 wire: two-shot adds in rank order, so the result is the same everywhere.
  if (config.wire == Wire::kFp32) return dtype == GradDtype::kFloat32 ? Sum::kExact : Sum::kTwoShot;
  if (dtype == GradDtype::kFloat32 && (exact_numel + lossy_numel) * grad_nbytes(dtype) <= kSmallBucketNbytes) {
    *reason = "small: one exact collective costs no more than two short ones";
    return Sum::kExact;
  }
  // Two ranks add once, so summing in the wire dtype rounds no more often than two-shot, with one collective less.
  if (is_16_bit(config.wire) && world_size <= 2 && exact_numel == 0) return Sum::kDirect;
  return Sum::kTwoShot;
}

}  // namespace

Sum sum_from_name(const std::string& name) {
  for (const auto& [known, sum] : kSumNames) {
    if (name == known) return sum;
  }
  throw std::invalid_argument("sum='" + name + "' is not known: use 'auto', 'exact', 'direct' or 'two-shot'");
}

std::string sum_name(Sum sum) {
  for (const auto& [name, known] : kSumNames) {
    if (sum == known) return name;
  }
  throw std::invalid_argument("not a sum");
}

void check_config(const WireConfig& config) {
  check_block_numel(config.block_numel);
  if (config.rotate && !has_scales(config.wire)) {
    throw std::invalid_argument("rotate=True is for wires with scales (int8, fp8, fp8_e5m2, int4), not wire='" +
                                wire_name(config.wire) + "', which rounds each element by itself");
  }
  if (config.sum == Sum::kDirect && !is_16_bit(config.wire)) {
    throw std::invalid_argument(
        "sum='direct' adds in the wire dtype, which must be bf16 or fp16: use sum='two-shot' for wires with scales, "
        "sum='exact' for fp32");
  }
  if (config.sum == Sum::kExact && config.wire != Wire::kFp32) {
    throw std::invalid_argument("sum='exact' is an fp32 all-reduce: use wire='fp32' with it");
  }
  if (config.predivide != 0 && (config.wire != Wire::kFp16 || !(config.predivide > 0) ||
                                !std::isfinite(static_cast<float>(1 / config.predivide)) ||
                                !std::isfinite(static_cast<float>(config.predivide)))) {
    throw std::invalid_argument(
        "predivide=" + std::to_string(config.predivide) +
        " is not possible: it must be positive and finite, and only wire='fp16' has use for it");
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

BucketPlan plan_bucket(const WireConfig& config, int world_size, GradDtype dtype, int64_t exact_numel,
                       int64_t lossy_numel) {
  BucketPlan plan;
  plan.sum = choose_sum(config, world_size, dtype, exact_numel, lossy_numel, &plan.reason);
  const double p = world_size;

  if (plan.sum == Sum::kTwoShot) {
    const double predivide = config.predivide != 0 ? config.predivide : 1;
    plan.pack_scale = static_cast<float>(1 / predivide);
    plan.reduce_scale = static_cast<float>(predivide / p);
    plan.layout = bucket_layout(config.wire, config.block_numel, world_size, exact_numel, lossy_numel,
                                config.max_chunk_nbytes, config.rotate);
    return plan;
  }

  // An all-reduce has one dtype: what is exempt in an exact bucket needs no section of its own.
  const Wire wire = plan.sum == Sum::kExact ? Wire::kFp32 : config.wire;
  if (plan.sum == Sum::kExact) {
    lossy_numel += exact_numel;
    exact_numel = 0;
    plan.pack_scale = static_cast<float>(1 / p);  // before the sum, as DDP's own all-reduce does: the same bits
    plan.in_place = dtype == GradDtype::kFloat32;
  } else {
    if (exact_numel != 0) {
      throw std::invalid_argument(
          "sum='direct' adds the whole bucket in one 16-bit dtype and cannot carry exempt "
          "parameters: use sum='two-shot' or exempt=()");
    }
    const double predivide = config.predivide != 0 ? config.predivide
                             : wire == Wire::kFp16 ? balanced_predivide(world_size)
                                                   : 1;
    plan.pack_scale = static_cast<float>(1 / predivide);
    plan.unpack_scale = static_cast<float>(predivide / p);
  }
  plan.layout = bucket_layout(wire, config.block_numel, 1, exact_numel, lossy_numel, config.max_chunk_nbytes);
  return plan;
}

int64_t workspace_nbytes(const WireConfig& config, int world_size) {
  const Wire wire = config.wire;
  // Each part is rounded up to one more grain and each of its three sections to 16 bytes.
  const int64_t slack =
      codes_nbytes(wire, grain_numel(wire, config.block_numel)) + scales_nbytes(wire, 1) + 4 * kAlignNbytes;
  return round_up(config.max_chunk_nbytes + world_size * slack, kAlignNbytes);
}

int64_t sent_nbytes(const BucketPlan& plan, int world_size) {
  const int64_t nbytes =
      plan.in_place ? plan.layout.lossy_numel * 4 : plan.layout.chunk_nbytes() * plan.layout.num_chunks;
  return 2 * nbytes * (world_size - 1) / world_size;
}

}  // namespace fusedcomm
