#include "watch/congestion.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>

namespace fusedcomm {
namespace {

// Below kMinUnsentNbytes, bytes may just be on their way. One host must hold kDominantShare of all unsent bytes. If the
// busiest sender's and receiver's shares differ by less than kSameShare, they are one link, and the link is named.
constexpr int64_t kMinUnsentNbytes = 64 << 10;
constexpr double kDominantShare = 0.75, kSameShare = 0.05;

// Below kMinCutMs milliseconds, a busy link may just have dropped the same packet a few times.
constexpr int64_t kMinCutMs = 2000;

bool is_loopback(const std::string& address) { return address.rfind("127.", 0) == 0 || address == "::1"; }

// Maps ranks to hosts and adds up the unsent bytes between each pair of hosts.
class Traffic {
 public:
  explicit Traffic(const std::map<int, RankState>& answers) {
    for (const auto& [rank, state] : answers) place(rank, state.own);
    for (const auto& [rank, state] : answers) {
      for (const auto& [end, nbytes] : state.unsent) {
        const auto to = host_of_.find(end);
        const size_t from = host_of_rank_[rank];
        // Skips connections to addresses of no rank, and connections within a host, which use no network.
        if (to == host_of_.end() || to->second == from) continue;
        const auto per_s = state.per_s.find(end);
        for (Load* load : {&links_[{from, to->second}], &from_[from], &to_[to->second], &all_}) {
          load->unsent += nbytes;
          load->per_s += per_s == state.per_s.end() ? 0 : per_s->second;
        }
      }
    }
  }

  std::vector<Cut> cuts(const std::map<int, RankState>& answers) const {
    std::map<std::pair<size_t, size_t>, Cut> found;
    for (const auto& [rank, state] : answers) {
      for (const auto& [end, ms] : state.unacked_ms) {
        const auto to = host_of_.find(end);
        const size_t from = host_of_rank_.at(rank);
        if (ms < kMinCutMs || to == host_of_.end() || to->second == from) continue;
        const auto [one, other] = std::minmax(from, to->second);
        Cut& cut = found[{one, other}];
        cut.one = ranks_[one];
        cut.other = ranks_[other];
        double& longest_s = from == one ? cut.by_one_s : cut.by_other_s;
        longest_s = std::max(longest_s, static_cast<double>(ms) * 1e-3);
      }
    }
    std::vector<Cut> cuts;
    for (auto& [hosts, cut] : found) cuts.push_back(std::move(cut));
    return cuts;
  }

  std::optional<Congestion> congestion() const {
    if (all_.unsent < kMinUnsentNbytes) return std::nullopt;
    const auto from = busiest(from_), to = busiest(to_);
    const double from_share = share_of(from->second), to_share = share_of(to->second);
    if (std::max(from_share, to_share) < kDominantShare) return std::nullopt;
    // If the shares are this close, both are above one half, so the link between the two hosts holds unsent bytes.
    const bool is_link = std::abs(from_share - to_share) < kSameShare;
    const bool is_sender = from_share > to_share;
    const Load& load = is_link ? links_.at({from->first, to->first}) : (is_sender ? from->second : to->second);
    Congestion found;
    if (is_link || is_sender) found.senders = ranks_[from->first];
    if (is_link || !is_sender) found.receivers = ranks_[to->first];
    found.unsent_nbytes = load.unsent;
    found.arriving_nbytes_per_s = load.per_s;
    found.elsewhere_nbytes = all_.unsent - load.unsent;
    return found;
  }

 private:
  struct Load {
    int64_t unsent = 0, per_s = 0;
  };

  // Ranks that have an address in common, other than loopback, are on one host.
  void place(int rank, const std::set<std::string>& own) {
    size_t host = ranks_.size();
    for (const std::string& address : own) {
      if (const auto known = host_of_.find(address); known != host_of_.end()) host = known->second;
    }
    if (host == ranks_.size()) ranks_.emplace_back();
    ranks_[host].push_back(rank);
    host_of_rank_[rank] = host;
    for (const std::string& address : own) {
      if (!is_loopback(address)) host_of_[address] = host;
    }
  }

  static std::map<size_t, Load>::const_iterator busiest(const std::map<size_t, Load>& loads) {
    return std::max_element(loads.begin(), loads.end(),
                            [](const auto& one, const auto& other) { return one.second.unsent < other.second.unsent; });
  }

  double share_of(const Load& load) const {
    return static_cast<double>(load.unsent) / static_cast<double>(all_.unsent);
  }

  std::vector<std::vector<int>> ranks_;    // by host
  std::map<std::string, size_t> host_of_;  // by address
  std::map<int, size_t> host_of_rank_;
  std::map<std::pair<size_t, size_t>, Load> links_;  // by sending and receiving host
  std::map<size_t, Load> from_, to_;                 // by host
  Load all_;
};

}  // namespace

std::vector<Cut> find_cuts(const std::map<int, RankState>& answers) { return Traffic(answers).cuts(answers); }

std::optional<Congestion> find_congestion(const std::map<int, RankState>& answers) {
  return Traffic(answers).congestion();
}

}  // namespace fusedcomm
