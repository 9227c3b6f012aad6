// Rank 0's Negotiator, beside every process's Order (order.h): counts which ranks have submitted what, compares it when
// all have, and decides what all issue next, in one order for all. Not for several threads at once.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "frontends/horovod/messages.h"

namespace fusedcomm::horovod {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

struct NegotiatorOptions {
  int64_t fusion_nbytes = 25 << 20;  // most bytes of a bucket
  double stall_warning_s = 60;       // 0: never
  double stall_shutdown_s = 0;       // 0: never
};

class Negotiator {
 public:
  using Say = std::function<void(const std::string& text)>;
  // What a rank has submitted: the signature, the rank, and the rows.
  using Said = std::tuple<std::string, int, std::vector<int64_t>>;
  // Why two ranks' operations of one name cannot be one; empty if they can.
  using Mismatch = std::function<std::string(const Said& a, const Said& b)>;

  // sets: the ranks of each process set.
  Negotiator(int size, const std::vector<std::vector<int>>& sets, const NegotiatorOptions& options, Mismatch mismatch,
             Say say);

  void add(int set, int rank, Entry entry);
  // Whether the set has something to be issued; with is_busy, only if that fills a bucket.
  bool is_due(int set, bool is_busy) const;
  Buckets take(int set);

  struct Stalls {
    std::optional<Clock::time_point> next;  // when to look again; none: nothing waits
    std::string fatal;                      // why everything ends; empty: it goes on
  };
  // Warns of ranks that do not submit.
  Stalls look_for_stalls();

 private:
  // An operation that some members have submitted.
  struct Pending {
    std::vector<Entry> entries;  // by member; without an operation: it has submitted none
    size_t first = 0;            // the member that came first
    size_t num_missing = 0;
    int last_rank = 0;  // that has submitted it
    std::string problem;
    bool is_awaited = false;  // by a member that has not refused it
    Clock::time_point since = Clock::now();
    bool was_reported = false;

    const Operation& operation() const { return *entries[first].operation; }
  };
  struct Set {
    std::vector<int> ranks;
    std::map<std::string, Pending> pending;  // by key
    std::vector<Pending> ready;
    int64_t ready_nbytes = 0;
  };
  void look_whether_ready(Set& set, const std::string& key);
  static Response response_of(Pending pending);
  static std::string missing_text(const Set& set, const Pending& pending);
  void warn(const std::string& missing, const std::vector<std::string>& keys) const;

  const NegotiatorOptions options_;
  const Mismatch mismatch_;
  const Say say_;
  std::vector<Set> sets_;
  std::vector<bool> joined_;  // by rank
};

}  // namespace fusedcomm::horovod
