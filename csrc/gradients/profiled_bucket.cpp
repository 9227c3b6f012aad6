// The range of a bucket in torch's profilers.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <string>
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

// A range that begins on the calling thread, and may end on another.
class AsyncRange {
 public:
  AsyncRange(const std::string& name, at::ArrayRef<at::Tensor> inputs) : function_(at::RecordScope::USER_SCOPE) {
    if (!function_.isActive()) return;
    function_._setAsync();
    const std::vector<c10::IValue> values(inputs.begin(), inputs.end());
    function_.before(name, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
  }
  ~AsyncRange() {
    const ThreadProfiler of_this_thread;
    profiler_.install();
    function_.end();
    of_this_thread.install();
  }
  AsyncRange(const AsyncRange&) = delete;
  AsyncRange& operator=(const AsyncRange&) = delete;

 private:
  const ThreadProfiler profiler_;
  at::RecordFunction function_;
};

}  // namespace

std::shared_ptr<void> profiled_range(const TensorTransport& transport, c10::Device device, const BucketPlan& plan,
                                     const Gradients& gradients) {
  const bool is_all_reduce = plan.encoded_rows.empty();
  const bool is_ours = device.is_cpu() || plan.sums_codes();
  if (!is_all_reduce || !is_ours || !at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) return nullptr;
  return std::make_shared<AsyncRange>(transport.name() + ":all_reduce", gradients.tensors());
}

}  // namespace fusedcomm
