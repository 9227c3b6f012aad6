#include "frontends/horovod/planner.h"

#include <algorithm>
#include <limits>

namespace fusedcomm::horovod {
namespace {

constexpr int64_t kMaxDoublings = 6;

}  // namespace

bool Planner::note_ready(Id id, bool after_wait) {
  bool has_ended = false;
  if (index_of_.count(id) != 0) {
    end_cycle();
    has_ended = true;
  }
  index_of_[id] = items_.size();
  items_.push_back({id, num_events_++, std::numeric_limits<int64_t>::max(), after_wait});
  return has_ended;
}

void Planner::note_done(const std::vector<Id>& ids) {
  const int64_t now = num_events_++;
  for (const Id id : ids) {
    const auto found = index_of_.find(id);
    if (found != index_of_.end()) items_[found->second].done = now;
  }
}

bool Planner::has_plan() const {
  // A plan that ranks had to leave is tried again later and later.
  const int64_t needed = cycles_ << std::min<int64_t>(num_deviations_, kMaxDoublings);
  return cycles_ != 0 && num_equal_ >= needed && !order_.empty();
}

void Planner::begin_circle() {
  circle_ = order_;
  const auto done =
      std::stable_partition(circle_.begin(), circle_.end(), [this](Id id) { return index_of_.count(id) == 0; });
  first_of_cycle_ = done == circle_.end() ? circle_.front() : *done;
}

void Planner::turn_circle(Id first) {
  std::rotate(circle_.begin(), std::find(circle_.begin(), circle_.end(), first), circle_.end());
}

void Planner::note_other() {
  items_.clear();
  index_of_.clear();
  num_equal_ = 0;
  names_.clear();
  order_.clear();
  begins_.clear();
}

void Planner::note_deviation(const std::vector<Id>& missing) {
  ++num_deviations_;
  always_begins_.insert(missing.begin(), missing.end());
  note_other();
}

void Planner::end_cycle() {
  std::vector<Id> order;
  std::set<Id> begins;
  int64_t first_done = std::numeric_limits<int64_t>::max();  // of the bucket that is being filled
  for (const Item& item : items_) {
    // What a caller submits only when it has another's result cannot be sent together with that.
    if (item.after_wait && item.ready > first_done) {
      begins.insert(item.id);
      first_done = std::numeric_limits<int64_t>::max();
    }
    first_done = std::min(first_done, item.done);
    order.push_back(item.id);
  }
  std::set<Id> names(order.begin(), order.end());
  if (names != names_) {
    num_equal_ = 0;
    begins_.clear();
  }
  ++num_equal_;
  names_ = std::move(names);
  order_ = std::move(order);
  begins_.insert(begins.begin(), begins.end());
  items_.clear();
  index_of_.clear();
}

}  // namespace fusedcomm::horovod
