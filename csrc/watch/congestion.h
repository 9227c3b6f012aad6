// Finds the slow place of a network from the bytes that have not left each rank's connections.
//
// A rank that waits for a slow rank is itself late for the next one, so what ranks wait for does not tell where the
// network is slow. But bytes pile up before the slow place, and few of them arrive.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "watch/rank_state.h"

namespace fusedcomm {

struct Congestion {
  // The ranks of the host that sends, and of the host that receives. One of the two is empty where the other host's
  // whole traffic is slow.
  std::vector<int> senders, receivers;
  int64_t unsent_nbytes = 0;
  int64_t arriving_nbytes_per_s = 0;
  int64_t elsewhere_nbytes = 0;  // that have not left other hosts, or for other hosts
};

// Empty where bytes pile up nowhere more than elsewhere.
std::optional<Congestion> find_congestion(const std::map<int, RankState>& answers);

}  // namespace fusedcomm
