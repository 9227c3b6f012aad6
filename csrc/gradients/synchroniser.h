// Makes the engine's jobs from a front end's buckets, and completes the front end's future when a job ends.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "gradients/bucket_future.h"
#include "gradients/bucket_record.h"
#include "gradients/epilogue.h"
#include "gradients/error_monitor.h"
#include "transport/c10d_transport.h"
#include "watch/watch.h"

namespace fusedcomm {

class Synchroniser {
 public:
  // All ranks must have the same options.
  struct Options {
    int wire_1d = 0;  // wire number of parameters that appear later and have at most one dimension
    ErrorMonitorOptions monitor;
    int fallback_wire = kExactWire;  // wire number that the parameters of a bucket get if its error is too large
  };

  // parameters: empty if they are added as they appear in buckets, e.g. for a hook that is registered without the
  // module. device: of the gradients.
  Synchroniser(std::shared_ptr<Engine> engine, std::shared_ptr<C10dTransport> transport,
               const std::vector<Parameters::Known>& parameters, c10::Device device, const Options& options);
  // Ends the engine and the transport without holding the GIL.
  ~Synchroniser();

  // Submits a bucket and returns at once. The future receives the bucket's run of gradients (of separate tensors, the
  // first) or the error. Every rank must submit the same buckets, in the order of their indices.
  FuturePtr run(const Bucket& bucket);

  // Chooses the wire number of a parameter by its name. It is called once for each name, without a lock.
  using WireOf = std::function<int(const std::string& name, int64_t num_dims)>;
  // Call it before know(). Without it, the number of dimensions decides: see Parameters.
  void choose_wires(WireOf wire_of);
  // Names a parameter that is added later than this object was made. Every rank must name the same ones in the same
  // order among its buckets.
  void know(const at::Tensor& parameter, const std::string& name);
  // Drops the state of a parameter that will not appear again; its residual is lost.
  void forget(const at::Tensor& parameter);

  // Starts reporting stalls and explaining failures. Throws if there is a watch already.
  void watch(const StorePtr& store, const WatchOptions& options);
  // Ends the watch, its threads and its connection to the store. Does nothing if there is no watch.
  void unwatch();
  // Ends the engine; buckets under way fail with `reason`.
  void stop(const std::string& reason);
  // stop() for a process that is exiting: it does not wait for other ranks.
  void leave(const std::string& reason);
  Engine& engine() const { return *engine_; }
  c10::Device grad_device() const { return device_; }
  const std::shared_ptr<C10dTransport>& transport() const { return transport_; }
  // Returns the largest of the ranks' values. A collective call between backward passes; it waits. `what` names it in
  // reports of stalls and failures.
  double max_over_ranks(double value, const std::string& what) const;
  // Gathers every rank's `numbers`, int64 [n] on a CPU, and returns at once. The future receives int64 [world_size, n]
  // on the gradients' device. Every rank must call it at the same place among its buckets, with as many numbers.
  FuturePtr gather(const at::Tensor& numbers, const std::string& what) const;
  // Notes on the board that this rank takes part in a collective call between backward passes. `what` names it in
  // reports of stalls and failures. Returns a number for end_call(). Every rank must begin the same calls, in the same
  // order among its buckets.
  int64_t begin_call(const std::string& what) const;
  // If not `all_took_part`, the call counts as not made.
  void end_call(int64_t call, bool all_took_part) const;
  // Returns what the watch knows about the other ranks after a failure outside of the engine, for people; see
  // Watch::explain(). Empty without a watch. Waits for a roll call.
  std::string explain(const std::string& failure) const;
  // Waits for the device where it counts non-finite elements.
  EngineStats stats() const;

  // Non-finite elements by parameter name. Waits for the device where it counts them.
  std::map<std::string, int64_t> nonfinite_by_parameter() const;
  void restore_nonfinite(const std::map<std::string, int64_t>& counts);

  // Error feedback: this rank's residuals by parameter name, fp32 [numel in its bucket], in the unit of gradients.
  // Empty without error feedback.
  std::map<std::string, at::Tensor> residuals() const;
  // Replaces all residuals; a parameter that is not named has none afterwards. Call it between backward passes.
  void restore_residuals(const std::map<std::string, at::Tensor>& residuals);
  // Gives the parameters of `other` the same names and numbers here. Call it before the first backward pass.
  void adopt_names(const Synchroniser& other);

