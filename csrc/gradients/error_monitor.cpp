#include "gradients/error_monitor.h"

#include <utility>

namespace fusedcomm {

void ErrorMonitor::add(Measurement measurement) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string bucket = measurement.label->name;
  measurements_[bucket] = std::move(measurement);
}

void ErrorMonitor::forget(const std::string& bucket) {
  std::lock_guard<std::mutex> lock(mutex_);
  measurements_.erase(bucket);
}

std::map<std::string, Measurement> ErrorMonitor::measurements() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return measurements_;
}

}  // namespace fusedcomm
