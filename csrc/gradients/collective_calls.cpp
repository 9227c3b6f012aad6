#include "gradients/collective_calls.h"

#include <memory>
#include <utility>

#include "gradients/synchronizer.h"

namespace fusedcomm {
namespace {

// Submits a collective. The future receives `result`, which the transfer fills.
FuturePtr submit_call(const Synchronizer& synchronizer, const std::string& what, const at::Tensor& result,
                      Lane::Transfer transfer) {
  const FuturePtr future = make_future(synchronizer.grad_device());
  auto job = std::make_shared<BucketJob>();
  job->counted = false;
  job->label = std::make_shared<const BucketLabel>(what, what);
  job->on_done = [future, result](std::exception_ptr error) { complete(*future, result, std::move(error)); };
  PassthroughStages stages;
  stages.scatter = std::move(transfer);
  synchronizer.engine().submit_passthrough(std::move(job), std::move(stages));
  return future;
}

}  // namespace

double max_over_ranks(const Synchronizer& synchronizer, double value, const std::string& what) {
  at::NoGradGuard no_grad;
  Engine& engine = synchronizer.engine();
  // The all-reduce is a sum, so every rank has an element of its own.
  auto values =
      at::zeros({engine.world_size()}, at::TensorOptions().dtype(at::kDouble).device(synchronizer.grad_device()));
  values[engine.rank()].fill_(value);
  engine.device().will_use(values);
  const FuturePtr future =
      submit_call(synchronizer, what, values, [transport = synchronizer.transport(), values](Lane::Completion done) {
        transport->all_reduce_tensor(Channel::kScatter, values, std::move(done));
      });
  future->waitAndThrow();
  return values.max().item<double>();
}

const at::Tensor& Gathered::get() const {
  future->waitAndThrow();
  if (arrived) wait_for(*arrived);
  return of_all;
}

GatheredPtr gather(const Synchronizer& synchronizer, const at::Tensor& numbers, const std::string& what) {
  const at::NoGradGuard no_grad;
  Engine& engine = synchronizer.engine();
  const bool enqueues = !synchronizer.grad_device().is_cpu();
  const auto on_host = at::TensorOptions().dtype(numbers.scalar_type()).pinned_memory(enqueues);
  const auto gathered = std::make_shared<Gathered>();
  gathered->of_all = at::empty({engine.world_size(), numbers.numel()}, on_host);
  at::Tensor own = numbers;
  if (enqueues && numbers.is_cpu()) own = at::empty(numbers.sizes(), on_host).copy_(numbers);
  if (!own.is_cpu()) engine.device().will_use(own);
  const auto transfer = [gathered, own, enqueues, transport = synchronizer.transport(), device = engine.shared_device(),
                         to = synchronizer.grad_device()](Lane::Completion done) {
    const at::NoGradGuard no_grad_on_lane;
    const at::Tensor flat = gathered->of_all.view({-1});  // gloo wants one dimension
    if (!enqueues) return transport->all_gather_tensor(Channel::kScatter, flat, own, std::move(done));
    // The lane's stream makes these, and no other uses them.
    const at::Tensor here = own.to(to, /*non_blocking=*/true), all = at::empty(flat.sizes(), here.options());
    transport->all_gather_tensor(Channel::kScatter, all, here, [&](std::exception_ptr error) {
      if (error) return done(std::move(error));
      flat.copy_(all, /*non_blocking=*/true);
      gathered->arrived = device->stamp();
      done(nullptr);
    });
  };
  gathered->future = submit_call(synchronizer, what, gathered->of_all, transfer);
  return gathered;
}

int64_t begin_call(const Synchronizer& synchronizer, const std::string& what) {
  return synchronizer.engine().board()->hand_over(std::make_shared<const BucketLabel>(what, what), synchronizer.step(),
                                                  /*is_last=*/false,
                                                  /*num_chunks=*/0);
}

void end_call(const Synchronizer& synchronizer, int64_t call, bool all_took_part) {
  const auto& board = synchronizer.engine().board();
  all_took_part ? board->end(call, nullptr) : board->withdraw(call);
}

}  // namespace fusedcomm
