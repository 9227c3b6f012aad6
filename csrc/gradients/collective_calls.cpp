// The synchroniser's collective calls that are not buckets.
#include <ATen/ATen.h>

#include <utility>

#include "gradients/synchroniser.h"

namespace fusedcomm {

double Synchroniser::max_over_ranks(double value, const std::string& what) const {
  at::NoGradGuard no_grad;
  // The all-reduce is a sum, so every rank has an element of its own.
  auto values = at::zeros({engine_->world_size()}, at::TensorOptions().dtype(at::kDouble).device(device_));
  values[engine_->rank()].fill_(value);
  engine_->device().will_use(values);
  const FuturePtr future = submit_uncounted(what, values, [transport = transport_, values](Lane::Completion done) {
    transport->all_reduce_tensor(Channel::kScatter, values, std::move(done));
  });
  future->waitAndThrow();
  return values.max().item<double>();
}

FuturePtr Synchroniser::gather(const at::Tensor& numbers, const std::string& what) const {
  at::NoGradGuard no_grad;
  const at::Tensor own = numbers.to(device_, numbers.scalar_type(), /*non_blocking=*/true);
  const int64_t world_size = engine_->world_size();
  const at::Tensor all = at::empty({world_size * own.numel()}, own.options());  // gloo wants one dimension
  for (const at::Tensor& tensor : {own, all}) engine_->device().will_use(tensor);
  return submit_uncounted(what, all.view({world_size, -1}), [transport = transport_, own, all](Lane::Completion done) {
    transport->all_gather_tensor(Channel::kScatter, all, own, std::move(done));
  });
}

FuturePtr Synchroniser::submit_uncounted(const std::string& what, const at::Tensor& result,
                                         Lane::Transfer transfer) const {
  const FuturePtr future = make_future(device_);
  auto job = std::make_shared<BucketJob>();
  job->counted = false;
  job->label = std::make_shared<const BucketLabel>(what, what);
  job->on_done = [future, result](std::exception_ptr error) { complete(*future, result, std::move(error)); };
  PassthroughStages stages;
  stages.scatter = std::move(transfer);
  engine_->submit_passthrough(std::move(job), std::move(stages));
  return future;
}

int64_t Synchroniser::begin_call(const std::string& what) const {
  return engine_->board()->hand_over(std::make_shared<const BucketLabel>(what, what), step(), /*is_last=*/false,
                                     /*num_chunks=*/0);
}

void Synchroniser::end_call(int64_t call, bool all_took_part) const {
  all_took_part ? engine_->board()->end(call, nullptr) : engine_->board()->withdraw(call);
}

std::string Synchroniser::explain(const std::string& failure) const {
  const auto watch = this->watch();
  return watch ? watch->explain(failure) : std::string();
}

}  // namespace fusedcomm
