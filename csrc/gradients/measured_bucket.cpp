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

}  // namespace

void measure(BucketJob* job, const BucketRecordPtr& record, const GradientsPtr& gradients, const Engine& engine,
             const Place& place, const PassWeightPtr& weight, ErrorMonitor* monitor) {
  if (record->plan.sum == Sum::kExact) return;
  auto measurement = std::make_shared<Measurement>();
  measurement->label = record->label;
  auto residuals = std::make_shared<std::vector<std::shared_ptr<ResidualBuffer>>>();
  // The residuals exist while the bucket is encoded, so few of them do at a time.
  job->before_pack = [job, record, gradients, measurement, residuals, &engine, place, weight,
                      rest = std::move(job->before_pack)] {
    at::NoGradGuard no_grad;
    if (rest) rest();
    *residuals = measured_residuals(job, *record, engine, place, gradients->device());
    for (const auto& residual : *residuals) {
      if (residual && weight) residual->weigh_first(weight->share);
    }
    measurement->norm = gradients->norm();
  };
  job->after_first_encoder = [monitor, measurement, residuals, unit = weight ? weight->of_residuals() : 1] {
    at::NoGradGuard no_grad;
    at::Tensor squares = at::zeros_like(measurement->norm);
    for (const auto& residual : *residuals) {
      if (!residual) return;
      squares.add_(residual->first_norm().square_());
    }
    residuals->clear();
    measurement->error_norm = squares.sqrt_().mul_(unit);
    monitor->add(std::move(*measurement));
  };
  if (gradients->device().is_cpu()) return;
  job->on_done = [residuals, done = std::move(job->on_done)](std::exception_ptr error) {
    // After a fault on the device, torch ends a process that frees memory of several streams. These are never freed.
    if (error) new std::vector<std::shared_ptr<ResidualBuffer>>(std::move(*residuals));
    done(std::move(error));
  };
}

}  // namespace fusedcomm
