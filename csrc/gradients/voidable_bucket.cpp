// How the synchroniser leaves gradients and residuals as they were if a bucket turns out to be void.
#include <ATen/ATen.h>

#include <memory>
#include <utility>
#include <vector>

#include "gradients/synchroniser.h"

namespace fusedcomm {

void Synchroniser::make_voidable(const std::shared_ptr<BucketJob>& job, const Bucket& bucket,
                                 const std::shared_ptr<const BucketRecord>& record, std::vector<SpentResidual> spent) {
  TORCH_CHECK(device_.is_cpu() && !record->plan.in_place, "fusedcomm: ", record->label->text,
              " may turn out to be void, which needs gradients on CPU that are not summed in their own memory");
  job->is_void = bucket.is_void;
  // Encoders change residuals long before the bucket is known to be void, so there are copies until then.
  using Kept = std::vector<std::pair<at::Tensor, at::Tensor>>;  // (a residual, what it was)
  const auto kept = std::make_shared<Kept>();
  job->before_pack = [record, kept, before_pack = std::move(job->before_pack)] {
    const at::NoGradGuard no_grad;
    for (const BucketRecord::Payload& stream : record->streams) {
      if (!stream.residual) continue;
      for (const at::Tensor& storage : stream.residual->storages()) kept->emplace_back(storage, storage.clone());
    }
    if (before_pack) before_pack();
  };
  // The job owns the function.
  job->after_unpack = [this, own = job.get(), index = bucket.index, record, kept, spent = std::move(spent)] {
    const at::NoGradGuard no_grad;
    if (own->was_void) {
      for (const auto& [residual, before] : *kept) at::Tensor(residual).copy_(before);
      std::lock_guard<std::mutex> lock(mutex_);
      for (const SpentResidual& each : spent) each.give_back();
      if (!spent.empty() && index < records_.size() && records_[index] == record) records_[index] = nullptr;
    }
    kept->clear();
  };
}

}  // namespace fusedcomm
