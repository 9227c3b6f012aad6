// What a reducer does whose gradients an optimizer takes.
#include <mutex>
#include <utility>
#include <vector>

#include "frontends/reducer/reducer.h"

namespace fusedcomm {

void GradReducer::give_to(Taker taker) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK(pass_ < 0 && !membership_, rank_text(),
              "a GradReducer that has begun, or whose ranks come and go, cannot give its gradients to an optimizer");
  taker_ = std::move(taker);
}

int64_t GradReducer::num_passes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return pass_ + 1;
}

Buckets GradReducer::buckets_now() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return cut_for(order_, trained_now());
}

std::vector<size_t> GradReducer::parameters_used() const {
  std::vector<size_t> used;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (options_.find_unused ? used_[i] : trained_[i]) used.push_back(i);
  }
  return used;
}

void GradReducer::refuse_other_parameters(const Flags& trained) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (trained[i] == trained_[i]) continue;
    fail(c10::str(
        rank_text(), "requires_grad of ", parameters_[i].name, " has become ", trained[i] ? "True" : "False",
        " since the ShardedOptimizer was made, whose ranks own parts of the parameters that required gradients "
        "then. Call detach(), and make the GradReducer and the ShardedOptimizer anew on every rank; "
        "state_dict() carries the state over"));
  }
}

}  // namespace fusedcomm
