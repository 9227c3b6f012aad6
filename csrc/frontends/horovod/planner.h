// Learns from the collectives of a process set whether they repeat, and in which buckets they can be sent. Uses no
// torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "frontends/horovod/messages.h"

namespace fusedcomm::horovod {

inline constexpr int64_t kFirstBucketNbytes = 1 << 20;

// A cycle is what is executed until a name comes again. After enough cycles of the same names there is a plan.
class Planner {
 public:
  // cycles: equal cycles in a row before a plan; 0: plans are off. nbytes: most bytes of a bucket.
  Planner(int64_t cycles, int64_t nbytes) : cycles_(cycles), nbytes_(nbytes) {}

  // Notes that every member has submitted `id`; after_wait: one of them after it had waited for a result. Returns
  // whether a cycle has ended before it, and with it buckets() may have changed.
  bool note_ready(Id id, bool after_wait);
  // Notes that the collective of `ids` has ended.
  void note_done(const std::vector<Id>& ids);
  // Notes something that no plan holds.
  void note_other();
  // Notes that a rank could not follow the plan; `missing`: of a bucket, what it submits only when others are done.
  void note_deviation(const std::vector<Id>& missing);
  void set_nbytes(int64_t nbytes) { nbytes_ = nbytes; }
  // Whether enough cycles were equal.
  bool has_plan() const;
  // A plan runs through the names in a circle. It begins with those that the cycle under way has not executed yet.
  void begin_circle();
  // Or, for a plan that replaces another, with `first`.
  void turn_circle(Id first);
  // The circle, cut into buckets. nbytes_of and fuse describe signatures.
  template <typename NbytesOf, typename Fuse>
  std::vector<std::vector<Id>> buckets(const NbytesOf& nbytes_of, const Fuse& fuse) const;

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
  std::vector<Item> items_;        // of the cycle, in the order in which they were ready
  std::map<Id, size_t> index_of_;  // into items_
  std::vector<Id> order_;          // of the cycle before
  std::set<Id> names_;             // of the cycle before
  std::set<Id> begins_;            // names that began a bucket in one of the equal cycles
  std::set<Id> always_begins_;     // learned from deviations
  std::vector<Id> circle_;
  Id first_of_cycle_ = kNoId;  // where the circle passes from one cycle to the next
  int64_t num_equal_ = 0;      // equal cycles in a row
  int64_t num_deviations_ = 0;
};

template <typename NbytesOf, typename Fuse>
std::vector<std::vector<Id>> Planner::buckets(const NbytesOf& nbytes_of, const Fuse& fuse) const {
  std::vector<std::vector<Id>> buckets;
  int64_t nbytes = 0, most = nbytes_;
  for (const Id id : circle_) {
    const int64_t more = nbytes_of(id);
    // What belongs to the next cycle is submitted only when this one has ended.
    const bool begins = buckets.empty() || id == first_of_cycle_ || begins_.count(id) != 0 ||
                        always_begins_.count(id) != 0 || nbytes + more > most || !fuse(buckets.back().front(), id);
    if (begins) {
      buckets.emplace_back();
      nbytes = 0;
      // A cycle begins with a small bucket, as in DDP, so that the network has work early.
      most = id == first_of_cycle_ ? std::min(nbytes_, kFirstBucketNbytes) : nbytes_;
    }
    buckets.back().push_back(id);
    nbytes += more;
  }
  return buckets;
}

}  // namespace fusedcomm::horovod
