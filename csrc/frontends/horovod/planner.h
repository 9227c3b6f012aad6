// Learns from the collectives of a process set whether they repeat, and in which buckets they can be sent. Uses no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "frontends/horovod/messages.h"

namespace fusedcomm::horovod {

// A cycle is what is executed until a name comes again. After enough cycles of the same names there is a plan.
class Planner {
 public:
  // cycles: that must be equal before there is a plan; 0: there never is. nbytes: of a bucket.
  Planner(int64_t cycles, int64_t nbytes) : cycles_(cycles), nbytes_(nbytes) {}

  // Notes that every member has submitted `id`; after_wait: one of them after it had waited for a result. Returns whether
  // a cycle has ended before it, and with it buckets() may have changed.
  bool note_ready(Id id, bool after_wait);
  // Notes that the collective of `ids` has ended.
  void note_done(const std::vector<Id>& ids);
  // Notes something that no plan holds.
  void note_other();
  // Notes that a rank could not follow the plan; `missing`: of a bucket, what it submits only when others are done.
  void note_deviation(const std::vector<Id>& missing);
  void set_nbytes(int64_t nbytes) { nbytes_ = nbytes; }
  // What of the cycle under way has been executed.
  std::set<Id> executed() const;
  // The plan; empty if there is none. done: what of the cycle under way needs not be sent again; the plan begins with
  // the others. nbytes_of and fuse describe signatures.
  template <typename NbytesOf, typename Fuse>
  std::vector<std::vector<Id>> buckets(const std::set<Id>& done, const NbytesOf& nbytes_of, const Fuse& fuse) const;

 private:
  struct Item {
    Id id;
    int64_t ready, done;  // numbers of these events; done: INT64_MAX until then
    bool after_wait;
  };
  void end_cycle();

  const int64_t cycles_;
  int64_t nbytes_;
  int64_t num_events_ = 0;
  std::vector<Item> items_;         // of the cycle, in the order in which they were ready
  std::map<Id, size_t> index_of_;   // into items_
  std::vector<Id> order_;           // of the cycle before
  std::set<Id> names_;              // of the cycle before
  std::set<Id> begins_;             // names that began a bucket in one of the equal cycles
  std::set<Id> always_begins_;      // learned from deviations
  int64_t num_equal_ = 0;           // equal cycles in a row
  int64_t num_deviations_ = 0;
};

template <typename NbytesOf, typename Fuse>
std::vector<std::vector<Id>> Planner::buckets(const std::set<Id>& done, const NbytesOf& nbytes_of,
                                              const Fuse& fuse) const {
  // A plan that ranks had to leave is tried again later and later.
  const int64_t needed = cycles_ << (num_deviations_ < 6 ? num_deviations_ : 6);
  if (cycles_ == 0 || num_equal_ < needed || order_.empty()) return {};
  std::vector<Id> order = order_;
  std::stable_partition(order.begin(), order.end(), [&](Id id) { return done.count(id) == 0; });
  std::vector<std::vector<Id>> buckets;
  int64_t nbytes = 0;
  for (const Id id : order) {
    const int64_t more = nbytes_of(id);
    const bool begins = buckets.empty() || begins_.count(id) != 0 || always_begins_.count(id) != 0 ||
                        nbytes + more > nbytes_ || !fuse(buckets.back().front(), id) ||
                        done.count(id) != done.count(buckets.back().front());
    if (begins) {
      buckets.emplace_back();
      nbytes = 0;
    }
    buckets.back().push_back(id);
    nbytes += more;
  }
  return buckets;
}

}  // namespace fusedcomm::horovod
