#include "gradients/kept_pass.h"

#include <c10/core/DeviceGuard.h>

#include <cstring>
#include <utility>

#include "gradients/decorators.h"
#include "transport/wire_tensor.h"
#include "wire/relayout.h"

namespace fusedcomm {
namespace {

// Bytes of a message, as a tensor that shares and owns their memory.
at::Tensor as_bytes(const std::shared_ptr<std::byte>& data, int64_t nbytes, c10::Device device) {
  return as_tensor({data.get(), nbytes, data}, at::kByte, device);
}

// Waits on the host for the calling thread's stream. Otherwise what it reads might be given back to another stream,
// which would use the memory again.
void wait_for_caller(Device& device) {
  const StampPtr now = device.stamp();
  now->ms_since(*now);
}

// Remembers the second residuals of a bucket as they are before its sum.
class RememberedBucket : public JobDecorator {
 public:
  explicit RememberedBucket(BucketRecordPtr record) : record_(std::move(record)) {
    for (const BucketRecord::Kept& kept : record_->kept) {
      if (kept.residual) kept.residual->forget_second();
    }
  }

  void before_reduce() override {
    for (const BucketRecord::Kept& kept : record_->kept) {
      if (kept.residual) kept.residual->remember_second();
    }
  }

 private:
  const BucketRecordPtr record_;
};

}  // namespace

std::unique_ptr<JobDecorator> remembered(const BucketRecordPtr& record) {
  return std::make_unique<RememberedBucket>(record);
}

void KeptPass::note(KeptBucket bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (bucket.bucket.index == 0) under_way_.clear();
  under_way_.push_back(std::move(bucket));
}

void KeptPass::end() {
  std::lock_guard<std::mutex> lock(mutex_);
  ended_.clear();
  for (const KeptBucket& bucket : under_way_) ended_.push_back(bucket.job->kept);
  under_way_.clear();
}

std::vector<size_t> KeptPass::missing() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<size_t> missing;
  for (const KeptBucket& bucket : under_way_) {
    if (!device_.is_cpu() || !bucket.is_done()) missing.push_back(bucket.bucket.index);
  }
  return missing;
}

void KeptPass::complete(Engine& engine, size_t index, const at::Tensor& means) {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_INDEX(index < under_way_.size(), "fusedcomm: the pass has ", under_way_.size(), " buckets, not ", index);
  const KeptBucket& bucket = under_way_[index];
  const KeptMessages& kept = *bucket.job->kept;
  TORCH_CHECK_VALUE(means.scalar_type() == at::kByte && means.numel() == kept.nbytes, "fusedcomm: the means of ",
                    bucket.record->label->text, " have ", kept.nbytes, " bytes, not ", means.numel());
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard on_device(device_);
  as_bytes(kept.means, kept.nbytes, device_).copy_(means.view({-1}));
  engine.unpack_kept(*bucket.job);
}

at::Tensor KeptPass::means(size_t index) const {
  std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_INDEX(index < ended_.size(), "fusedcomm: the last pass had ", ended_.size(), " buckets, not ", index);
  return as_bytes(ended_[index]->means, ended_[index]->nbytes, device_);
}

std::vector<Bucket> KeptPass::packed(Engine& engine) {
  std::lock_guard<std::mutex> lock(mutex_);
  const c10::DeviceGuard on_device(device_);
  std::vector<Bucket> buckets;
  for (const KeptBucket& kept : std::exchange(under_way_, {})) {
    engine.pack_rest(*kept.job);
    for (const BucketRecord::Kept& payload : kept.record->kept) {
      if (payload.residual) payload.residual->restore_second();
    }
    buckets.push_back(kept.bucket);
    std::get<OfPass>(buckets.back().kind).packed = kept.record;
  }
  wait_for_caller(engine.device());
  for (const Bucket& bucket : buckets) {
    for (const BucketRecord::Kept& payload : bucket.of_pass()->packed->kept) {
      if (payload.residual) payload.residual->forget_second();
    }
  }
  return buckets;
}

void move_codes(const BucketRecord& from, const BucketPlan& plan, Engine& engine, c10::Device device,
                KeptMessages* to) {
  const at::NoGradGuard no_grad;
  const at::Tensor source = as_bytes(from.messages->codes, from.messages->nbytes, device);
  const at::Tensor target = as_bytes(to->codes, to->nbytes, device);
  target.zero_();
  for (size_t payload = 0; payload < plan.layouts.size(); ++payload) {
    relayout(from.plan.layouts[payload], plan.layouts[payload], [&](int64_t at, int64_t place, int64_t nbytes) {
      if (device.is_cpu()) {
        std::memcpy(to->codes.get() + place, from.messages->codes.get() + at, static_cast<size_t>(nbytes));
      } else {
        target.narrow(0, place, nbytes).copy_(source.narrow(0, at, nbytes));
      }
    });
  }
  if (plan.has_heads && plan.num_chunks() != 0) {
    engine.device().add_heads(from.messages->codes.get(), 0, 1, to->codes.get(), plan.layouts.front().part_stride,
                              plan.num_chunks() * plan.layouts.front().num_parts);
  }
  wait_for_caller(engine.device());
}

}  // namespace fusedcomm
