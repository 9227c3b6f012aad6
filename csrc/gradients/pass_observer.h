// Tells when backward passes begin and when they end.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "devices/device.h"

namespace fusedcomm {

class PassObserver {
 public:
  // device: takes the stamps. begin_pass: called ahead of each pass; an exception fails the pass.
  PassObserver(std::shared_ptr<Device> device, std::function<void()> begin_pass)
      : device_(std::move(device)), begin_pass_(std::move(begin_pass)) {}

  // Call it ahead of a pass's first bucket, without locks. Throws if the device cannot take over buckets.
  void begin() {
    device_->check_caller();  // first: a graph capture would record the work of begin_pass, or fail because of it
    begin_pass_();
    in_pass_ = true;
  }
  // Whether a pass has begun and not ended.
  bool in_pass() const { return in_pass_; }
  void end() {
    in_pass_ = false;
    StampPtr end = device_->stamp();
    std::lock_guard<std::mutex> lock(mutex_);
    ends_.push_back(std::move(end));
  }
  // Returns when each pass since the last call has ended: milliseconds since the first end, on the timeline of the
  // gradients' device. Waits for the device. Call it between passes.
  std::vector<double> take_pass_ends() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<double> ends_ms;
    for (const StampPtr& end : ends_) ends_ms.push_back(end->ms_since(*ends_.front()));
    ends_.clear();
    return ends_ms;
  }

 private:
  const std::shared_ptr<Device> device_;
  const std::function<void()> begin_pass_;
  bool in_pass_ = false;  // of the thread that makes the passes
  std::mutex mutex_;      // guards ends_
  std::vector<StampPtr> ends_;
};

}  // namespace fusedcomm
