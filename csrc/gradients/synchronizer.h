// Hands a front end's buckets to the engine, and completes the front end's future when a bucket's job ends:
//
//   Bucket ──► its record (bucket_record.h) and its turn (pass_order.h) ──► its job (job_builder.h), with decorators
//     (decorators.h) ──► engine
//
// Collective calls that are not buckets are in collective_calls.h.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "engine/watched.h"
#include "gradients/bucket_future.h"
#include "gradients/bucket_record.h"
#include "gradients/kept_pass.h"
#include "gradients/pass_order.h"
#include "gradients/pass_weight.h"
#include "transport/tensor_transport.h"

namespace fusedcomm {

class Synchronizer {
 public:
  // parameters: empty if they are added as they appear in buckets, e.g. for a hook that is registered without the
  // module. device: of the gradients. wire_1d: wire number of parameters that appear later and have at most one
  // dimension, the same on every rank.
  Synchronizer(std::shared_ptr<Engine> engine, std::shared_ptr<TensorTransport> transport,
               const std::vector<Parameters::Known>& parameters, c10::Device device, int wire_1d);
  // Ends the engine and the transport without holding the GIL.
  ~Synchronizer();

  // Calls `call` ahead of every `every`th backward pass but the first, so that every rank calls it ahead of the same
  // one; `every` 0: never. Call this before the first pass.
  void before_every(int64_t every, std::function<void()> call);
  // Call it ahead of the first bucket of each backward pass, without a lock and without the GIL. Throws what the
  // function given above throws.
  void begin_pass();

  // Submits a bucket and returns at once. The future receives Bucket::result() or the error. Every rank must submit the
  // same buckets, in the order of their indices.
  FuturePtr run(const Bucket& bucket);

  // Chooses the wire number of a parameter by its name. It is called once for each name, without a lock.
  using WireOf = std::function<int(const std::string& name, int64_t num_dims)>;
  // Call it before know(). Without it, the number of dimensions decides: see Parameters.
  void choose_wires(WireOf wire_of);
  // Names a parameter that is added later than this object was made. wire: its number, if not WireOf says it. Every
  // rank must name the same ones in the same order among its buckets.
  void know(const at::Tensor& parameter, const std::string& name, std::optional<int> wire = std::nullopt);

  // Returns what a watch sees of the engine; failures wait for it from now on, for `limit` at most. Throws if there is
  // a watch already.
  std::shared_ptr<Watched> watch(Watched::Seconds limit);
  // Ends the watch. Does nothing if there is none.
  void unwatch();
  // Ends the engine; buckets under way fail with `reason`.
  void stop(const std::string& reason);
  // stop() for a process that is exiting: it does not wait for other ranks.
  void leave(const std::string& reason);
  // stop(), and then ends the collectives under way on a device: see TensorTransport::abort(). For another thread than
  // the one that hands buckets over.
  void abort(const std::string& reason);
  // On a device, waits on the host until all that the calling thread's stream has been given has ended. Returns whether
  // that was before the engine was stopped, so that nothing of it comes from a collective that was aborted; does not
  // wait after that. On a CPU, where the buckets' futures say all this, returns true.
  bool wait_for_device() const;
  // On a device, waits until it does nothing more of what a stopped engine and the calling thread's stream have been
  // given. Throws RuntimeError if that takes longer.
  void wait_until_idle(std::chrono::milliseconds timeout) const;
  Engine& engine() const { return *engine_; }
  c10::Device grad_device() const { return device_; }
  const std::shared_ptr<TensorTransport>& transport() const { return transport_; }
  // Returns what the watch knows about the other ranks after a failure outside of the engine, for people; see
  // Watched::explain(). Empty without a watch. Waits for a roll call.
  std::string explain(const std::string& failure) const;
  // Waits for the device where it counts non-finite elements.
  EngineStats stats() const;

  // Non-finite elements by parameter name. Waits for the device where it counts them.
  std::map<std::string, int64_t> nonfinite_by_parameter() const;
  void restore_nonfinite(const std::map<std::string, int64_t>& counts);

  // Error feedback: this rank's residuals by parameter name, fp32 [numel in its bucket], in the unit of gradients; only
  // those of `names` if given. Empty without error feedback.
  std::map<std::string, at::Tensor> residuals(const std::optional<ParameterNames>& names = std::nullopt) const;
  // For a checkpoint, beside all residuals(): what an encoder has left out for itself, by the name of the first
  // parameter of a bucket. Buckets that are cut as they were then go on with the same bits.
  std::map<std::string, EncoderResiduals> residuals_of_encoders() const;
  // Replaces all residuals, or those of `names`; one of these that is not in `residuals` has none afterwards. Call it
  // between backward passes.
  void restore_residuals(const std::map<std::string, at::Tensor>& residuals,
                         const std::optional<ParameterNames>& names = std::nullopt,
                         const std::map<std::string, EncoderResiduals>& of_encoders = {});

  // Takes over from one with the same parameters whose engine has stopped: residuals, step, weights, and counts of
  // non-finite elements. again: the pass under way there will be handed over here, too, as KeptPass::packed() returns
  // it.
  void take_over(Synchronizer& from, bool again);
  KeptPass& kept() { return kept_; }

  // Returns the warnings for the user since the last call; may be empty. They are not raised by torch here, because
  // where warnings are errors that would fail on this rank alone.
  std::vector<std::string> take_notices();

  // Backward passes so far.
  int64_t step() const;
  void restore_step(int64_t step);

  PassWeights& weights() { return weights_; }
  // The records of the last backward pass, by bucket index.
  std::vector<BucketRecordPtr> buckets() const;

 private:
  // Rethrows the exception that is being handled. On accelerators adds the bucket's name to its text if that is
  // missing.
  [[noreturn]] void rethrow_named(const Bucket& bucket, const std::exception& error);
  std::string text_of(const Bucket& bucket);
  // Keeps the bucket's messages for others, and gives the job codes that it has already.
  void keep(const Bucket& bucket, const BucketRecordPtr& record, const std::shared_ptr<BucketJob>& job,
            const FuturePtr& future);
  // Counts the bucket in the backward pass, and returns its record.
  BucketRecordPtr take_turn(const Bucket& bucket, const PassWeight* weight);

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<TensorTransport> transport_;
  const c10::Device device_;
  const pid_t process_;
  int64_t call_every_ = 0;  // 0: never
  int64_t num_begun_ = 0;   // passes; never restored, because all ranks must agree
  std::function<void()> call_;
  mutable std::mutex mutex_;  // guards the members from here to wire_of_
  mutable Parameters parameters_;
  BucketRecords records_;
  PassOrder order_;
  std::vector<std::string> notices_;
  WireOf wire_of_;  // empty: the number of dimensions decides

  PassWeights weights_;
  KeptPass kept_;

  std::shared_ptr<Watched> watched() const;
  mutable std::mutex watch_mutex_;
  std::shared_ptr<Watched> watched_;  // null if there is no watch
};

}  // namespace fusedcomm
