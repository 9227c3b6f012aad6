// Finds the slow or cut part of a network from the unsent and unacknowledged bytes of each rank's connections.
//
// What ranks wait for does not tell where the network is slow: a rank that waits for a slow rank becomes late itself.
// But unsent bytes pile up before the slow part, and few of them arrive.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "watch/rank_state.h"

namespace fusedcomm {

struct Congestion {
  // The ranks of the sending host and of the receiving host. If `senders` is empty, all traffic to the receivers is
  // slow. If `receivers` is empty, all traffic from the senders is slow.
  std::vector<int> senders, receivers;
  int64_t unsent_nbytes = 0;          // of that traffic
  int64_t arriving_nbytes_per_s = 0;  // of that traffic
  int64_t elsewhere_nbytes = 0;       // unsent bytes of all other traffic between hosts
};

// Two hosts between which bytes do not arrive in one direction at least.
struct Cut {
  std::vector<int> one, other;  // the ranks of the two hosts
  // Seconds for which the other host has acknowledged nothing of what these ranks sent; 0: that is not known.
  double by_one_s = 0, by_other_s = 0;
};

// Returns the cuts between ranks that have answered, each pair of hosts once.
std::vector<Cut> find_cuts(const std::map<int, RankState>& answers);

// Returns nothing if few bytes are unsent or if no host holds most of them.
std::optional<Congestion> find_congestion(const std::map<int, RankState>& answers);

}  // namespace fusedcomm
