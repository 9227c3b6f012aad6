// The engine's configuration: wires, sum, chunks and error feedback. It is the same on every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/sums.h"
#include "wire/layout.h"

namespace fusedcomm {

struct WireConfig {
  Wire wire = Wire::kBf16;
  Sum sum = Sum::kAuto;
  // Bytes of a chunk's message, approximately: a chunk has at least one grain in each part.
  int64_t max_chunk_nbytes = 512 << 10;
  int64_t num_slots = 4;          // chunks that may be under way at once; each has a workspace
  std::vector<Wire> others;       // wires that some parameters have instead of `wire`
  bool feedback = false;          // error feedback
  int64_t ranks_per_host = 1;     // more than 1: sums have two levels, first over the ranks of a host
  Wire local_wire = Wire::kBf16;  // between the ranks of a host; one without scales
  // Only counts depend on these two: the ranks of this rank's host, on one level too, and how many links of the ring of
  // all ranks lead from there to other hosts.
  int64_t ranks_on_host = 1;
  int64_t links_of_host = 1;
  bool keeps_messages = false;  // every bucket keeps its codes and means; see KeptMessages in job.h

  // Calls visit(name, pointer to member) for each field, by its name in Config.native() of fusedcomm/config/config.py.
  template <class Visit>
  static void visit_fields(Visit visit) {
    visit("wire", &WireConfig::wire);
    visit("sum", &WireConfig::sum);
    visit("chunk_nbytes", &WireConfig::max_chunk_nbytes);
    visit("chunks_in_flight", &WireConfig::num_slots);
    visit("others", &WireConfig::others);
    visit("error_feedback", &WireConfig::feedback);
    visit("ranks_per_host", &WireConfig::ranks_per_host);
    visit("local_wire", &WireConfig::local_wire);
    visit("ranks_on_host", &WireConfig::ranks_on_host);
    visit("links_of_host", &WireConfig::links_of_host);
    visit("keeps_messages", &WireConfig::keeps_messages);
  }
};

// The number of a parameter's wire: 0 is the configuration's `wire`, k > 0 is others[k - 1], kExactWire is fp32.
inline constexpr int kExactWire = -1;
// The format of `numel` elements in wire `number`, which is at least 0. Throws std::out_of_range if there is none.
WireFormat wire_format(const WireConfig& config, int number, int64_t numel);

// Throws std::invalid_argument, whose text names the fields that are not possible.
void check_config(const WireConfig& config);

}  // namespace fusedcomm
