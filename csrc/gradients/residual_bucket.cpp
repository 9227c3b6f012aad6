// Decorators of a job: what becomes of its residuals.
#include <memory>
#include <utility>

#include "gradients/decorators.h"

namespace fusedcomm {
namespace {

class DecayedBucket : public JobDecorator {
 public:
  DecayedBucket(BucketRecordPtr record, double decay) : record_(std::move(record)), decay_(decay) {}

  void before_pack() override {
    for (const BucketRecord::Kept& kept : record_->kept) {
      if (kept.residual) kept.residual->decay_first(decay_);
    }
  }
  void before_reduce() override {
    for (const BucketRecord::Kept& kept : record_->kept) {
      if (kept.residual) kept.residual->decay_second(decay_);
    }
  }

 private:
  const BucketRecordPtr record_;
  const double decay_;
};

class KeptResiduals : public JobDecorator {
 public:
  explicit KeptResiduals(BucketRecordPtr record) : record_(std::move(record)) {
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

std::unique_ptr<JobDecorator> decayed(const BucketRecordPtr& record, double decay) {
  return std::make_unique<DecayedBucket>(record, decay);
}

std::unique_ptr<JobDecorator> remembered(const BucketRecordPtr& record) {
  return std::make_unique<KeptResiduals>(record);
}

}  // namespace fusedcomm
