// A rank's progress in the plan of a process set. Not thread-safe: the coordinator's mutex guards it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "frontends/horovod/request.h"

namespace fusedcomm::horovod {

class RankPlan {
 public:
  explicit RankPlan(std::vector<std::vector<Id>> buckets);

  bool holds(Id id) const { return place_of_.count(id) != 0; }
  // Keeps a request until its bucket is complete.
  void hold(RequestPtr request);
  // The next bucket if it is complete and may be issued.
  std::optional<std::vector<RequestPtr>> take_next(int64_t* number);
  // Members of the next bucket that have not been submitted here.
  std::vector<Id> missing() const;
  // The names of bucket `number`, counted from the plan's begin.
  const std::vector<Id>& bucket(int64_t number) const {
    return buckets_[static_cast<size_t>(number) % buckets_.size()];
  }
  int64_t num_issued() const { return num_issued_; }
  bool is_last_of_cycle(int64_t number) const { return (static_cast<size_t>(number) + 1) % buckets_.size() == 0; }
  // Takes back what waits for its bucket.
  std::vector<RequestPtr> take_held();

  // While it stops, nothing more is issued, and no result is written until it is known which buckets are valid.
  void stop() { is_stopped_ = true; }
  bool is_stopped() const { return is_stopped_; }
  void decide(int64_t num_valid) { num_valid_ = num_valid; }
  bool is_decided() const { return num_valid_ >= 0; }
  bool is_void(int64_t number) const { return is_decided() && number >= num_valid_; }

  bool has_asked_to_stop = false;

 private:
  const std::vector<std::vector<Id>> buckets_;
  std::map<Id, std::pair<size_t, size_t>> place_of_;  // bucket and index in it
  std::vector<std::vector<RequestPtr>> held_;         // by bucket and index
  std::vector<size_t> num_held_;
  int64_t num_issued_ = 0;
  bool is_stopped_ = false;
  int64_t num_valid_ = -1;
};

}  // namespace fusedcomm::horovod
