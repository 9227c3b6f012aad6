// What a reducer does when ranks are lost within a pass.
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "frontends/reducer/reducer.h"
#include "transport/error_text.h"

namespace fusedcomm {

void GradReducer::use(Membership membership) {
  std::lock_guard<std::mutex> lock(mutex_);
  membership_ = std::move(membership);
}

void GradReducer::set_ranks(std::shared_ptr<Synchronizer> synchronizer, StorePtr store) {
  Problem problem(std::move(store));
  std::lock_guard<std::mutex> lock(mutex_);
  flags_of_all_ = nullptr;
  synchronizer_.swap(synchronizer);
  std::swap(problem_, problem);
  rank_ = synchronizer_->engine().rank();
  world_size_ = synchronizer_->engine().world_size();
}

void GradReducer::wait_for_members(std::unique_lock<std::mutex>& lock) try {
  for (;;) {
    std::string failure;
    try {
      wait_for_pass();
      if (is_accelerated_) wait_for_device();
    } catch (const Interrupted& interrupted) {
      failure = interrupted.what();
    }
    const std::shared_ptr<Synchronizer> before = synchronizer_;
    lock.unlock();
    const bool counts = failure.empty() && membership_->finish();
    const std::shared_ptr<Synchronizer> next = counts ? nullptr : membership_->recover(failure);
    lock.lock();
    if (!next) return;
    synchronizer_ = next;
    hand_over_again(*before);
  }
} catch (const std::exception& error) {
  if (!lock.owns_lock()) lock.lock();
  in_pass_ = false;
  under_way_.clear();
  failure_ = error_text(error);
  throw;
}

void GradReducer::wait_for_device() {
  if (!synchronizer_->wait_for_device()) {
    throw Interrupted(rank_text() + "the ranks have changed before the device had ended the pass");
  }
  check_flags();  // they have arrived, so the host does not wait
}

void GradReducer::hand_over_again(Synchronizer& from) {
  std::vector<Bucket> buckets = from.kept().packed(from.engine());
  synchronizer_->take_over(from, /*again=*/true);
  send_flags();
  for (const Bucket& bucket : buckets) {
    UnderWay& under_way = under_way_[bucket.index];
    under_way.future = synchronizer_->run(bucket);
    if (is_accelerated_) under_way.used_by = synchronizer_->engine().shared_device();
  }
}

}  // namespace fusedcomm
