// Decorator of a job: weighs its gradients.
#include <utility>

#include "gradients/decorators.h"

namespace fusedcomm {

void weigh(const std::shared_ptr<BucketJob>& job, const Bucket& bucket, const BucketRecord& record,
           const PassWeightPtr& weight) {
  job->pack_factor = weight->pack;
  job->on_done = [weight, rest = std::move(job->on_done)](std::exception_ptr error) {
    rest(weight->error_of(std::move(error)));
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
    job->before_reduce = [residuals, weight, rest = std::move(job->before_reduce)] {
      for (const auto& residual : residuals) {
        weight->on_device.defined() ? residual->weigh_second(weight->on_device)
                                    : residual->weigh_second(weight->unpack);
      }
      if (rest) rest();
    };
  }
  if (weight->is_deferred) return;
  if (bucket.gradients->device().is_cpu() && job->plan->unpacks()) {
    job->unpack_factor = std::shared_ptr<const double>(weight, &weight->unpack);
    return;
  }
  std::vector<at::Tensor> means = {bucket.result()};
  if (!bucket.own_row) means = bucket.gradients->tensors().vec();
  job->after_unpack = [weight, means = std::move(means), rest = std::move(job->after_unpack)] {
    for (const at::Tensor& mean : means) weight->apply(mean);
    if (rest) rest();
  };
}

}  // namespace fusedcomm
