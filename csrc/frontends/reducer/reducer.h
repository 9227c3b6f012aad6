// A reducer of our own: synchronizes the gradients of parameters without DistributedDataParallel.
//
//   autograd has added up a gradient ──► a native hook (accumulators.h) notes that it has arrived
//     ──► the bucket's last gradient has arrived, and the buckets before it are handed over: Synchronizer::run() packs
//         the gradients where they lie, and writes the mean to the same place
//     ──► the backward pass ends: a final callback of autograd waits for all buckets, so backward() returns when the
//         gradients are means
//
// No gradient is copied, with the exceptions that gradient.h names.
//
// At the beginning of a pass every rank sends the others one bit for each parameter: whether it requires a gradient.
// The buckets hold these parameters, so all ranks must have the same. With `find_unused` a pass ends with one more bit
// for each parameter: whether the rank has used it. Before the second pass all ranks take over rank 0's order of
// arrival, and cut their buckets for it. They do so again if rank 0's order changes.
//
// A pass may also be an optimizer's step, which ends with end_step() and not with a backward pass; see Steps.
//
// A rank that cannot go on publishes why (problem.h), and every rank raises that text from backward().
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "devices/device.h"
#include "frontends/reducer/accumulators.h"
#include "frontends/reducer/flags.h"
#include "frontends/reducer/layout.h"
#include "frontends/reducer/problem.h"
#include "gradients/collective_calls.h"
#include "gradients/parameter_gradient.h"
#include "gradients/pass_observer.h"
#include "gradients/synchronizer.h"

namespace fusedcomm {

// What a reducer whose ranks come and go asks of Python. Neither is called with a lock or the GIL held.
struct Membership {
  // Says that this rank has all means of the pass. Returns whether it counts: false if the ranks have begun to change
  // before, so that the pass must go on as after a loss.
  std::function<bool()> finish;
  // Waits until the ranks agree who goes on. Returns the synchronizer on which to rerun the pass; null if the means
  // were copied from a rank that had finished it. Throws if this rank cannot go on. failure: what ended the pass here.
  std::function<std::shared_ptr<Synchronizer>(const std::string& failure)> recover;
};

// Takes gradients in place of the synchronizer, as an optimizer does whose ranks own parts of the parameters.
struct Taker {
  // Called when a pass begins, with the reducer's lock. Returns a number that must be the same on every rank.
  std::function<int64_t()> begin;
  // Called on every rank if one has another number, with the reducer's lock. Returns why, the same on every rank.
  std::function<std::string()> why_unequal;
  // Takes a bucket's gradients, in the order of `indices` into the reducer's parameters. It may read them until it
  // returns. A gradient that this rank has not got is zero. Called with the reducer's lock.
  std::function<void(const std::vector<size_t>& indices, const std::vector<at::Tensor>& gradients)> take;
  // Called at the end of a pass, with the indices of the parameters that any rank has used, without locks.
  std::function<void(const std::vector<size_t>& used)> end;
};

// How a reducer works whose passes are an optimizer's steps. A step may have several backward passes. A gradient has
// arrived when `passes` of them have brought it, and end_step() takes the others as they are then, zeros where there
// are none. A parameter that has been trained stays in the buckets when it is frozen.
//
// The reducer needs no ranks before its first end_step(): gradients are held until then. They are also held in a step
// in which it is not known which of them are sparse.
struct Steps {
  int64_t passes = 1;        // backward passes of a step; see set_passes()
  bool sums = false;         // whether gradients become sums of the ranks'; otherwise means
  bool sends_dense = false;  // whether sparse gradients are summed as dense ones
  // Throws what a backward pass shall throw: `failure` says why this reducer has failed; empty: a gradient has come too
  // often. Called without locks.
  std::function<void(const std::string& failure)> refuse;
  // Why this rank's job has failed; empty if it has not. A step's first gradient and long waits ask it, with the
  // reducer's lock.
  std::function<std::string()> failure_of_job;
};

class GradReducer : public std::enable_shared_from_this<GradReducer> {
 public:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    bool is_sparse = false;  // whether its gradients are sparse
  };
  struct Options {
    BucketCaps caps;
    bool find_unused = false;
    std::optional<Steps> steps = std::nullopt;  // none: a pass is a backward pass
  };
  // Takes warnings for the user. Called without locks, and only if there are any.
  using Say = std::function<void(const std::vector<std::string>&)>;

