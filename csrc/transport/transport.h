// The engine's interface to the network. gradients/ asks for collectives on tensors, too (tensor_transport.h). Both are
// implemented over c10d (c10d_transport.h); for the sanitizers this one is over shared memory between threads
// (tests/native/).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "lanes/lane.h"
#include "wire/layout.h"

namespace fusedcomm {

// Bytes that a collective reads or writes. `owner` keeps them alive while the transport may still access them, also
// after an error or a shutdown.
struct WireSpan {
  std::byte* data = nullptr;
  int64_t nbytes = 0;
  std::shared_ptr<void> owner;
};

// The place of a rank among hosts that all have the same number of ranks. On one level every rank counts as a host.
struct Place {
  int64_t local_rank = 0;  // the rank's index among the ranks of its host, in rank order
  int64_t ranks_per_host = 1;
  int64_t host = 0;  // the host's index, in the order of the hosts' lowest ranks
  int64_t num_hosts = 1;

  bool on_two_levels() const { return ranks_per_host > 1; }
  // Index of the part of a chunk that this rank sums over hosts. The parts that local rank l sums within its host are
  // consecutive: one for each host.
  int64_t part() const { return local_rank * num_hosts + host; }
};

// Channels for the collectives of a sum. A "scatter" channel carries the first collective, a "gather" channel the
// second, which only a two-shot has. kScatter and kGather connect all ranks, "local" channels the ranks of one host,
// and "cross" channels the ranks that have the same local rank, one on each host.
//
// On each channel all its ranks start the same collectives in the same order, from one lane. Whether channels are
// independent of each other depends on the transport.
enum class Channel : uint8_t { kScatter, kGather, kLocalScatter, kLocalGather, kCrossScatter, kCrossGather };
inline constexpr int kNumChannels = 6;
inline constexpr bool is_local(Channel channel) {
  return channel == Channel::kLocalScatter || channel == Channel::kLocalGather;
}
inline constexpr bool is_cross(Channel channel) {
  return channel == Channel::kCrossScatter || channel == Channel::kCrossGather;
}

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // Only a transport on two levels has local and cross channels.
  virtual Place place() const { return {0, 1, rank(), world_size()}; }

  // Says whether a hang in the collectives that follow must be seen by what supervises the process group. Where all are
  // supervised, this does nothing.
  virtual void supervise(bool /*supervised*/) {}

  // The collectives call `done` when they have ended. Ranks are numbered on the channel.

  // Part r of rank s's `send` arrives as part s of rank r's `receive`. All parts have the same length.
  virtual void all_to_all(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) = 0;

  // Every rank's `send` arrives in the `receive` of every rank, in rank order. It may lie at its place there.
  virtual void all_gather(Channel channel, WireSpan send, WireSpan receive, Lane::Completion done) = 0;

  // Sums `data` over the ranks, in place and elementwise. `dtype` is the dtype of the elements: fp32, bf16 or fp16.
  virtual void all_reduce(Channel channel, WireSpan data, Wire dtype, Lane::Completion done) = 0;
};

}  // namespace fusedcomm
