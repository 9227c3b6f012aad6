// Tells whoever watches when backward passes begin and when they end.
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
  // From now on begin_pass is called ahead of each pass, without locks; an exception fails the pass. It may call
  // unwatch(). Call this between passes. device: takes the stamps. times: whether somebody calls take_pass_ends() now
  // and then; if not, no stamps are kept.
  void watch(std::shared_ptr<Device> device, std::function<void()> begin_pass, bool times) {
    in_pass_ = false;
    set(std::make_shared<const Watch>(Watch{std::move(device), std::move(begin_pass), times}));
  }
  // Ends what watch() began. Idempotent.
  void unwatch() { set(nullptr); }

  // Call it ahead of a pass's first bucket, without locks. Throws if the device cannot take over buckets.
  void begin() {
    const auto watch = watching();
    if (!watch) return;
    watch->device->check_caller();  // first: a graph capture would record the work of begin_pass, or fail because of it
    watch->begin_pass();
    in_pass_ = true;
  }
  // Whether a pass that is watched has begun and not ended.
  bool in_pass() const { return in_pass_; }
  void end() {
    in_pass_ = false;
    const auto watch = watching();
    if (!watch || !watch->times) return;
    StampPtr end = watch->device->stamp();
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
  struct Watch {
    std::shared_ptr<Device> device;
    std::function<void()> begin_pass;
    bool times;
  };
  std::shared_ptr<const Watch> watching() {
    std::lock_guard<std::mutex> lock(mutex_);
    return watch_;
  }
  void set(std::shared_ptr<const Watch> watch) {
    std::lock_guard<std::mutex> lock(mutex_);
    watch_.swap(watch);  // the old one is freed after the lock, because Python's part waits for the GIL
    ends_.clear();
  }

  bool in_pass_ = false;  // of the thread that makes the passes
  std::mutex mutex_;      // guards the members below
  std::shared_ptr<const Watch> watch_;
  std::vector<StampPtr> ends_;
};

}  // namespace fusedcomm
