// What the ranks tell each other, and how they fail together.
#include <ATen/ATen.h>

#include <chrono>
#include <condition_variable>
#include <string>
#include <utility>

#include "frontends/reducer/reducer.h"

namespace fusedcomm {
namespace {

// A wait asks whether another rank has a problem after kFirstPoll, and then every kLaterPoll.
constexpr std::chrono::milliseconds kFirstPoll{1000}, kLaterPoll{500};
// An error names at most this many parameters.
constexpr size_t kMaxNamed = 8;

}  // namespace

GatheredPtr GradReducer::gather(const std::vector<int64_t>& numbers, const std::string& what) {
  return fusedcomm::gather(*synchronizer_, at::tensor(at::ArrayRef<int64_t>(numbers), at::kLong), what);
}

const at::Tensor& GradReducer::wait_for_numbers(const GatheredPtr& numbers) {
  wait(numbers->future);
  return numbers->get();
}

void GradReducer::agree_on_order() {
  must_agree_on_order_ = false;
  order_ = order_of_arrival();
  if (world_size_ > 1) {
    const std::vector<int64_t> own(order_.begin(), order_.end());
    const at::Tensor of_all = wait_for_numbers(gather(own, "the order of gradients"));
    const int64_t* const of_rank_0 = of_all.const_data_ptr<int64_t>();
    order_.assign(of_rank_0, of_rank_0 + own.size());
  }
  if (pass_ == 0 || rank_ != 0 || has_said_new_order_) return;
  has_said_new_order_ = true;
  notices_.push_back(
      c10::str("fusedcomm: gradients arrive in another order than in the passes before: from backward pass ", pass_ + 1,
               " on, the buckets are cut for the new order. Further changes are not reported"));
}

void GradReducer::send_flags() {
  flags_of_all_ = nullptr;
  if (world_size_ == 1) return;
  std::vector<int64_t> numbers = {wants_new_order_, taker_ ? taker_->begin() : num_parameters_, part_ == Part::kZeros};
  numbers.insert(numbers.end(), trained_.words().begin(), trained_.words().end());
  wants_new_order_ = false;
  flags_of_all_ = gather(numbers, "the list of trained parameters");
}

void GradReducer::check_flags() {
  if (!flags_of_all_) return;
  const GatheredPtr flags = std::exchange(flags_of_all_, nullptr);
  const at::Tensor& of_all = wait_for_numbers(flags);
  Flags of_rank_0(parameters_.size()), of_rank(parameters_.size());
  constexpr int64_t kNumBefore = 3;  // numbers that are no flags
  of_rank_0.assign(of_all[0].const_data_ptr<int64_t>() + kNumBefore);
  for (int64_t rank = 1; rank < world_size_; ++rank) {
    const int64_t first = of_all[0][1].item<int64_t>(), other = of_all[rank][1].item<int64_t>();
    if (first != other && taker_) give_up(taker_->why_unequal());
    if (first != other) {
      give_up(c10::str("fusedcomm: the ranks do not have the same parameters: in step ", pass_, ", rank 0 has ", first,
                       " and rank ", rank, " has ", other,
                       ". Call add_param_group() on every rank, between the same steps"));
    }
    of_rank.assign(of_all[rank].const_data_ptr<int64_t>() + kNumBefore);
    if (of_rank == of_rank_0) continue;
    size_t index = 0;
    while (of_rank[index] == of_rank_0[index]) ++index;
    const auto text = [index](const Flags& flags) { return flags[index] ? "True" : "False"; };
    give_up(c10::str("fusedcomm: the ranks do not train the same parameters: in backward pass ", pass_,
                     ", requires_grad of ", parameters_[index].name, " was ", text(of_rank_0), " on rank 0 and ",
                     text(of_rank), " on rank ", rank,
                     ". Freeze and thaw the same parameters on every rank, between the same steps. Then call detach() "
                     "and make a new GradReducer"));
  }
  must_agree_on_order_ = must_agree_on_order_ || of_all[0][0].item<int64_t>() != 0;
}

void GradReducer::wait_for_pass() {
  GatheredPtr used_of_all;
  if (options_.find_unused && world_size_ > 1) {
    used_of_all = gather(used_.words(), "the list of used parameters");
  }
  if (!is_accelerated_) check_flags();  // on an accelerator the next pass reads them, which have arrived by then
  for (UnderWay& bucket : under_way_) {
    if (bucket.future) wait(bucket.future);
    bucket.used_by = nullptr;
  }
  if (used_of_all && needs_used_of_all()) {
    const at::Tensor& words = wait_for_numbers(used_of_all);
    for (int64_t rank = 0; rank < world_size_; ++rank) used_.add(words[rank].const_data_ptr<int64_t>());
  }
}

bool GradReducer::needs_used_of_all() const {
  if (taker_) return true;
  for (size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    for (size_t i = 0; i < buckets_[bucket].size(); ++i) {
      if (under_way_[bucket].gradients[i].is_copy && !used_[buckets_[bucket][i]]) return true;
    }
  }
  return false;
}

void GradReducer::check() {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(failure_.empty(), failure_);
  const std::string problem = problem_.read();
  if (!problem.empty()) give_up(problem);
}

void GradReducer::wait(const FuturePtr& future) {
  if (!future->completed()) {
    struct Done {
      std::mutex mutex;
      std::condition_variable changed;
      bool is_set = false;
    };
    const auto done = std::make_shared<Done>();
    future->addCallback([done](c10::ivalue::Future&) {
      std::lock_guard<std::mutex> lock(done->mutex);
      done->is_set = true;
      done->changed.notify_all();
    });
    std::unique_lock<std::mutex> lock(done->mutex);
    for (auto poll = kFirstPoll; !done->changed.wait_for(lock, poll, [&] { return done->is_set; }); poll = kLaterPoll) {
      lock.unlock();
      if (!membership_) problem_.note_pass(rank_, pass_);
      // Members go on without a rank that has a problem.
      std::string problem = membership_ ? "" : problem_.read();
      if (problem.empty() && options_.steps) problem = options_.steps->failure_of_job();
      if (!problem.empty()) give_up(problem);
      lock.lock();
    }
  }
  // No rank is lost where all refuse a weight.
  const bool is_refused = future->hasError() && synchronizer_->weights().is_refused();
  if (future->hasError() && membership_ && !is_refused) throw Interrupted(future->tryRetrieveErrorMessage());
  if (future->hasError()) {
    // Another rank's problem may have caused this one.
    const std::string problem = problem_.read();
    if (!problem.empty()) give_up(problem);
    in_pass_ = false;
    failure_ = future->tryRetrieveErrorMessage();
  }
  future->waitAndThrow();  // on an accelerator the current stream waits
}

void GradReducer::fail(const std::string& why) {
  problem_.publish(why);
  give_up(why);
}

void GradReducer::give_up(const std::string& why) {
  failure_ = why;
  in_pass_ = false;
  under_way_.clear();
  synchronizer_->stop(why);  // buckets under way no longer write to gradients
  TORCH_CHECK(false, why);
}

std::string GradReducer::missing_text() const {
  std::string names;
  size_t num_missing = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (bucket_of_[i] == SIZE_MAX || has_arrived_[i]) continue;
    if (++num_missing <= kMaxNamed) names += (num_missing > 1 ? ", " : "") + parameters_[i].name;
  }
  if (num_missing > kMaxNamed) names += c10::str(", … (", num_missing, ")");
  return c10::str(
      rank_text(), "the backward pass brought no gradient for ", names,
      ", which require one. If a step need not use every parameter: GradReducer(…, "
      "find_unused_parameters=True). If backward() is called several times in a step: call all but the last "
      "within no_sync(). Then call detach() and make a new GradReducer");
}

std::string GradReducer::rank_text() const { return c10::str("fusedcomm: rank ", rank_, " of ", world_size_, ": "); }

}  // namespace fusedcomm
