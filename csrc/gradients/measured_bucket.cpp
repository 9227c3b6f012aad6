// Decorator of a job: measures the error of its first encoder.
#include <ATen/ATen.h>

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "gradients/decorators.h"

namespace fusedcomm {
namespace {

// The residuals of the bucket's first encoders, one for each lossy layout, with temporary ones where the record has
// none; the job's encoders write their errors there. {null} if there is no memory.
std::vector<std::shared_ptr<ResidualBuffer>> measured_residuals(BucketJob* job, const BucketRecord& record,
                                                                const Engine& engine, const Place& place,
                                                                c10::Device device) {
  const BucketPlan& plan = record.plan;
  std::vector<std::shared_ptr<ResidualBuffer>> residuals, temporary(record.kept.size());
  for (size_t i = 0; i < record.kept.size(); ++i) {
    if (plan.layouts[i].lossy_numel == 0 || plan.layouts[i].wire == Wire::kFp32) continue;
    std::shared_ptr<ResidualBuffer> residual = record.kept[i].residual;
    if (!residual) {
      try {
        residual = std::make_shared<ResidualBuffer>(plan.layouts[i], ResidualFormat::kFp32, plan.pack_scale,
                                                    plan.reduce_scale, place, device,
                                                    /*of_first_only=*/true);
      } catch (const c10::Error&) {
        return {nullptr};
      } catch (const std::bad_alloc&) {
        return {nullptr};
      }
      // An encoder that is given a residual writes its error there. -0 added to a value is that value.
      residual->fill_first(-0.0F);
      for (const at::Tensor& storage : residual->storages()) engine.device().will_use(storage);
      temporary[i] = residual;
    }
    residuals.push_back(std::move(residual));
  }
  for (size_t i = 0; i < temporary.size(); ++i) {
    if (temporary[i]) first_residual(record, &job->payloads[i]) = temporary[i]->of_first();
  }
  return residuals;
}

class MeasuredBucket : public JobDecorator {
 public:
  MeasuredBucket(BucketJob* job, BucketRecordPtr record, GradientsPtr gradients, const Engine& engine,
                 const Place& place, PassWeightPtr weight, ErrorMonitor* monitor)
      : job_(job),
        record_(std::move(record)),
        gradients_(std::move(gradients)),
        engine_(engine),
        place_(place),
        weight_(std::move(weight)),
        monitor_(monitor) {
    measurement_.label = record_->label;
  }

  // The residuals exist while the bucket is encoded, so few of them do at a time.
  void before_pack() override {
    const at::NoGradGuard no_grad;
    residuals_ = measured_residuals(job_, *record_, engine_, place_, gradients_->device());
    for (const auto& residual : residuals_) {
      if (residual && weight_) residual->weigh_first(weight_->share);
    }
    measurement_.norm = gradients_->norm();
  }

  void after_first_encoder() override {
    const at::NoGradGuard no_grad;
    at::Tensor squares = at::zeros_like(measurement_.norm);
    for (const auto& residual : residuals_) {
      if (!residual) return;
      squares.add_(residual->first_norm().square_());
    }
    residuals_.clear();
    measurement_.error_norm = squares.sqrt_().mul_(weight_ ? weight_->of_residuals() : 1);
    monitor_->add(std::move(measurement_));
  }

  std::exception_ptr ended(std::exception_ptr error) override {
    // After a fault on the device, torch ends a process that frees memory of several streams. These are never freed.
    if (error && !gradients_->device().is_cpu()) {
      new std::vector<std::shared_ptr<ResidualBuffer>>(std::move(residuals_));
    }
    return error;
  }

 private:
  BucketJob* const job_;
  const BucketRecordPtr record_;
  const GradientsPtr gradients_;
  const Engine& engine_;
  const Place place_;
  const PassWeightPtr weight_;
  ErrorMonitor* const monitor_;
  Measurement measurement_;
  std::vector<std::shared_ptr<ResidualBuffer>> residuals_;
};

}  // namespace

std::unique_ptr<JobDecorator> measured(BucketJob* job, const BucketRecordPtr& record, const GradientsPtr& gradients,
                                       const Engine& engine, const Place& place, const PassWeightPtr& weight,
                                       ErrorMonitor* monitor) {
  return std::make_unique<MeasuredBucket>(job, record, gradients, engine, place, weight, monitor);
}

}  // namespace fusedcomm
