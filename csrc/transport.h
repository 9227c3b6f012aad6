// What the engine asks of the network. Implemented over c10d (c10d_transport.h) and, for the sanitizers, over shared
// memory between threads (tests/native/).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "lane.h"
#include "wire_layout.h"

namespace fusedcomm {

// Bytes that a collective reads or writes. `owner` keeps them alive while the transport may still touch them, also
// after an error or a shutdown.
struct WireSpan {
  std::byte* data = nullptr;
  int64_t nbytes = 0;
  std::shared_ptr<void> owner;
};

// The first and the second collective of a two-shot. On each channel every rank starts the same collectives in the same
// order, from one lane; whether the channels are independent of each other is the transport's matter.
enum class Channel : uint8_t { kScatter, kGather };

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Rank s's part r arrives on rank r as part s; all parts are nbytes / world_size.
  virtual void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) = 0;

  // How many equal copies of its part, one after the other, a rank hands to all_gather.
  virtual int64_t gather_copies() const = 0;

  // Every rank's part arrives on every rank, in rank order.
  virtual void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) = 0;

  // In place, elementwise, in the wire's own dtype (fp32, bf16, fp16).
  virtual void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) = 0;
};

}  // namespace fusedcomm
