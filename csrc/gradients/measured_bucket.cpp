// How the synchroniser measures the error of a bucket's first encoder.
#include <ATen/ATen.h>

#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "gradients/synchroniser.h"

namespace fusedcomm {

void Synchroniser::measure(BucketJob* job, const std::shared_ptr<const BucketRecord>& record,
                           const GradientsPtr& gradients, int64_t step) {
  if (record->plan.sum == Sum::kExact) return;
  auto measurement = std::make_shared<Measurement>();
  measurement->step = step;
  measurement->label = record->label;
  auto residuals = std::make_shared<std::vector<std::shared_ptr<ResidualBuffer>>>();
  // The residuals exist while the bucket is encoded, so few of them do at a time.
  job->before_pack = [this, job, record, gradients, measurement, residuals] {
    at::NoGradGuard no_grad;
    *residuals = measured_residuals(job, *record);
    measurement->norm = gradients->norm();
  };
  job->after_first_encoder = [this, measurement, residuals] {
    at::NoGradGuard no_grad;
    at::Tensor squares = at::zeros_like(measurement->norm);
    for (const auto& residual : *residuals) {
      if (!residual) return;
      squares.add_(residual->first_norm().square_());
    }
    residuals->clear();
    measurement->error_norm = squares.sqrt_();
    monitor_.add(std::move(*measurement));
  };
  if (device_.is_cpu()) return;
  job->on_done = [residuals, done = std::move(job->on_done)](std::exception_ptr error) {
    // After a fault on the device, torch ends a process that frees memory of several streams. These are never freed.
    if (error) new std::vector<std::shared_ptr<ResidualBuffer>>(std::move(*residuals));
    done(std::move(error));
  };
}

std::vector<std::shared_ptr<ResidualBuffer>> Synchroniser::measured_residuals(BucketJob* job,
                                                                              const BucketRecord& record) const {
  const BucketPlan& plan = record.plan;
  std::vector<std::shared_ptr<ResidualBuffer>> residuals, temporary(record.streams.size());
  for (size_t i = 0; i < record.streams.size(); ++i) {
    if (plan.layouts[i].lossy_numel == 0 || plan.layouts[i].wire == Wire::kFp32) continue;
    std::shared_ptr<ResidualBuffer> residual = record.streams[i].residual;
    if (!residual) {
      try {
        residual = std::make_shared<ResidualBuffer>(plan.layouts[i], ResidualFormat::kFp32, plan.pack_scale,
                                                    plan.reduce_scale, transport_->place(), device_,
                                                    /*of_first_only=*/true);
      } catch (const c10::Error&) {
        return {nullptr};
      } catch (const std::bad_alloc&) {
        return {nullptr};
      }
      // An encoder that is given a residual writes its error there. -0 added to a value is that value.
      residual->fill_first(-0.0F);
      for (const at::Tensor& storage : residual->storages()) engine_->device().will_use(storage);
      temporary[i] = residual;
    }
    residuals.push_back(std::move(residual));
  }
  for (size_t i = 0; i < temporary.size(); ++i) {
    if (temporary[i]) first_encoding(record, &job->payloads[i]).residual = temporary[i]->of_first();
  }
  return residuals;
}

}  // namespace fusedcomm
