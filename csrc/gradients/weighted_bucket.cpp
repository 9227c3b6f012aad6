// Decorator of a job: weighs its gradients.
#include <memory>
#include <utility>
#include <vector>

#include "gradients/decorators.h"

namespace fusedcomm {
namespace {

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

class WeightedBucket : public JobDecorator {
 public:
  WeightedBucket(const Bucket& bucket, const BucketRecord& record, PassWeightPtr weight, PassWeights* weights)
      : weight_(std::move(weight)),
        weights_(weights),
        reduced_(at::full(weight_->head.sizes(), -1, weight_->head.options())),  // negative: not received
        sum_(at::full_like(reduced_, -1)) {
    weights->note_sum(sum_);
    for (const BucketRecord::Kept& kept : record.kept) {
      if (kept.residual) residuals_.push_back(kept.residual);
    }
    if (!has_after_unpack()) return;
    means_ = bucket.rows() ? std::vector<at::Tensor>{bucket.result()} : bucket.gradients->tensors().vec();
  }

  MessageHead head() const {
    MessageHead head{bytes_of(weight_->head), bytes_of(reduced_), bytes_of(sum_), nullptr};
    if (sum_.is_cpu() && !weight_->is_deferred) {
      head.factor = [weight = weight_, sum = sum_] { return weight->factor(sum.const_data_ptr<float>()); };
    }
    return head;
  }
  std::vector<at::Tensor> storages() const { return {reduced_, sum_}; }

  void before_pack() override {
    for (const auto& residual : residuals_) residual->weigh_first(weight_->share);
  }
  void before_reduce() override {
    const at::NoGradGuard no_grad;
    for (const auto& residual : residuals_) {
      sum_.is_cpu() ? residual->weigh_second(weight_->factor(reduced_.const_data_ptr<float>()))
                    : residual->weigh_second(weight_->factor_of(reduced_));
    }
  }
  bool has_after_unpack() const override { return !sum_.is_cpu() && !weight_->is_deferred; }
  void after_unpack() override {
    if (!has_after_unpack()) return;
    const at::NoGradGuard no_grad;
    const at::Tensor factor = weight_->factor_of(sum_);
    for (const at::Tensor& mean : means_) mean.mul_(factor);
    weights_->received(weight_.get(), sum_);
  }
  std::exception_ptr ended(std::exception_ptr error) override {
    return error || !sum_.is_cpu() ? error : weights_->received(weight_.get(), sum_);
  }

 private:
  const PassWeightPtr weight_;
  PassWeights* const weights_;
  const at::Tensor reduced_, sum_;  // of heads
  std::vector<std::shared_ptr<ResidualBuffer>> residuals_;
  std::vector<at::Tensor> means_;  // what after_unpack() multiplies
};

}  // namespace

std::unique_ptr<JobDecorator> weighted(BucketJob* job, const Bucket& bucket, const BucketRecord& record,
                                       const PassWeightPtr& weight, PassWeights* weights, Engine* engine) {
  const at::NoGradGuard no_grad;
  auto weighted = std::make_unique<WeightedBucket>(bucket, record, weight, weights);
  for (const at::Tensor& tensor : weighted->storages()) engine->device().will_use(tensor);
  job->pack_factor = weight->pack;
  job->head = weighted->head();
  if (weight->share == 0 && !record.plan.on_two_levels()) {
    // What this rank has left out before waits for a pass in which it has a weight. On two levels the residual is of
    // the host's ranks together.
    for (Payload& payload : job->payloads) payload.pack = {};
  }
  return weighted;
}

}  // namespace fusedcomm
