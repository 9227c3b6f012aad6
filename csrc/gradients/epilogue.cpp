#include "gradients/epilogue.h"

#include <unordered_set>
#include <utility>

namespace fusedcomm {
namespace {

uint32_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

}  // namespace

void PassEpilogue::want_squares(bool in_unpack) {
  std::lock_guard<std::mutex> lock(mutex_);
  wanted_.squares = true;
  wanted_.in_unpack = in_unpack;
}

void PassEpilogue::set_unscale(float unscale) {
  std::lock_guard<std::mutex> lock(mutex_);
  wanted_.next_unscale = unscale;
}

void PassEpilogue::require_unscale(bool required) {
  std::lock_guard<std::mutex> lock(mutex_);
  wanted_.requires_unscale = required;
  if (!required) wanted_.next_unscale.reset();
}

void PassEpilogue::take_over(PassEpilogue& from) {
  std::scoped_lock lock(mutex_, from.mutex_);
  wanted_ = from.wanted_;
  from.wanted_.requires_unscale = false;
  from.wanted_.next_unscale.reset();
}

float PassEpilogue::unscale() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return unscale_;
}

PassEpilogue::Task PassEpilogue::begin_bucket(size_t index, bool is_last, const std::vector<at::Tensor>& parameters) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index == 0) {
    TORCH_CHECK(wanted_.next_unscale || !wanted_.requires_unscale,
                "fusedcomm: a backward pass began whose loss GradScaler.scale() has not scaled since the last pass, so "
                "the gradients would be a mixture of scaled and unscaled ones. Call backward() once for each "
                "scaler.scale(loss), and all but the last of a step within no_sync(). For passes without a loss scale: "
                "scaler.release()");
    unscale_ = wanted_.next_unscale.value_or(1.0f);
    wanted_.next_unscale.reset();
    unscaled_ = 1;
    ++pass_;
    buckets_.clear();
  }
  if (is_last) unscaled_ = unscale_;
  // The parameters are kept only if somebody may ask for their norm.
  if (wanted_.squares) {
    buckets_.resize(index + 1);
    buckets_[index].parameters = parameters;
  }
  return {wanted_.squares && wanted_.in_unpack, unscale_, pass_};
}

void PassEpilogue::set_squares(int64_t pass, size_t index, double squares) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pass == pass_ && index < buckets_.size()) buckets_[index].squares = squares;
}

void PassEpilogue::forget_squares(size_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index < buckets_.size()) buckets_[index].squares.reset();
}

void PassEpilogue::note_gradients() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (OfBucket& bucket : buckets_) {
    bucket.seen.clear();
    for (const at::Tensor& parameter : bucket.parameters) {
      const at::Tensor& gradient = parameter.grad();
      if (gradient.defined()) {
        bucket.seen.push_back(Seen{WeakPtr(gradient.getIntrusivePtr()), version_of(gradient)});
      } else {
        bucket.seen.emplace_back();
        bucket.squares.reset();  // it includes what the bucket holds for the parameter
      }
    }
  }
}

bool PassEpilogue::is_on() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return wanted_.squares;
}

bool PassEpilogue::OfBucket::is_unchanged(size_t i) const {
  const at::Tensor& gradient = parameters[i].grad();
  if (i >= seen.size() || !seen[i] || !gradient.defined()) return false;
  return seen[i]->gradient._unsafe_get_target() == gradient.unsafeGetTensorImpl() &&
         seen[i]->version == version_of(gradient);
}

PassEpilogue::Squares PassEpilogue::squares(const std::vector<at::Tensor>& parameters) const {
  std::lock_guard<std::mutex> lock(mutex_);
  Squares squares;
  std::unordered_set<const c10::TensorImpl*> asked, in_sum;
  for (const at::Tensor& parameter : parameters) asked.insert(parameter.unsafeGetTensorImpl());
  for (const OfBucket& bucket : buckets_) {
    bool holds = bucket.squares.has_value();
    for (size_t i = 0; holds && i < bucket.parameters.size(); ++i) {
      holds = bucket.is_unchanged(i) && asked.count(bucket.parameters[i].unsafeGetTensorImpl()) != 0;
    }
    if (!holds) continue;
    squares.sum += *bucket.squares;
    for (const at::Tensor& parameter : bucket.parameters) in_sum.insert(parameter.unsafeGetTensorImpl());
  }
  // A tied parameter may have been given twice.
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined() && in_sum.insert(parameter.unsafeGetTensorImpl()).second) {
      squares.others.push_back(parameter);
    }
  }
  return squares;
}

float PassEpilogue::unscaled() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return unscaled_;
}

float PassEpilogue::take_unscaled() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(unscaled_, 1.0f);
}

std::vector<at::Tensor> PassEpilogue::parameters() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<at::Tensor> all;
  for (const OfBucket& bucket : buckets_) all.insert(all.end(), bucket.parameters.begin(), bucket.parameters.end());
  return all;
}

bool PassEpilogue::has_unchanged() const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const OfBucket& bucket : buckets_) {
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      if (bucket.is_unchanged(i)) return true;
    }
  }
  return false;
}

}  // namespace fusedcomm
