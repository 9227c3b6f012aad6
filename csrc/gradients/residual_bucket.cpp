// Decorator of a job: remembers its second residuals.
#include <memory>
#include <utility>

#include "gradients/decorators.h"

namespace fusedcomm {
namespace {

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

}  // namespace fusedcomm
