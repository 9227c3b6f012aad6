// Decorator of a job: weighs its gradients.
#include <memory>
#include <utility>
#include <vector>

#include "gradients/decorators.h"

namespace fusedcomm {
namespace {

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

}  // namespace

void weigh(BucketJob* job, const Bucket& bucket, const BucketRecord& record, const PassWeightPtr& weight,
           PassWeights* weights, Engine* engine) {
  const at::NoGradGuard no_grad;
  job->pack_factor = weight->pack;
  const at::TensorOptions options = weight->head.options();
  // Negative: not received.
  const at::Tensor reduced = at::full(weight->head.sizes(), -1, options), sum = at::full_like(reduced, -1);
  for (const at::Tensor& tensor : {reduced, sum}) engine->device().will_use(tensor);
  weights->note_sum(sum);
  job->head = MessageHead{bytes_of(weight->head), bytes_of(reduced), bytes_of(sum), nullptr};
  const bool on_cpu = sum.is_cpu();
  job->on_done = [weight, weights, reduced, sum, on_cpu, rest = std::move(job->on_done)](std::exception_ptr error) {
    rest(error || !on_cpu ? std::move(error) : weights->received(weight.get(), sum));
  };
  if (weight->pack == 0 && !record.plan.on_two_levels()) {
    // What this rank has left out before waits for a pass in which it has a weight. On two levels the residual is of
    // the host's ranks together.
    for (Payload& payload : job->payloads) payload.pack = {};
  }
  std::vector<std::shared_ptr<ResidualBuffer>> residuals;
  for (const BucketRecord::Kept& kept : record.kept) {
    if (kept.residual) residuals.push_back(kept.residual);
  }
  if (!residuals.empty()) {
    job->before_pack = [residuals, weight, rest = std::move(job->before_pack)] {
      for (const auto& residual : residuals) residual->weigh_first(weight->share);
      if (rest) rest();
    };
    job->before_reduce = [residuals, weight, reduced, on_cpu, rest = std::move(job->before_reduce)] {
      const at::NoGradGuard no_grad;
      for (const auto& residual : residuals) {
        on_cpu ? residual->weigh_second(weight->factor(reduced.const_data_ptr<float>()))
               : residual->weigh_second(weight->factor_of(reduced));
      }
      if (rest) rest();
    };
  }
  if (weight->is_deferred) return;
  if (on_cpu) {
    job->head->factor = [weight, data = sum.const_data_ptr<float>()] { return weight->factor(data); };
    return;
  }
  std::vector<at::Tensor> means = {bucket.result()};
  if (!bucket.own_row) means = bucket.gradients->tensors().vec();
  job->after_unpack = [weight, weights, sum, means = std::move(means), rest = std::move(job->after_unpack)] {
    const at::NoGradGuard no_grad;
    const at::Tensor factor = weight->factor_of(sum);
    for (const at::Tensor& mean : means) mean.mul_(factor);
    weights->received(weight.get(), sum);
    if (rest) rest();
  };
}

}  // namespace fusedcomm
