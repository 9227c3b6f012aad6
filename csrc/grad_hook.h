// From DDP's buckets to the engine's jobs, and from a finished job to the reducer's future.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <unordered_map>
#include <vector>

#include "c10d_transport.h"
#include "engine.h"
#include "feedback.h"
#include "guard.h"
#include "watch.h"

namespace fusedcomm {

// What is known of one parameter. Keyed by the parameter, never by its bucket: buckets are rebuilt and renumbered.
struct ParameterState {
  at::Tensor parameter;  // held, so that its address stays its own
  std::string name;
  uint32_t number = 0;                    // in the order in which all ranks met them
  int wire = 0;                           // its number, see plan.h
  std::atomic<int64_t> num_nonfinite{0};  // elements of local gradients that were not finite when packed

  // Error feedback: what has been left out of it is at `residual_begin` of its bucket's, or, before it has a bucket, in
  // `loaded`, fp32 in the unit of gradients.
  std::shared_ptr<const StreamResidual> residual;
  int64_t residual_begin = 0;
  at::Tensor loaded;
};

// A bucket as DDP last showed it. Valid for as long as the same parameters come in the same order.
struct BucketRecord {
  struct Member {
    std::shared_ptr<ParameterState> state;
    int64_t offset = 0;  // elements from the start of the bucket's buffer
    int64_t numel = 0;   // of the buffer's dtype: a complex parameter counts twice
    size_t payload = 0;  // of the plan's layouts
    bool exact = false;  // in that layout's exact stream
  };
  // Of one of the plan's layouts.
  struct Stream {
    uint32_t first_parameter = 0;
    std::shared_ptr<const BucketTables> tables;         // of what is packed
    std::shared_ptr<const BucketTables> unpack_tables;  // if that is another layout, of what is unpacked
    std::shared_ptr<StreamResidual> residual;           // null without error feedback
  };
  std::vector<c10::TensorImpl*> parameters;
  at::ScalarType dtype = at::kFloat;
  std::vector<Member> members;
  int64_t numel = 0;
  bool is_stale = false;  // its residuals have been replaced: to be made anew
  bool foreign = false;   // sparse, or of a dtype the codec does not carry: summed as it is
  BucketPlan plan;
  std::vector<Stream> streams;  // by payload
  std::shared_ptr<const BucketLabel> label;
};

class GradHook {
 public:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    int wire;
  };
  // The same on every rank.
  struct Options {
    // Parameters that turn up later (a hook registered without the module) are named by their shape, and travel like
    // this, if they have at most one dimension.
    int wire_1d = 0;
    GuardOptions guard;
    int fallback_wire = kExactWire;  // that the parameters of a bucket get which lost too much
  };

  // device: where the gradients are.
  GradHook(std::shared_ptr<Engine> engine, std::shared_ptr<C10dTransport> transport,
           const std::vector<Parameter>& parameters, c10::Device device, const Options& options);
  // Ends the engine and the transport without holding the GIL.
  ~GradHook();

  // Returns at once; the future holds the bucket's own buffer, or the error.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket);

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
  // Waits for the device where it counts non-finite elements.
  EngineStats stats() const;

  struct ParameterCount {
    std::string name;
    int64_t num_nonfinite;
  };
  // Waits for the device where it counts them.
  std::vector<ParameterCount> nonfinite_by_parameter() const;
  void restore_nonfinite(const std::vector<ParameterCount>& counts);

  // Error feedback: what this rank has left out so far, fp32 in the unit of gradients, by parameter. Empty without.
  struct ParameterResidual {
    std::string name;
    at::Tensor values;  // [numel in its bucket]
  };
  std::vector<ParameterResidual> residuals() const;
  // Between backward passes. Parameters that are not named have left out nothing.
  void restore_residuals(const std::vector<ParameterResidual>& residuals);
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
  c10::intrusive_ptr<c10::ivalue::Future> hand_over(c10d::GradBucket& bucket);
  std::string text_of(const c10d::GradBucket& bucket);
  // Before the first bucket of a backward pass.
  void begin_pass();
  void fall_back(const Guard::Failing& failing);
  std::shared_ptr<BucketJob> make_job(const std::shared_ptr<const BucketRecord>& record, const at::Tensor& buffer,
                                      int64_t step) const;
  // Has this rank's pack of the bucket measured.
  void measure(BucketJob* job, const std::shared_ptr<const BucketRecord>& record, const at::Tensor& buffer,
               int64_t step);

  // All that follow, under mutex_.
  std::shared_ptr<const BucketRecord> record_of(const c10d::GradBucket& bucket);
  // Raises an error if DDP has left out buckets.
  void check_order(const c10d::GradBucket& bucket, const BucketRecord& record);
  // Raises an error if these are not the gradients of the bucket's parameters.
  static void check_gradients(const c10d::GradBucket& bucket);
  std::shared_ptr<const BucketRecord> make_record(const at::Tensor& buffer, const std::vector<at::Tensor>& parameters,
                                                  size_t index);
  void plan(BucketRecord* record);
  std::shared_ptr<ParameterState> state_of(const at::Tensor& parameter);
  std::shared_ptr<ParameterState> add_state(const at::Tensor& parameter, std::string name, uint32_t number);
  void notice_what_still_waits();
  // The device's tables of the record's bucket.
  void prepare(BucketRecord* record);
  // Makes the record's residuals, of what its parameters have left out so far; what cannot be kept any more goes into
  // the gradients at hand.
  void move_residuals(BucketRecord* record, const at::Tensor& buffer);
  // Adds what devices have counted since the last time to the parameters' states.
  void take_device_counts() const;

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<C10dTransport> transport_;
  const Options options_;
  const c10::Device device_;
  const pid_t process_;
  const bool knows_parameters_;  // else they turn up
  mutable std::mutex mutex_;     // what follows, but for guard_
  std::unordered_map<c10::TensorImpl*, std::shared_ptr<ParameterState>> states_;
  std::vector<std::shared_ptr<const BucketRecord>> records_;  // by bucket index
  size_t next_index_ = 0;                                     // that a bucket should have
  const BucketRecord* first_of_pass_ = nullptr;               // to compare with
  int num_unfinished_ = 0;                                    // passes in a row, with the same first bucket
  std::vector<std::string> notices_;
  // By name: restored for parameters that have not turned up yet.
  std::unordered_map<std::string, at::Tensor> waiting_residuals_;
  std::unordered_map<std::string, int64_t> waiting_counts_;

  // Tables that count, whose bucket may have been rebuilt since.
  struct Counted {
    std::shared_ptr<const BucketTables> tables;
    std::vector<std::shared_ptr<ParameterState>> states;  // in the order of the counts
    std::vector<int64_t> taken;
  };
  mutable std::vector<Counted> counted_;
  mutable int64_t num_nonfinite_on_device_ = 0;

  int64_t step_ = 0;        // of the noise: a checkpoint has it
  int64_t num_passes_ = 0;  // of the guard, whose ranks have to agree: never set
  size_t num_buckets_ = 1;  // in the pass before

  Guard guard_;

  std::shared_ptr<Watch> watch() const;
  mutable std::mutex watch_mutex_;
  std::shared_ptr<Watch> watch_;  // null: none
};

}  // namespace fusedcomm
