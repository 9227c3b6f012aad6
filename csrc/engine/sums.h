// The sums, each as a list of steps: what happens to one chunk of a bucket, in order. The engine walks the list for
// every chunk, plan.cpp adds up the bytes that it sends, and the cost model adds up how long its steps take. A new sum
// is a new enumerator here, and in sums.cpp a new list with its row in kSums.
//
// A chunk has a workspace of two buffers. Most steps read one buffer, which the step before has written, and write the
// other.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/stage.h"
#include "lanes/lane.h"
#include "transport/transport.h"

namespace fusedcomm {

enum class Sum : uint8_t {
  kAuto,     // plan_bucket() chooses exact, two-shot or one-shot
  kExact,    // all-reduce in fp32
  kDirect,   // all-reduce in the 16-bit wire dtype; the transport rounds at every addition
  kTwoShot,  // all-to-all; a part's owner adds it in fp32, in rank order, and encodes the mean; all-gather
  kOneShot   // all-gather of every rank's encoded chunk; each rank adds them in fp32, in rank order
};

// "auto" first, then the others in the order of Sum.
std::vector<std::string> sum_names();
// Throws std::invalid_argument if sum_names() does not have `name`.
Sum sum_from_name(const std::string& name);
std::string sum_name(Sum sum);

// What adds the ranks' chunks.
enum class Adder : uint8_t {
  kTransport,  // an all-reduce, which has one dtype
  kOwner,      // the codec of the rank that owns a part; a chunk has a part for each rank
  kEveryRank   // every rank's codec adds the whole chunks of all ranks
};
// Throws std::invalid_argument for kAuto.
Adder adder_of(Sum sum);

// The codec's operations, then the transport's.
enum class Operation : uint8_t {
  kScale,        // scales gradients in place
  kPack,         // encodes gradients into a message
  kLocalReduce,  // adds the parts of a host's ranks into their sum
  kReduce,       // adds the parts of all ranks or hosts into their mean
  kUnpack,       // decodes a message into gradients
  kSum,          // adds every rank's message into gradients, their mean
  kAllToAll,
  kAllGather,
  kAllReduce
};
inline constexpr bool is_collective(Operation operation) { return operation >= Operation::kAllToAll; }

// The lane that starts the channel's collectives. The local scatter shares its lane with the channel among all ranks.
LaneRole role_of(Channel channel);

enum class Buffer : uint8_t {
  kGradients,
  kOutgoing,    // the workspace's first buffer
  kIncoming,    // the workspace's second buffer
  kOwnMessage,  // this rank's message within kIncoming, where kIncoming holds every rank's
  kKeptCodes,   // the chunk's part of the bucket's kept codes; see KeptMessages in job.h
  kKeptMeans    // the chunk's part of the bucket's kept means
};

struct Step {
  Stage stage = Stage::kPack;
  LaneRole role = LaneRole::kPack;
  Operation operation = Operation::kPack;
  Channel channel = Channel::kScatter;  // collectives only
  Buffer from = Buffer::kGradients;
  Buffer to = Buffer::kGradients;
  // Bytes of the message that the step reads. Exceptions: for a pack, of the message that it writes; for a kSum, of one
  // rank's message; for an all-gather, of the result.
  int64_t nbytes = 0;
  // The ranks of a collective, or the number of parts or messages that the codec adds; else 1.
  int64_t num_ranks = 1;
  // Whether a leg begins with this step. The engine enqueues a chunk's steps leg by leg. While a chunk waits for its
  // next leg, the wire carries other chunks.
  bool begins_leg = false;

  // Bytes that one rank sends in this step for `num_chunks` chunks. An all-to-all or all-gather among n ranks sends
  // (n-1)/n of each message. An all-reduce, which is a ring, sends twice as much. A step of the codec sends nothing.
  int64_t sent_nbytes(int64_t num_chunks) const;
  // The bytes of these that go to other hosts, as the mean of the `ranks_on_host` ranks of this rank's host; 0 if all
  // ranks share one. In a collective of all ranks, an all-to-all and an all-gather send to each rank of another host,
  // and an all-reduce, which is a ring in the order of ranks, leaves the host on `links_of_host` of its links.
  int64_t sent_between_hosts_nbytes(int64_t num_chunks, int64_t ranks_on_host, int64_t links_of_host) const;
};

// What the steps depend on, besides the sum.
struct ChunkShape {
  int64_t world_size = 1;
  int64_t nbytes = 0;  // of a rank's message, or of the gradients if they are summed in place
  bool in_place = false;
  int64_t ranks_per_host = 1;  // more than 1: a sum may have two levels
  int64_t host_nbytes = 0;     // of the message within a host; 0 on one level
  bool keeps_messages = false;
};

// The steps of one chunk, the same on every rank. Throws std::invalid_argument for kAuto.
std::vector<Step> steps_of(Sum sum, const ChunkShape& shape);

// The steps of a chunk of a reduce-scatter, and of an all-gather: the halves of a two-shot, of which shape.nbytes is
// the message, with a part for each rank. An all-gather ignores host_nbytes, because it sends the same codes on both
// levels. With keeps_messages, on two levels, it keeps what a rank receives of other hosts.
std::vector<Step> steps_of_reduce_scatter(const ChunkShape& shape);
std::vector<Step> steps_of_all_gather(const ChunkShape& shape);
// Gathers once more, within hosts, what an all-gather has kept.
std::vector<Step> steps_of_all_gather_again(const ChunkShape& shape);

// Bytes of the two buffers that a chunk needs; 0 for a buffer that no step uses.
struct Workspace {
  int64_t outgoing_nbytes = 0;
  int64_t incoming_nbytes = 0;
};
Workspace workspace_of(const std::vector<Step>& steps);

}  // namespace fusedcomm