  // `parameters`: in the order in which gradients are expected to arrive, the same on every rank. `store`: has a prefix
  // that only the ranks of this reducer use. Something else may synchronize none of the parameters. With Steps
  // `synchronizer` and `store` may be null until set_ranks().
  static std::shared_ptr<GradReducer> make(std::shared_ptr<Synchronizer> synchronizer,
                                           std::vector<Parameter> parameters, const Options& options, StorePtr store,
                                           Say say);

  // Whether backward passes synchronize gradients. If not, gradients add up on this rank.
  bool is_on() const;
  void turn(bool on);
  // The next backward pass synchronizes gradients, and those after it do not until this is called again.
  void turn_on_once();
  // Backward passes through one of these outputs of a forward pass synchronize gradients, also those that turn()
  // switches off.
  void synchronize_passes_of(const std::vector<at::Tensor>& outputs);
  // Whether a backward pass that is not synchronized is an error.
  void refuse_local_passes(bool refuse);
  // Whether turn_on_once() still waits for its backward pass.
  bool waits_for_pass() const;
  // Why the gradient of a parameter no longer comes to this reducer; empty if all come.
  std::string lost_parameter() const;
  // Publishes `why` and throws it, on every rank that uses this reducer from now on.
  [[noreturn]] void refuse(const std::string& why);
  // Removes the hooks. Call it between backward passes. Idempotent.
  void detach();
  // Each changes what the next synchronized pass uses. Call them on every rank before the same pass, while nothing is
  // under way; the observer's begin_pass may call them, too.
  void set_synchronizer(std::shared_ptr<Synchronizer> synchronizer);
  // The same with other ranks, whose store is `store`. Also from within Membership::recover.
  void set_ranks(std::shared_ptr<Synchronizer> synchronizer, StorePtr store);
  // From now on ranks may come and go, also within a pass. Buckets keep the order of `parameters`, because a rank that
  // joins knows no other. Call it before the first pass.
  void use(Membership membership);
  // From now on gradients are not summed here. Buckets keep the order of `parameters`, and the parameters that require
  // gradients in the next pass are those of all passes. Call it before the first pass.
  void give_to(Taker taker);
  // Backward passes that have begun, of those that are synchronized.
  int64_t num_passes() const;
  // The buckets' parameters, for those that require gradients now.
  Buckets buckets_now() const;
  // Throws if this rank has failed or another one has published a problem.
  void check();
  // Of synchronized passes.
  PassObserver& observer() { return observer_; }
  // Gradients that have been copied so far; see gradient.h.
  int64_t num_copied() const;

  // The functions below need Steps.
  //
  // Ends the step: all gradients become means or sums. An accelerator's stream waits for them, a CPU's caller. Every
  // rank calls it after the same steps. Throws as a backward pass without Steps.
  void end_step();
  // Takes part in a step of the other ranks with zeros, and changes no gradient. Returns false, without a step, if
  // every rank has called this one.
  bool end_step_without_gradients();
  // Call it between steps, on every rank, before parameters are added: fails if another rank has another number.
  void agree_on_number(int64_t num_parameters);
  // Whether a gradient has arrived in this step.
  bool has_begun_step() const;
  // From now on so many backward passes are added up, also for gradients of this step that have not arrived.
  void set_passes(int64_t passes);
  // Parameters of one group, by their numbers in `group_of`, are in one bucket for each dtype; -1: in any. order: of
  // the parameters in the first step. Every rank has the same.
  void set_layout(std::vector<int64_t> group_of, const std::vector<int64_t>& order);
  // Forgets the step, the ranks and what they have agreed. Gradients are held until set_ranks() and end_step().
  void leave_ranks();

 private:
  // A pass has failed that may still be finished with other ranks.
  struct Interrupted : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  // Tells when a task of autograd's engine, a call of backward(), ends or is given up.
  class TaskEnd;

