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

namespace fusedcomm {

// What is known of one parameter. Keyed by the parameter, never by its bucket: buckets are rebuilt and renumbered.
struct ParameterState {
  at::Tensor parameter;  // held, so that its address stays its own
  std::string name;
  bool exempt = false;
  std::atomic<int64_t> num_nonfinite{0};  // elements of local gradients that were not finite when packed
};

// A bucket as DDP last showed it. Valid for as long as the same parameters come in the same order.
struct BucketRecord {
  struct Member {
    std::shared_ptr<ParameterState> state;
    int64_t offset = 0;  // elements from the start of the bucket's buffer
    int64_t numel = 0;   // of the buffer's dtype: a complex parameter counts twice
  };
  std::vector<c10::TensorImpl*> parameters;
  at::ScalarType dtype = at::kFloat;
  std::vector<Member> members;
  int64_t numel = 0;
  bool foreign = false;  // sparse, or of a dtype the codec does not carry: summed as it is
  BucketPlan plan;
  std::shared_ptr<const BucketTables> tables;
  std::shared_ptr<const BucketLabel> label;
};

// A bucket's result beside an exact all-reduce of the same gradients.
struct Verification {
  int64_t step = 0;
  std::shared_ptr<const BucketLabel> label;
  at::Tensor error_norm, exact_norm;  // float64 scalars: ‖result − exact‖₂, ‖exact‖₂
};

class GradHook {
 public:
  struct Parameter {
    at::Tensor tensor;
    std::string name;
    bool exempt;
  };

  // device: where the gradients are. verify_every: compares one bucket, another each time, with an exact all-reduce in
  // every step that it divides; 0: never. The same on every rank. Parameters that turn up later (a hook registered
  // without the module) are named by their shape, and are exempt if `exempt_1d` and they have at most one dimension.
  GradHook(std::shared_ptr<Engine> engine, std::shared_ptr<C10dTransport> transport,
           const std::vector<Parameter>& parameters, bool exempt_1d, c10::Device device, int64_t verify_every);
  // Ends the engine and the transport without holding the GIL.
  ~GradHook();

  // Returns at once; the future holds the bucket's own buffer, or the error.
  c10::intrusive_ptr<c10::ivalue::Future> run(c10d::GradBucket& bucket);

  void stop(const std::string& reason) { engine_->stop(reason); }
  Engine& engine() const { return *engine_; }
  // Waits for the device where it counts non-finite elements.
  EngineStats stats() const;

  struct ParameterCount {
    std::string name;
    int64_t num_nonfinite;
  };
  // Waits for the device where it counts them.
  std::vector<ParameterCount> nonfinite_by_parameter() const;
  void restore_nonfinite(const std::vector<ParameterCount>& counts);
  // The last of them, oldest first. Waits for the device.
  std::vector<Verification> verifications() const;
  // The buckets of the last backward pass, by index.
  std::vector<std::shared_ptr<const BucketRecord>> buckets() const;

 private:
  void submit_verified(std::shared_ptr<BucketJob> job, const at::Tensor& buffer);
  // Whether it is this bucket's turn; counts the steps.
  bool is_due(const c10d::GradBucket& bucket);
  std::shared_ptr<const BucketRecord> record_of(const c10d::GradBucket& bucket);
  std::shared_ptr<const BucketRecord> make_record(const at::Tensor& buffer, const std::vector<at::Tensor>& parameters,
                                                  size_t index);
  std::shared_ptr<ParameterState> state_of(const at::Tensor& parameter);
  // The device's tables of the record's bucket. Under mutex_, as the next.
  void prepare(BucketRecord* record);
  // Adds what devices have counted since the last time to the parameters' states.
  void take_device_counts() const;

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<C10dTransport> transport_;
  const bool exempt_1d_;
  const c10::Device device_;
  mutable std::mutex mutex_;  // the two tables
  std::unordered_map<c10::TensorImpl*, std::shared_ptr<ParameterState>> states_;
  std::vector<std::shared_ptr<const BucketRecord>> records_;  // by bucket index

  // Tables that count, whose bucket may have been rebuilt since.
  struct Counted {
    std::shared_ptr<const BucketTables> tables;
    std::vector<std::shared_ptr<ParameterState>> states;  // in the order of the counts
    std::vector<int64_t> taken;
  };
  mutable std::vector<Counted> counted_;
  mutable int64_t num_nonfinite_on_device_ = 0;

  const int64_t verify_every_;
  int64_t step_ = 0;
  size_t num_buckets_ = 1;  // in the step before
  std::deque<Verification> verifications_;
};

}  // namespace fusedcomm
