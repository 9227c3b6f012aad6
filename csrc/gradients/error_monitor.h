// Says in which passes the error that the wire causes is measured (measured_bucket.cpp), and keeps the results.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "engine/stage.h"

namespace fusedcomm {

// The error of this rank's first encoder for one bucket.
struct Measurement {
  std::shared_ptr<const BucketLabel> label;
  at::Tensor error_norm, norm;  // float64 scalars: ‖gradient − what was sent for it‖₂ and ‖gradient‖₂
};

class ErrorMonitor {
 public:
  // measure_every: steps from one measured step to the next; 0: never.
  explicit ErrorMonitor(int64_t measure_every) : measure_every_(measure_every) {}

  // Whether buckets of this pass are measured.
  bool is_measured(int64_t pass) const {
    return measure_every_ != 0 && pass % measure_every_ == std::min(kFirstMeasured, measure_every_ - 1);
  }
  // Stores the measurement of a bucket.
  void add(Measurement measurement) {
    std::lock_guard<std::mutex> lock(mutex_);
    const std::string bucket = measurement.label->name;
    measurements_[bucket] = std::move(measurement);
  }
  // Drops a bucket's measurement. Call it when another bucket has this name.
  void forget(const std::string& bucket) {
    std::lock_guard<std::mutex> lock(mutex_);
    measurements_.erase(bucket);
  }
  // The last measurement of each bucket, by the bucket's name.
  std::map<std::string, Measurement> measurements() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return measurements_;
  }

 private:
  // The first pass that may be measured. It is not one of the first passes, after which DDP rebuilds its buckets.
  static constexpr int64_t kFirstMeasured = 2;

  const int64_t measure_every_;
  mutable std::mutex mutex_;
  std::map<std::string, Measurement> measurements_;
};

}  // namespace fusedcomm
