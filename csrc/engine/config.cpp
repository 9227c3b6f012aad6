#include "engine/config.h"

#include <stdexcept>
#include <string>

#include "wire/names.h"

namespace fusedcomm {
namespace {

bool is_16_bit(Wire wire) { return wire == Wire::kBf16 || wire == Wire::kFp16; }

void require(bool holds, const std::string& fields) {
  if (!holds) throw std::invalid_argument("fusedcomm: the engine has no such " + fields);
}

}  // namespace

// fusedcomm/config/ has told users already what goes together, and with the values.
void check_config(const WireConfig& config) {
  const bool has_one_wire = config.others.empty();
  const bool rounds = config.wire != Wire::kFp32 || !has_one_wire;
  const bool is_auto = config.sum == Sum::kAuto;
  const bool transport_adds = !is_auto && adder_of(config.sum) == Adder::kTransport;
  require(config.sum != Sum::kDirect || (is_16_bit(config.wire) && has_one_wire), "sum and wires");
  require(config.sum != Sum::kExact || !rounds, "sum and wires");
  require(!config.feedback || (rounds && !transport_adds), "error feedback, wires and sum");
  require(config.ranks_per_host >= 1 && config.ranks_on_host >= 1, "ranks on a host");
  require(!has_scales(config.local_wire), "local_wire");
  require(config.ranks_per_host == 1 || is_auto || adder_of(config.sum) == Adder::kOwner, "sum on two levels");
  require(!config.keeps_messages || (config.sum == Sum::kTwoShot && config.ranks_per_host == 1),
          "sum to keep codes of");
  require(config.max_chunk_nbytes >= 4096, "chunk_nbytes");
  require(config.num_slots >= 1 && config.num_slots <= 64, "chunks_in_flight");
}

WireFormat wire_format(const WireConfig& config, int number, int64_t numel) {
  const Wire wire = number > 0 ? config.others.at(static_cast<size_t>(number) - 1) : config.wire;
  return {wire, default_block_numel(wire), numel};
}

}  // namespace fusedcomm
