// The sums, each as a list of steps: what happens to one chunk of a bucket, in order. The engine walks the list for
// every chunk, plan.cpp adds up the bytes that it sends, and the cost model adds up how long its steps take. A new sum
// is a new enumerator here, and in sums.cpp a new list with its row in kSums.
//
// A chunk has a workspace of two buffers, since each step reads from one what the step before wrote there.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/stage.h"
#include "lanes/lane.h"
#include "transport/transport.h"

namespace fusedcomm {

enum class Sum : uint8_t {
  kAuto,
  kExact,    // all-reduce in fp32
  kDirect,   // all-reduce in the 16-bit wire dtype; the transport rounds at every addition
  kTwoShot,  // all-to-all, fp32 sum in rank order by the owner, one re-encode, all-gather
  kOneShot   // all-gather of everybody's encoded chunk, fp32 sum in rank order by each: nothing is encoded twice
};

// "auto" first, then what it chooses from.
std::vector<std::string> sum_names();
// Throws std::invalid_argument if `name` is none of these.
Sum sum_from_name(const std::string& name);
std::string sum_name(Sum sum);

// Who adds the ranks' chunks.
enum class Adder : uint8_t {
  kTransport,  // an all-reduce, which has one dtype
  kOwner,      // the codec of the rank that owns a part: a chunk has a part for each rank
  kEveryRank   // the codec of every rank, all of everybody's chunk
};
// Throws std::invalid_argument for kAuto.
Adder adder_of(Sum sum);

// The codec's operations, then the transport's.
enum class Operation : uint8_t {
  kScale,        // the gradients where they are
  kPack,         // gradients into a message
  kLocalReduce,  // the parts of a host's ranks into their sum
  kReduce,       // the parts of all ranks or hosts into their mean
  kUnpack,       // a message into gradients
  kSum,          // every rank's message into gradients: their mean
  kAllToAll,
  kAllGather,
  kAllReduce
};
inline constexpr bool is_collective(Operation operation) { return operation >= Operation::kAllToAll; }
// "scale", "pack", "local reduce", "reduce", "unpack", "sum", "all-to-all", "all-gather", "all-reduce"
const char* operation_name(Operation operation);

// "scatter", "gather", "local_scatter", "local_gather", "cross_scatter", "cross_gather"
const char* channel_name(Channel channel);

// Whether it connects the ranks of one host, or those with the same place on each host.
inline constexpr bool is_local(Channel channel) {
  return channel == Channel::kLocalScatter || channel == Channel::kLocalGather;
}
inline constexpr bool is_cross(Channel channel) {
  return channel == Channel::kCrossScatter || channel == Channel::kCrossGather;
}

enum class Buffer : uint8_t {
  kGradients,
  kOutgoing,   // one of the workspace
  kIncoming,   // the other one
  kOwnMessage  // this rank's place in kIncoming where that has every rank's message
};
// "gradients", "outgoing", "incoming", "own message"
const char* buffer_name(Buffer buffer);

struct Step {
  Stage stage = Stage::kPack;
  LaneRole role = LaneRole::kPack;
  Operation operation = Operation::kPack;
  Channel channel = Channel::kScatter;  // collectives only
  Buffer from = Buffer::kGradients;
  Buffer to = Buffer::kGradients;
  // The length of the message that the step reads. A pack has that of the message it writes, a kSum that of one rank's
  // message, and an all-gather that of what every rank has afterwards.
  int64_t nbytes = 0;
  // A collective's ranks; or the ranks whose parts or messages the codec adds; else 1.
  int64_t num_ranks = 1;
  // The message has the plan's host_layouts, in the wire used within a host.
  bool in_local_wire = false;
  // A chunk's steps are ordered leg by leg. While one waits for its next leg, the wire has other chunks' to carry.
  bool begins_leg = false;

  // What one rank sends for `num_chunks` chunks: (n-1)/n of each message in an all-to-all or all-gather among n ranks,
  // twice as much in an all-reduce, which goes round a ring, and nothing in a step of the codec.
  int64_t sent_nbytes(int64_t num_chunks) const;
};

// The steps depend on the sum and on this.
struct ChunkShape {
  int64_t world_size = 1;
  int64_t nbytes = 0;  // a rank's message; or the gradients, if they are summed in place
  bool in_place = false;
  int64_t ranks_per_host = 1;  // more than one: a sum may have two levels
  int64_t host_nbytes = 0;     // the message within a host
};

// The steps of one chunk, the same on every rank. Throws std::invalid_argument for kAuto.
std::vector<Step> steps_of(Sum sum, const ChunkShape& shape);

// The buffers that a chunk needs.
struct Workspace {
  int64_t outgoing_nbytes = 0;
  int64_t incoming_nbytes = 0;
};
Workspace workspace_of(const std::vector<Step>& steps);

}  // namespace fusedcomm
