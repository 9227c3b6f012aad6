#include "engine/config.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "wire/names.h"

namespace fusedcomm {
namespace {

bool is_16_bit(Wire wire) { return wire == Wire::kBf16 || wire == Wire::kFp16; }

// The first of `others`, of which there is at least one, as it is written in Config(wires=…).
std::string of_others(const WireConfig& config) { return "wires={…: '" + wire_name(config.others.front().wire) + "'}"; }

}  // namespace

void check_config(const WireConfig& config) {
  check_block_numel(config.block_numel);
  if (config.rotate && !has_scales(config.wire)) {
    throw std::invalid_argument("Blocks(rotate=True) needs a wire with scales (" +
                                wire_names(/*with_scales_only=*/true) + "), and wire='" + wire_name(config.wire) +
                                "' has none: use one of these wires, or rotate=False");
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
  for (const WireFormat& format : config.others) check_format(format);
  const bool rounds = config.wire != Wire::kFp32 || !config.others.empty();
  const bool is_auto = config.sum == Sum::kAuto;
  const bool transport_adds = !is_auto && adder_of(config.sum) == Adder::kTransport;
  if (config.feedback && (!rounds || transport_adds)) {
    const std::string option =
        "Feedback('" + std::string(kResidualFormatNames[static_cast<int>(*config.feedback)]) + "')";
    throw std::invalid_argument(
        option + (rounds ? " needs a sum in which fusedcomm rounds and adds, and in sum='" + sum_name(config.sum) +
                               "' the transport does: use sum='two-shot' "
                               "or sum='one-shot'"
                         : " has no effect on wire='fp32', which rounds nothing: leave it out"));
  }
  if (!(config.feedback_decay > 0 && config.feedback_decay <= 1) || (!config.feedback && config.feedback_decay != 1)) {
    throw std::invalid_argument("feedback_decay=" + std::to_string(config.feedback_decay) +
                                " is not possible: use a number above 0 and at most 1, and 1 without error feedback");
  }
  if (config.predivide != 0 && (config.wire != Wire::kFp16 || !(config.predivide > 0) ||
                                !std::isfinite(static_cast<float>(1 / config.predivide)) ||
                                !std::isfinite(static_cast<float>(config.predivide)))) {
    throw std::invalid_argument(
        "predivide=" + std::to_string(config.predivide) + " is not possible with wire='" + wire_name(config.wire) +
        "': only wire='fp16' takes it, and it and its reciprocal must be positive and finite in fp32");
  }
  if (config.ranks_per_host < 1 || has_scales(config.local_wire)) {
    throw std::invalid_argument("ranks_per_host=" + std::to_string(config.ranks_per_host) + ", local_wire='" +
                                wire_name(config.local_wire) +
                                "' is not possible: use at least 1, and local_wire='fp32', 'bf16' or 'fp16'");
  }
  if (config.ranks_per_host > 1 && !is_auto && adder_of(config.sum) != Adder::kOwner) {
    throw std::invalid_argument("sum='" + sum_name(config.sum) +
                                "' has one level: use sum='two-shot' or 'auto' with hosts");
  }
  if (config.ranks_on_host < 1) {
    throw std::invalid_argument("ranks_on_host=" + std::to_string(config.ranks_on_host) +
                                " is not possible: use at least 1");
  }
  if (config.keeps_messages && (config.sum != Sum::kTwoShot || config.ranks_per_host > 1)) {
    throw std::invalid_argument("sum='" + sum_name(config.sum) + "' on " +
                                (config.ranks_per_host > 1 ? "two levels" : "one level") +
                                " has no codes of all ranks to keep: use sum='two-shot' without hosts");
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

WireFormat wire_format(const WireConfig& config, int number) {
  if (number > 0) return config.others.at(static_cast<size_t>(number) - 1);
  return {config.wire, config.block_numel, config.rotate, 0};
}

}  // namespace fusedcomm