  // A bucket that has been handed over. It keeps the gradients while the device may use them.
  struct UnderWay {
    UnderWay() = default;
    UnderWay(UnderWay&&) = default;
    UnderWay& operator=(UnderWay&&) = default;
    // After an error nobody has waited: tells the allocator which streams may still use the gradients.
    ~UnderWay();

    FuturePtr future;
    std::vector<BucketGradient> gradients;  // in the order of the bucket's parameters
    std::shared_ptr<Device> used_by;        // null on a CPU, and once the current stream waits for the future
  };

  GradReducer(std::shared_ptr<Synchronizer> synchronizer, std::vector<Parameter> parameters, const Options& options,
              StorePtr store, Say say);
  void add_hooks();

  // What a rank has in a pass.
  enum class Part { kGradients, kZeros };

  void on_gradient(size_t index, const at::Tensor& added);
  void on_gradient_of_step(std::unique_lock<std::mutex>& lock, size_t index, const at::Tensor& added);
  void take_gradient_of_step(std::unique_lock<std::mutex>& lock, size_t index, const at::Tensor& added);
  // Call these at the end of a task that has brought gradients of a pass.
  void on_task_end(int64_t pass);
  void on_task_lost(int64_t pass);

  // Makes the calling thread's task of autograd's engine synchronize gradients until it ends.
  void synchronize_task();

  // Call the functions below with mutex_ held.
  // Whether gradients that arrive now are synchronized.
  bool is_synchronizing() const { return is_on_ || !synchronized_tasks_.empty(); }
  // Names the first parameter that requires a gradient and no longer has this reducer's hook; empty if there is none.
  std::string lost_text() const;
  // Releases the lock during the calls.
  void call_before_pass(std::unique_lock<std::mutex>& lock);
  void begin_pass(Part part = Part::kGradients);
  // Notes that the gradient of a parameter has arrived, and hands over the buckets that are complete with it.
  void arrive(size_t index, const at::Tensor& added);
  // Hands over what is left of the step, and waits.
  void end_pass_of_step(std::unique_lock<std::mutex>& lock);
  void begin_step();
  // Learns from all ranks which gradients are sparse.
  void learn_sparse();
  // Of the gradients of a parameter; 0: they are dense, or not known.
  int64_t sparse_dims(size_t index) const;
  bool sends_sparse(size_t index) const {
    return sparse_dims(index) != 0 && !(options_.steps && options_.steps->sends_dense);
  }
  Flags trained_now() const;
  // The parameters that require gradients now. Fails if something else synchronizes one of them.
  Flags look_at_parameters();
  // Takes over rank 0's order of arrival. Every rank must call it in the same pass.
  void agree_on_order();
  Buckets cut_for(const std::vector<size_t>& order, const Flags& trained) const;
  void cut_buckets();
  // Makes the task of the calling thread call `on_end` when it ends, with true, or is given up, with false.
  void follow_task(std::function<void(GradReducer&, bool)> on_end);
  void at_task_end(std::function<void(GradReducer&, bool)> on_end);
  // Hands over all buckets that are complete, in their order.
  void hand_over_complete(const at::Tensor& added);
  void hand_over(size_t bucket, const at::Tensor& added);
  BucketGradient gradient_of(size_t index, const at::Tensor& added);
  void finish_pass(std::unique_lock<std::mutex>& lock);
  // With a taker: the parameters that any rank has used in the pass.
  std::vector<size_t> parameters_used() const;
  // Fails because of the first parameter that is trained now and was not, or the reverse.
  void refuse_other_parameters(const Flags& trained);
  // Waits until this rank has all means of the pass, and knows which parameters any rank has used.
  void wait_for_pass();
  // On an accelerator with members, after wait_for_pass(): waits until the device has ended the pass, too. Throws
  // Interrupted if the engine was stopped before.
  void wait_for_device();
  // As wait_for_pass(), if ranks may be lost meanwhile. Releases the lock while it waits for the others to agree.
  void wait_for_members(std::unique_lock<std::mutex>& lock);
  // Hands the pass over again, to synchronizer_.
  void hand_over_again(Synchronizer& from);
  // Sends the other ranks what they need to know before the buckets of a pass.
  void send_flags();
  // Whether no rank has gradients in this pass. Waits for their flags.
  bool all_are_without_gradients();
  // Hands warnings to the user. Unlocks `lock`.
  void say_notices(std::unique_lock<std::mutex>& lock);
  // Reads what all ranks have sent at the beginning of the pass, if that has not been read. Fails if they do not train
  // the same parameters.
  void check_flags();
  // Whether write_back_all() needs to know which parameters the other ranks have used.
  bool needs_used_of_all() const;
  void write_back_all();
  // All parameters: those that have arrived in this pass in that order, then the others as they were.
  std::vector<size_t> order_of_arrival() const;
  void note_order();
  // Every rank's numbers: int64 [world_size, number of numbers].
  GatheredPtr gather(const std::vector<int64_t>& numbers, const std::string& what);
  // As wait(); the host has the numbers then.
  const at::Tensor& wait_for_numbers(const GatheredPtr& numbers);
  // Waits; fails if the future has failed or a rank has published a problem.
  void wait(const FuturePtr& future);
  // Publishes `why` and throws it. No pass succeeds from then on.
  [[noreturn]] void fail(const std::string& why);
  // As fail(), for what another rank has published.
  [[noreturn]] void give_up(const std::string& why);
  std::string missing_text() const;
  std::string rank_text() const;
  bool has_parameters_left() const { return arrival_.size() < num_expected_; }

