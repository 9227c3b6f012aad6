#include "frontends/horovod/rank_plan.h"

namespace fusedcomm::horovod {

RankPlan::RankPlan(std::vector<std::vector<Id>> buckets) : buckets_(std::move(buckets)), num_held_(buckets_.size()) {
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    held_.emplace_back(buckets_[bucket].size());
    for (size_t i = 0; i < buckets_[bucket].size(); ++i) place_of_[buckets_[bucket][i]] = {bucket, i};
  }
}

void RankPlan::hold(RequestPtr request) {
  const auto [bucket, i] = place_of_.at(request->id);
  held_[bucket][i] = std::move(request);
  ++num_held_[bucket];
}

std::optional<std::vector<RequestPtr>> RankPlan::take_next(int64_t* number) {
  const size_t next = static_cast<size_t>(num_issued_) % buckets_.size();
  if (is_stopped_ || num_held_[next] < buckets_[next].size()) return std::nullopt;
  std::vector<RequestPtr> requests(buckets_[next].size());
  requests.swap(held_[next]);
  num_held_[next] = 0;
  *number = num_issued_++;
  return requests;
}

std::vector<Id> RankPlan::missing() const {
  const size_t next = static_cast<size_t>(num_issued_) % buckets_.size();
  std::vector<Id> ids;
  for (size_t i = 0; i < buckets_[next].size(); ++i) {
    if (!held_[next][i]) ids.push_back(buckets_[next][i]);
  }
  return ids;
}

std::vector<RequestPtr> RankPlan::take_held() {
  std::vector<RequestPtr> all;
  for (size_t bucket = 0; bucket < held_.size(); ++bucket) {
    for (RequestPtr& request : held_[bucket]) {
      if (request) all.push_back(std::move(request));
      request = nullptr;
    }
    num_held_[bucket] = 0;
  }
  return all;
}

}  // namespace fusedcomm::horovod
