// Decorator of a job: verifies its result by an exact sum that follows it.
#include <utility>

#include "gradients/decorators.h"

namespace fusedcomm {
namespace {

at::Tensor squared_norm(const at::Tensor& x) { return at::linalg_vector_norm(x, 2, {}, false, at::kDouble).square_(); }

// Writes a Verification's norms. `result`: a bucket's mean in its own dtype. `exact`: fp32.
void compare(const at::Tensor& result, const at::Tensor& exact, const at::Tensor& norms) {
  norms[0].copy_(squared_norm(at::sub(result.to(at::kFloat), exact)));
  norms[1].copy_(squared_norm(exact));
  const at::Tensor is_finite = at::isfinite(result);
  const at::Tensor should_be = at::isfinite(exact.to(result.scalar_type()));  // in the bucket's dtype
  const at::Tensor lost = at::logical_and(is_finite, should_be.logical_not()).sum();
  const at::Tensor made = at::logical_and(is_finite.logical_not(), should_be).sum();
  norms[2].copy_(lost + at::where(should_be.all(), made, at::zeros_like(made)));
}

}  // namespace

void submit_verified(std::shared_ptr<BucketJob> job, const GradientsPtr& gradients, int64_t pass,
                     const BucketRecordPtr& record, const PassWeightPtr& weight, Engine* engine,
                     const std::shared_ptr<TensorTransport>& transport, ErrorMonitor* monitor) {
  at::NoGradGuard no_grad;
  // Copy, because the bucket's own sum overwrites the gradients; flattened() has copied separate tensors already.
  const auto exact = gradients->flattened().to(at::kFloat, /*non_blocking=*/false, /*copy=*/gradients->in_one_run());
  exact.mul_((weight ? weight->pack : 1) / transport->world_size());
  const auto norms = at::empty({3}, exact.options().dtype(at::kDouble));
  for (const at::Tensor& tensor : {exact, norms}) engine->device().will_use(tensor);
  // The bucket itself may have run on fewer lanes than its check.
  for (const at::Tensor& tensor : gradients->tensors()) engine->device().will_use(tensor);
  auto check = std::make_shared<BucketJob>();
  check->owner = job->owner;
  check->counted = false;
  check->label = std::make_shared<const BucketLabel>(job->label->name + " verified",
                                                     "the exact sum that verifies " + job->label->text);
  check->on_done = std::move(job->on_done);
  // After a failure the engine fails every later job, so the end of the check reports both.
  job->on_done = [](std::exception_ptr) {};

  const Verification verification{pass, job->label, norms};
  monitor->expect(verification, record);
  PassthroughStages stages;
  stages.scatter = [transport, exact](Lane::Completion done) {
    transport->all_reduce_tensor(Channel::kScatter, exact, std::move(done));
  };
  // This runs on the unpack lane, and therefore after the bucket's own unpack.
  stages.unpack = [monitor, verification, exact, gradients, weight] {
    at::NoGradGuard inner_no_grad;
    if (weight) weight->apply(exact);
    compare(gradients->flattened(), exact, verification.norms);
    monitor->add(verification);
  };
  engine->submit(std::move(job));
  engine->submit_passthrough(std::move(check), std::move(stages));
}

}  // namespace fusedcomm
