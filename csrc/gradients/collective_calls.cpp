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

FuturePtr gather(const Synchronizer& synchronizer, const at::Tensor& numbers, const std::string& what) {
  at::NoGradGuard no_grad;
  Engine& engine = synchronizer.engine();
  const at::Tensor own = numbers.to(synchronizer.grad_device(), numbers.scalar_type(), /*non_blocking=*/true);
  const int64_t world_size = engine.world_size();
  const at::Tensor all = at::empty({world_size * own.numel()}, own.options());  // gloo wants one dimension
  for (const at::Tensor& tensor : {own, all}) engine.device().will_use(tensor);
  return submit_call(synchronizer, what, all.view({world_size, -1}),
                     [transport = synchronizer.transport(), own, all](Lane::Completion done) {
                       transport->all_gather_tensor(Channel::kScatter, all, own, std::move(done));
                     });
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
