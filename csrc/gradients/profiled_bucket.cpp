// Decorator of a job: shows it to the profiler of the thread that hands it over.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <string>
#include <utility>
#include <vector>

#include "gradients/decorators.h"

namespace fusedcomm {
namespace {

// Where torch finds a thread's profiler. at::ThreadLocalState would hold Python objects, too, and a thread that
// releases these waits for the GIL.
struct ThreadProfiler {
  at::RecordFunctionTLS callbacks = at::get_record_function_tls_();
  std::shared_ptr<c10::ThreadLocalDebugInfo> state = c10::ThreadLocalDebugInfo::current();

  void install() const {
    at::set_record_function_tls_(callbacks);
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(state);
  }
};
using ThreadProfilerPtr = std::shared_ptr<const ThreadProfiler>;

// Gives the calling thread another profiler until the end of the scope.
class Under {
 public:
  explicit Under(const ThreadProfiler& profiler) { profiler.install(); }
  ~Under() { before_.install(); }
  Under(const Under&) = delete;
  Under& operator=(const Under&) = delete;

 private:
  const ThreadProfiler before_;
};

// A range on one thread. Torch's operators within it are seen, too.
class ThreadRange {
 public:
  ThreadRange(ThreadProfilerPtr profiler, const std::string& name)
      : profiler_(std::move(profiler)), under_(*profiler_), function_(at::RecordScope::USER_SCOPE) {
    function_.before(name);
  }

 private:
  const ThreadProfilerPtr profiler_;
  const Under under_;
  at::RecordFunction function_;  // the last member, so that it ends first
};

class AsyncRange {
 public:
  AsyncRange(ThreadProfilerPtr profiler, const std::string& name, at::ArrayRef<at::Tensor> inputs = {})
      : profiler_(std::move(profiler)) {
    const Under under(*profiler_);
    function_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (!function_->isActive()) return;
    function_->_setAsync();
    const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
    function_->before(name, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  }
  ~AsyncRange() {
    const Under under(*profiler_);
    function_->end();
  }
  AsyncRange(const AsyncRange&) = delete;
  AsyncRange& operator=(const AsyncRange&) = delete;

 private:
  const ThreadProfilerPtr profiler_;
  std::unique_ptr<at::RecordFunction> function_;
};

class ProfiledBucket : public JobProfiler {
 public:
  explicit ProfiledBucket(ThreadProfilerPtr profiler) : profiler_(std::move(profiler)) {}

  void open_all_reduce(const std::string& backend, const Gradients& gradients) {
    all_reduce_ = std::make_shared<AsyncRange>(profiler_, backend + ":all_reduce", gradients.tensors());
  }
  ProfilerRange open(const std::string& name) const override { return std::make_shared<ThreadRange>(profiler_, name); }
  ProfilerRange open_async(const std::string& name) const override {
    return std::make_shared<AsyncRange>(profiler_, name);
  }

 private:
  const ThreadProfilerPtr profiler_;
  ProfilerRange all_reduce_;
};

}  // namespace

std::shared_ptr<const JobProfiler> profiler_of_this_thread(const TensorTransport& transport, c10::Device device,
                                                           const BucketPlan& plan, const Gradients& gradients) {
  if (!at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) return nullptr;
  const auto profiler = std::make_shared<ProfiledBucket>(std::make_shared<const ThreadProfiler>());
  const bool is_all_reduce = plan.encoded_rows.empty();
  if (is_all_reduce && (device.is_cpu() || plan.sums_codes())) profiler->open_all_reduce(transport.name(), gradients);
  return profiler;
}

}  // namespace fusedcomm
