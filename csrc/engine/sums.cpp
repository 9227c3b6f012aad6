#include "engine/sums.h"

#include <algorithm>
#include <stdexcept>

namespace fusedcomm {
namespace {

using Steps = std::vector<Step>;

// ---- single steps

Step make_step(Stage stage, LaneRole role, Operation operation, Buffer from, Buffer to, int64_t nbytes,
               int64_t num_ranks = 1) {
  Step step{stage, role, operation};
  step.from = from;
  step.to = to;
  step.nbytes = nbytes;
  step.num_ranks = num_ranks;
  return step;
}

Step pack(Buffer to, int64_t nbytes) {
  return make_step(Stage::kPack, LaneRole::kPack, Operation::kPack, Buffer::kGradients, to, nbytes);
}

Step local_reduce(int64_t nbytes, int64_t num_ranks) {
  return make_step(Stage::kLocalReduce, LaneRole::kLocalReduce, Operation::kLocalReduce, Buffer::kIncoming,
                   Buffer::kOutgoing, nbytes, num_ranks);
}

Step reduce(int64_t nbytes, int64_t num_ranks) {
  return make_step(Stage::kReduce, LaneRole::kReduce, Operation::kReduce, Buffer::kIncoming, Buffer::kOutgoing, nbytes,
                   num_ranks);
}

Step unpack(Buffer from, int64_t nbytes) {
  return make_step(Stage::kUnpack, LaneRole::kUnpack, Operation::kUnpack, from, Buffer::kGradients, nbytes);
}

Step unpack_sum(int64_t nbytes, int64_t num_messages) {
  return make_step(Stage::kUnpack, LaneRole::kUnpack, Operation::kSum, Buffer::kIncoming, Buffer::kGradients, nbytes,
                   num_messages);
}

Step collective(Operation operation, Stage stage, Channel channel, Buffer from, Buffer to, int64_t nbytes,
                int64_t num_ranks) {
  Step step = make_step(stage, role_of(channel), operation, from, to, nbytes, num_ranks);
  step.channel = channel;
  return step;
}

Step all_to_all(Channel channel, int64_t nbytes, int64_t num_ranks, Buffer from = Buffer::kOutgoing) {
  const Stage stage = is_local(channel) ? Stage::kLocalAllToAll : Stage::kAllToAll;
  return collective(Operation::kAllToAll, stage, channel, from, Buffer::kIncoming, nbytes, num_ranks);
}

Step all_gather(Channel channel, Buffer from, Buffer to, int64_t nbytes, int64_t num_ranks) {
  const Stage stage = is_local(channel) ? Stage::kLocalAllGather : Stage::kAllGather;
  return collective(Operation::kAllGather, stage, channel, from, to, nbytes, num_ranks);
}

Step all_reduce(Buffer buffer, int64_t nbytes, int64_t num_ranks) {
  return collective(Operation::kAllReduce, Stage::kAllReduce, Channel::kScatter, buffer, buffer, nbytes, num_ranks);
}

Step next_leg(Step step) {
  step.begins_leg = true;
  return step;
}

// ---- the sums

// Packs into the incoming buffer, because every engine has one.
Steps added_by_transport(const ChunkShape& of) {
  return {
      pack(Buffer::kIncoming, of.nbytes),
      all_reduce(Buffer::kIncoming, of.nbytes, of.world_size),
      next_leg(unpack(Buffer::kIncoming, of.nbytes)),
  };
}

Steps exact(const ChunkShape& of) {
  if (!of.in_place) return added_by_transport(of);
  return {
      make_step(Stage::kPack, LaneRole::kPack, Operation::kScale, Buffer::kGradients, Buffer::kGradients, of.nbytes),
      all_reduce(Buffer::kGradients, of.nbytes, of.world_size),
  };
}

Steps one_shot(const ChunkShape& of) {
  return {
      pack(Buffer::kOwnMessage, of.nbytes),
      all_gather(Channel::kScatter, Buffer::kOwnMessage, Buffer::kIncoming, of.world_size * of.nbytes, of.world_size),
      next_leg(unpack_sum(of.nbytes, of.world_size)),
  };
}

int64_t num_hosts(const ChunkShape& of) { return of.world_size / of.ranks_per_host; }
// Bytes of a chunk's message between hosts on two levels: the parts that one rank sums within its host.
int64_t between_nbytes(const ChunkShape& of) { return of.nbytes / of.ranks_per_host; }

Steps operator+(Steps first, const Steps& then) {
  first.insert(first.end(), then.begin(), then.end());
  return first;
}

// Sums first over the ranks of each host and then over hosts, so that less crosses the network. Rank l of each host
// adds part l of the messages of its host's ranks. Such a part has one piece for each host. The ranks l of all hosts
// then exchange these pieces, and each of them may add one piece over all hosts.
Steps scattered_on_two_levels(const ChunkShape& of) {
  return {
      pack(Buffer::kOutgoing, of.host_nbytes),
      all_to_all(Channel::kLocalScatter, of.host_nbytes, of.ranks_per_host),
      local_reduce(of.host_nbytes, of.ranks_per_host),
      next_leg(all_to_all(Channel::kCrossScatter, between_nbytes(of), num_hosts(of))),
  };
}

// The way back: each piece crosses the network once for each other host, and spreads inside it. arrived: gets what
// this rank receives of other hosts.
Steps gathered_on_two_levels(const ChunkShape& of, Buffer arrived = Buffer::kIncoming) {
  return {
      next_leg(all_gather(Channel::kCrossGather, Buffer::kOutgoing, arrived, between_nbytes(of), num_hosts(of))),
      all_gather(Channel::kLocalGather, arrived, Buffer::kOutgoing, of.nbytes, of.ranks_per_host),
      unpack(Buffer::kOutgoing, of.nbytes),
  };
}

Steps two_shot(const ChunkShape& of) {
  if (of.ranks_per_host > 1) {
    return scattered_on_two_levels(of) + Steps{reduce(between_nbytes(of), num_hosts(of))} + gathered_on_two_levels(of);
  }
  const Buffer codes = of.keeps_messages ? Buffer::kKeptCodes : Buffer::kOutgoing;
  const Buffer means = of.keeps_messages ? Buffer::kKeptMeans : Buffer::kIncoming;
  return {
      pack(codes, of.nbytes),
      all_to_all(Channel::kScatter, of.nbytes, of.world_size, codes),
      reduce(of.nbytes, of.world_size),
      next_leg(all_gather(Channel::kGather, Buffer::kOutgoing, means, of.nbytes, of.world_size)),
      unpack(means, of.nbytes),
  };
}

constexpr struct {
  Sum sum;
  const char* name;
  Adder adder;
  Steps (*steps)(const ChunkShape&);
} kSums[] = {{Sum::kExact, "exact", Adder::kTransport, exact},
             {Sum::kDirect, "direct", Adder::kTransport, added_by_transport},
             {Sum::kTwoShot, "two-shot", Adder::kOwner, two_shot},
             {Sum::kOneShot, "one-shot", Adder::kEveryRank, one_shot}};

const auto& row_of(Sum sum) {
  for (const auto& row : kSums) {
    if (row.sum == sum) return row;
  }
  throw std::invalid_argument("sum='auto' is not one sum: name one of the others");
}

}  // namespace

LaneRole role_of(Channel channel) {
  switch (channel) {
    case Channel::kGather:
      return LaneRole::kGather;
    case Channel::kLocalGather:
      return LaneRole::kLocalGather;
    case Channel::kCrossScatter:
      return LaneRole::kCrossScatter;
    case Channel::kCrossGather:
      return LaneRole::kCrossGather;
    default:
      return LaneRole::kScatter;
  }
}

std::vector<std::string> sum_names() {
  std::vector<std::string> names = {"auto"};
  for (const auto& row : kSums) names.emplace_back(row.name);
  return names;
}

Sum sum_from_name(const std::string& name) {
  if (name == "auto") return Sum::kAuto;
  for (const auto& row : kSums) {
    if (name == row.name) return row.sum;
  }
  const std::vector<std::string> names = sum_names();
  std::string possible = "'" + names.front() + "'";
  for (size_t i = 1; i < names.size(); ++i) possible += (i + 1 < names.size() ? ", '" : " or '") + names[i] + "'";
  throw std::invalid_argument("sum='" + name + "' is not known: use " + possible);
}

std::string sum_name(Sum sum) { return sum == Sum::kAuto ? "auto" : row_of(sum).name; }

Adder adder_of(Sum sum) { return row_of(sum).adder; }

int64_t Step::sent_nbytes(int64_t num_chunks) const {
  if (!is_collective(operation)) return 0;
  const int64_t times = operation == Operation::kAllReduce ? 2 : 1;
  return times * num_chunks * nbytes * (num_ranks - 1) / num_ranks;
}

int64_t Step::sent_between_hosts_nbytes(int64_t num_chunks, int64_t ranks_on_host, int64_t links_of_host) const {
  const int64_t sent = sent_nbytes(num_chunks);
  if (is_cross(channel)) return sent;
  if (is_local(channel) || num_ranks <= ranks_on_host) return 0;
  if (operation == Operation::kAllReduce) return sent * links_of_host / ranks_on_host;
  return sent * (num_ranks - ranks_on_host) / (num_ranks - 1);
}

std::vector<Step> steps_of(Sum sum, const ChunkShape& shape) { return row_of(sum).steps(shape); }

// As the first half of a two-shot, but the owner of a part writes the sum into gradients.
std::vector<Step> steps_of_reduce_scatter(const ChunkShape& shape) {
  const int64_t part_nbytes = shape.nbytes / shape.world_size;
  if (shape.ranks_per_host > 1)
    return scattered_on_two_levels(shape) + Steps{next_leg(unpack_sum(part_nbytes, num_hosts(shape)))};
  return {
      pack(Buffer::kOutgoing, shape.nbytes),
      all_to_all(Channel::kScatter, shape.nbytes, shape.world_size),
      next_leg(unpack_sum(part_nbytes, shape.world_size)),
  };
}

// As the second half of a two-shot, but each rank packs its own row.
std::vector<Step> steps_of_all_gather(const ChunkShape& shape) {
  const Step own = pack(Buffer::kOutgoing, shape.nbytes / shape.world_size);
  if (shape.ranks_per_host > 1) {
    return Steps{own} + gathered_on_two_levels(shape, shape.keeps_messages ? Buffer::kKeptCodes : Buffer::kIncoming);
  }
  return {
      own,
      all_gather(Channel::kGather, Buffer::kOutgoing, Buffer::kIncoming, shape.nbytes, shape.world_size),
      next_leg(unpack(Buffer::kIncoming, shape.nbytes)),
  };
}

std::vector<Step> steps_of_all_gather_again(const ChunkShape& shape) {
  Steps steps = steps_of_all_gather(shape);
  const auto is_between = [](const Step& step) { return is_cross(step.channel); };
  steps.erase(std::remove_if(steps.begin(), steps.end(), is_between), steps.end());
  return steps;
}

Workspace workspace_of(const std::vector<Step>& steps) {
  Workspace needed;
  for (const Step& step : steps) {
    for (const Buffer buffer : {step.from, step.to}) {
      if (buffer == Buffer::kOutgoing) needed.outgoing_nbytes = std::max(needed.outgoing_nbytes, step.nbytes);
      if (buffer == Buffer::kIncoming) needed.incoming_nbytes = std::max(needed.incoming_nbytes, step.nbytes);
    }
  }
  return needed;
}

}  // namespace fusedcomm
