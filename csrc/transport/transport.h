// What the engine asks of the network. Implemented over c10d (c10d_transport.h) and, for the sanitizers, over shared
// memory between threads (tests/native/).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "lanes/lane.h"
#include "wire/layout.h"

namespace fusedcomm {

// Bytes that a collective reads or writes. `owner` keeps them alive while the transport may still touch them, also
// after an error or a shutdown.
struct WireSpan {
  std::byte* data = nullptr;
  int64_t nbytes = 0;
  std::shared_ptr<void> owner;
};

// Where a rank is among hosts that have equally many. On one level every rank is a host of its own.
struct Place {
  int64_t local_rank = 0;  // among the ranks of its host, in rank order
  int64_t ranks_per_host = 1;
  int64_t host = 0;  // in the order of the hosts' lowest ranks
  int64_t num_hosts = 1;

  bool on_two_levels() const { return ranks_per_host > 1; }
  // The part of a chunk that this rank sums over hosts. Those that a host's rank l sums first are consecutive.
  int64_t part() const { return local_rank * num_hosts + host; }
};

// The first and the second collective of a sum, of which only a two-shot has a second: among all ranks, among those of
// one host ("local"), and among those that have the same place on their hosts, one on each ("cross"). On each channel
// its ranks start the same collectives in the same order, from one lane; whether the channels are independent of each
// other is the transport's matter.
enum class Channel : uint8_t { kScatter, kGather, kLocalScatter, kLocalGather, kCrossScatter, kCrossGather };
inline constexpr int kNumChannels = 6;

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Unless it is on two levels, there are only the channels among all ranks.
  virtual Place place() const { return {0, 1, rank(), world_size()}; }

  // The channel's rank s's part r arrives on its rank r as part s; all parts are as long.
  virtual void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) = 0;

  // Every rank's part arrives on every rank of the channel, in rank order.
  virtual void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) = 0;

  // The same of messages that lie where they are to be: `all` has every rank's, in rank order, and this rank's is
  // there.
  virtual void all_gather_in_place(Channel channel, WireSpan all, Lane::Completion done) = 0;

  // In place, elementwise, in the wire's own dtype (fp32, bf16, fp16).
  virtual void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) = 0;
};

}  // namespace fusedcomm
