// What Python changes and asks between backward passes.
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "frontends/reducer/reducer.h"

namespace fusedcomm {

bool GradReducer::is_on() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_on_;
}

void GradReducer::turn(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = on;
}

void GradReducer::turn_on_once() {
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = is_on_once_ = true;
}

void GradReducer::scale_means(double factor) {
  std::lock_guard<std::mutex> lock(mutex_);
  mean_factor_ = factor;
}

void GradReducer::detach() {
  end_observation();
  std::lock_guard<std::mutex> lock(mutex_);
  is_on_ = in_pass_ = is_adding_ = false;
  accumulators_.reset();
}

void GradReducer::set_synchroniser(std::shared_ptr<Synchroniser> synchroniser) {
  std::lock_guard<std::mutex> lock(mutex_);
  check_flags();  // while the old one runs
  synchroniser_.swap(synchroniser);
}

void GradReducer::set_caps(const BucketCaps& caps) {
  std::lock_guard<std::mutex> lock(mutex_);
  caps_ = caps;
  buckets_.clear();
}

void GradReducer::observe(std::shared_ptr<Device> device, std::function<void()> before_pass) {
  auto observation = std::make_shared<Observation>(Observation{std::move(device), std::move(before_pass), {}});
  std::lock_guard<std::mutex> lock(mutex_);
  observation_.swap(observation);
}

void GradReducer::end_observation() {
  std::shared_ptr<Observation> ended;  // freed after the lock, because Python's part waits for the GIL
  std::lock_guard<std::mutex> lock(mutex_);
  observation_.swap(ended);
}

std::vector<double> GradReducer::take_pass_ends() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<double> ends_ms;
  if (!observation_) return ends_ms;
  const std::vector<StampPtr> ends = std::exchange(observation_->ends, {});
  for (const StampPtr& end : ends) ends_ms.push_back(end->ms_since(*ends.front()));
  return ends_ms;
}

int64_t GradReducer::num_copied() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return num_copied_;
}

}  // namespace fusedcomm