  const std::vector<Parameter> parameters_;
  const Options options_;
  const Say say_;
  const bool is_accelerated_;  // whether the parameters are on an accelerator

  PassObserver observer_;
  mutable std::mutex mutex_;  // guards the members below
  int rank_, world_size_;
  std::shared_ptr<Synchronizer> synchronizer_;
  std::optional<Membership> membership_;  // none: the ranks stay
  std::optional<Taker> taker_;            // none: the synchronizer sums
  std::unique_ptr<Accumulators> accumulators_;
  Problem problem_;
  bool is_on_ = true;
  bool is_on_once_ = false;  // whether the end of the pass turns it off
  bool refuses_local_passes_ = false;
  std::vector<int> synchronized_tasks_;  // of autograd's engine, from synchronize_task() until they end
  std::string failure_;                  // empty until fail()
  int64_t num_copied_ = 0;

  // The step; see Steps.
  int64_t passes_;
  bool holds_ = true;  // whether gradients are handed over by end_step() alone
  Part part_ = Part::kGradients;
  int64_t num_parameters_;            // as the other ranks are told
  std::vector<int64_t> passes_left_;  // by parameter: in which its gradient must still come
  std::vector<size_t> ready_;         // the parameters whose gradients have arrived, in that order
  std::vector<int64_t> kinds_;        // by parameter: kUnknown, kDense, or kDense + the number of sparse dimensions
  std::vector<int64_t> group_of_;     // empty: no groups

  // The buckets, and what they are cut for.
  BucketCaps caps_;
  std::vector<size_t> order_;  // of all parameters
  Flags trained_;              // the parameters that require gradients
  Buckets buckets_;
  std::vector<size_t> bucket_of_;  // by parameter; kNoBucket for a frozen one
  bool must_agree_on_order_ = false;
  bool must_compare_ = false;  // whether trained_ is new, so that other ranks' buckets may have other sizes
  ArrivalOrder arrival_order_;
  bool wants_new_order_ = false;  // whether this rank, 0, asks for buckets of its new order
  bool has_said_new_order_ = false;
  std::vector<std::string> notices_;

  // The pass.
  int64_t pass_ = -1;
  bool in_pass_ = false;
  Flags used_;                     // since the last pass, also in passes without synchronization
  std::vector<bool> has_arrived_;  // by parameter
  std::vector<size_t> arrival_;    // the parameters that have arrived, in that order
  size_t num_expected_ = 0;
  std::vector<size_t> num_missing_;  // by bucket
  std::vector<UnderWay> under_way_;  // the buckets that have been handed over
  GatheredPtr flags_of_all_;         // null if there is one rank, or if they have been checked
  std::vector<int> tasks_;           // of autograd's engine, which have brought gradients
};

}  // namespace fusedcomm
