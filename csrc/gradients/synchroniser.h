// From buckets to the engine's jobs, and from a finished job to the front end's future.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "gradients/bucket_record.h"
#include "gradients/error_monitor.h"
#include "transport/c10d_transport.h"
#include "watch/watch.h"

namespace fusedcomm {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

class GradHook {
 public:
  // The same on every rank.
  struct Options {
    int wire_1d = 0;  // of parameters that turn up later, if they have at most one dimension
    GuardOptions guard;
    int fallback_wire = kExactWire;  // that the parameters of a bucket get which lost too much
  };

  // parameters: none if they turn up with their buckets, as where a hook is registered without the module. device:
  // where the gradients are.
  GradHook(std::shared_ptr<Engine> engine, std::shared_ptr<C10dTransport> transport,
           const std::vector<Parameters::Known>& parameters, c10::Device device, const Options& options);
  // Ends the engine and the transport without holding the GIL.
  ~GradHook();

  // Returns at once; the future holds the bucket's own run of gradients (of gradients that lie apart, the first), or
  // the error. Every rank brings the same buckets, in the order of their indices.
  FuturePtr run(const Bucket& bucket);

  // From now on stalls are reported, and failures explained.
  void watch(const StorePtr& store, const WatchOptions& options);
  // No longer: its threads and its connection to the store end. Nothing if there is no watch.
  void unwatch();
  void stop(const std::string& reason);
  // stop(), as the process is exiting: it does not wait for other ranks.
  void leave(const std::string& reason);
  Engine& engine() const { return *engine_; }
  const std::shared_ptr<C10dTransport>& transport() const { return transport_; }
  // The largest of the ranks' values. A collective call, between backward passes; waits. `what` it is, for reports of
  // stalls and failures.
  double max_over_ranks(double value, const std::string& what) const;
  // This rank takes part in a collective call between backward passes: `what` it is, for reports of stalls and
  // failures. Returns a number for end_call(). Every rank begins the same calls, in the same order as its buckets.
  int64_t begin_call(const std::string& what) const;
  // `all_took_part`: else it counts as not made.
  void end_call(int64_t call, bool all_took_part) const;
  // Waits for the device where it counts non-finite elements.
  EngineStats stats() const;

  // By parameter. Waits for the device where it counts them.
  std::map<std::string, int64_t> nonfinite_by_parameter() const;
  void restore_nonfinite(const std::map<std::string, int64_t>& counts);

  // Error feedback: what this rank has left out so far, fp32 [numel in its bucket] in the unit of gradients, by
  // parameter. Empty without.
  std::map<std::string, at::Tensor> residuals() const;
  // Between backward passes. Parameters that are not named have left out nothing.
  void restore_residuals(const std::map<std::string, at::Tensor>& residuals);
  // Before the first backward pass: parameters that have turned up there have the same names and numbers here.
  void name_like(const GradHook& other);

  // What is to be said to the user since the last call. Not by a warning of torch's, which would raise on this rank
  // alone where warnings are errors.
  std::vector<std::string> take_notices();

  // Backward passes so far, which number the noise.
  int64_t step() const;
  void restore_step(int64_t step);

  const Guard& guard() const { return guard_; }
  // Waits for the device, so that what the guard has found can be read.
  void settle() const;
  // The buckets of the last backward pass, by index.
  std::vector<std::shared_ptr<const BucketRecord>> buckets() const;

 private:
  // Throws the exception that is being handled, on accelerators with the bucket's name if it has none.
  [[noreturn]] void rethrow_named(const Bucket& bucket, const std::exception& error);
  void submit_foreign(std::shared_ptr<BucketJob> job, const GradientsPtr& gradients,
                      const std::shared_ptr<at::Tensor>& result);
  std::string text_of(const Bucket& bucket);
  // Before the first bucket of a backward pass, if buckets are verified.
  void begin_pass();
  void fall_back(const Guard::Failing& failing);
  std::shared_ptr<BucketJob> make_job(const std::shared_ptr<const BucketRecord>& record, const GradientsPtr& gradients,
                                      int64_t step) const;
  // Has this rank's pack of the bucket measured.
  void measure(BucketJob* job, const std::shared_ptr<const BucketRecord>& record, const GradientsPtr& gradients,
               int64_t step);

  // All that follow, under mutex_.
  std::shared_ptr<const BucketRecord> record_of(const Bucket& bucket);
  // Raises an error if DDP has left out buckets.
  void check_order(const Bucket& bucket, const BucketRecord& record);

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<C10dTransport> transport_;
  const Options options_;
  const c10::Device device_;
  const pid_t process_;
  mutable std::mutex mutex_;  // what follows, but for guard_
  mutable Parameters parameters_;
  std::vector<std::shared_ptr<const BucketRecord>> records_;  // by bucket index
  size_t next_index_ = 0;                                     // that a bucket should have
  const BucketRecord* first_of_pass_ = nullptr;               // to compare with
  int num_unfinished_ = 0;                                    // passes in a row, with the same first bucket
  std::vector<std::string> notices_;

  int64_t step_ = 0;        // of the noise: a checkpoint has it
  int64_t num_passes_ = 0;  // of the guard, whose ranks have to agree: never set
  size_t num_buckets_ = 1;  // in the pass before

  Guard guard_;

  std::shared_ptr<Watch> watch() const;
  mutable std::mutex watch_mutex_;
  std::shared_ptr<Watch> watch_;  // null: none
};

}  // namespace fusedcomm