  // Returns the warnings for the user since the last call; may be empty. They are not raised by torch here, because
  // where warnings are errors that would fail on this rank alone.
  std::vector<std::string> take_notices();

  // Backward passes so far. The number selects the noise of stochastic rounding.
  int64_t step() const;
  void restore_step(int64_t step);

  PassEpilogue& epilogue() { return epilogue_; }
  const ErrorMonitor& monitor() const { return monitor_; }
  // Waits for the device, so that the monitor's results can be read.
  void settle() const;
  // The records of the last backward pass, by bucket index. A record is null from the bucket's fallback to its next
  // hand-over.
  std::vector<std::shared_ptr<const BucketRecord>> buckets() const;

 private:
  // Rethrows the exception that is being handled. On accelerators adds the bucket's name to its text if that is
  // missing.
  [[noreturn]] void rethrow_named(const Bucket& bucket, const std::exception& error);
  void submit_passthrough(std::shared_ptr<BucketJob> job, const GradientsPtr& gradients, const FuturePtr& future,
                          float unscale);
  // Submits a collective that is not a bucket. The future receives `result`, which the transfer fills.
  FuturePtr submit_uncounted(const std::string& what, const at::Tensor& result, Lane::Transfer transfer) const;
  std::string text_of(const Bucket& bucket);
  // Call it before the first bucket of a backward pass, if buckets are verified.
  void begin_pass();
  void fall_back(const ErrorMonitor::Failing& failing);
  std::shared_ptr<BucketJob> make_job(const std::shared_ptr<const BucketRecord>& record, const GradientsPtr& gradients,
                                      int64_t step) const;
  // Gives the job its bucket's epilogue.
  void add_epilogue(const std::shared_ptr<BucketJob>& job, const BucketRecord& record, const GradientsPtr& gradients,
                    size_t index, const PassEpilogue::Task& task);
  // Prepares the job so that the error of this rank's first encoder is measured.
  void measure(BucketJob* job, const std::shared_ptr<const BucketRecord>& record, const GradientsPtr& gradients,
               int64_t step);
  // The residuals of the bucket's first encoders, one for each lossy layout, with temporary ones where the record has
  // none; the job's encoders write their errors there. {null} if there is no memory: a measurement is not worth failing
  // a step.
  std::vector<std::shared_ptr<ResidualBuffer>> measured_residuals(BucketJob* job, const BucketRecord& record) const;

  // Call these with mutex_ held.
  std::shared_ptr<const BucketRecord> record_of(const Bucket& bucket);
  // Counts the bucket, and takes note of a pass that ends with it. Returns the number of the bucket's noise.
  int64_t count(const Bucket& bucket);
  // Throws if DDP has skipped buckets.
  void check_order(const Bucket& bucket, const BucketRecord& record);

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<C10dTransport> transport_;
  const Options options_;
  const c10::Device device_;
  const pid_t process_;
  mutable std::mutex mutex_;  // guards the members below, down to num_buckets_
  mutable Parameters parameters_;
  std::vector<std::shared_ptr<const BucketRecord>> records_;  // by bucket index
  size_t next_index_ = 0;                                     // that the next bucket should have
  const BucketRecord* first_of_pass_ = nullptr;               // bucket 0's, to compare the next pass's with
  int num_unfinished_ = 0;                                    // unfinished passes in a row with the same first bucket
  std::vector<std::string> notices_;
  WireOf wire_of_;  // empty: the number of dimensions decides

  int64_t step_ = 0;        // numbers the noise; saved in checkpoints
  int64_t num_passes_ = 0;  // numbers the monitor's passes; never restored, because all ranks must agree
  size_t num_buckets_ = 1;  // in the pass before

  ErrorMonitor monitor_;
  PassEpilogue epilogue_;

  std::shared_ptr<Watch> watch() const;
  mutable std::mutex watch_mutex_;
  std::shared_ptr<Watch> watch_;  // null if there is none
};

}  // namespace fusedcomm
