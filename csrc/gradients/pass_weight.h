// Weights of the ranks in the mean: instead of Σ gᵣ / p a gradient becomes Σ wᵣ·gᵣ / Σ wᵣ.
//
//   message   Σ wᵣ: 32 bytes of each rank, which the engine gets just before the pass's first bucket
//   pack      multiplies by wᵣ / unit, in fp32, before it rounds. It waits for no message
//   unpack    multiplies by unit·p / Σ wᵣ. The message's job is ahead of the bucket's on the unpack lane; with
//             error feedback also on the reduce lane
//
// The unit is the mean weight of the first pass that has one; only that pass waits for its message. It stays, so what
// is encoded has the magnitude of gradients as long as weights have that of the first pass. Residuals of error feedback
// keep their size beside unweighted gradients; see ResidualBuffer.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "gradients/bucket.h"
#include "transport/tensor_transport.h"

namespace fusedcomm {

// What is wrong with a rank's weight. The numbers are places in the message.
enum class WeightProblem : uint8_t { kNone, kMissing, kInvalid, kLate };

// The message: Σ wᵣ, then a mark for each problem. The lowest rank that has the problem is the exponent of their sum,
// whichever ranks above it have it, too.
using WeightSums = std::array<double, 4>;

// What the weights do to the buckets of one backward pass.
struct PassWeight {
  // Multiplies gradients before they are encoded. 0: this rank takes part with zeros and keeps its residuals.
  double pack = 1;
  // The rank's weight / unit: `pack`, and what the gradients have been multiplied by before.
  double share = 1;
  // Multiplies what is decoded. Written ahead of the pass's buckets on the reduce and unpack lanes.
  double unpack = 1;
  at::Tensor on_device;  // accelerators: `unpack` as a float32 scalar on the device; else undefined
  WeightSums sums{};     // not on accelerators
  // What every rank throws instead of the pass's result; null if there is nothing. Written as `unpack` is. The pass
  // goes on all the same: a rank that sent nothing more would leave others waiting that had begun to send. Not on
  // accelerators.
  std::exception_ptr refusal;
  WeightProblem problem = WeightProblem::kNone;  // of this rank
  bool is_deferred = false;                      // another session's sum follows, which applies `unpack`
  // Accelerators: the message on the host, and when it is there.
  at::Tensor values;
  StampPtr arrived;

  // The unit of residuals in that of the gradients; 0 if the rank has no weight.
  double of_residuals() const { return pack == 0 ? 0 : share / pack; }
  // The error of a bucket of the pass.
  std::exception_ptr error_of(std::exception_ptr error) const { return refusal ? refusal : std::move(error); }
  // Multiplies a decoded tensor by `unpack`. Call it on the unpack lane.
  void apply(const at::Tensor& tensor) const {
    const at::NoGradGuard no_grad;
    on_device.defined() ? tensor.mul_(on_device) : tensor.mul_(unpack);
  }
};
using PassWeightPtr = std::shared_ptr<PassWeight>;

class PassWeights {
 public:
  // `engine` must outlive this object, but its lanes must end before it does.
  PassWeights(Engine* engine, std::shared_ptr<TensorTransport> transport, c10::Device device);

  // Weighs the passes from now on; every rank must call it. of_sums: gradients are those of a sum, w times a mean.
  void use(bool of_sums);
  // Whether every rank with a backward pass weighs 1 and one without weighs 0, where use() was not called.
  void count_active(bool counts);
  // This rank's weight in the passes to come. scale: what multiplies gradients if that is not the weight. Returns
  // whether a pass under way has had another one, which is an error of every rank in the next pass.
  bool set(double weight, std::optional<double> scale = std::nullopt);
  // The same for a value that is no weight. `what`: the value, for the error that every rank throws in the next pass.
  void set_invalid(const std::string& what);
  // Call for every backward pass, before its first gradient is added to others, where passes add up gradients: the
  // weight of the sum is that of all passes. Returns what multiplies the gradients of the pass before they are added.
  double note_pass();
  // Whether passes have been noted since the last message.
  bool has_noted() const;
  // Forgets these passes.
  void forget_passes();
  // The sums of another session follow those of this one, end with Σ wᵣ and refuse. rank: what errors call this one.
  void defer(int rank);
  // The other session's part: from now on the weights are those of `num_ranks` ranks.
  void spread(int64_t num_ranks, int rank);
  // Takes the sums of the last pass of `of_rows`, whose bucket is done, as this rank's part. Not on accelerators.
  void follow(const PassWeights& of_rows);
  // Σ wᵣ of the last pass. Not on accelerators. Call it when a bucket of the pass is done.
  double last_sum() const;
  // Whether the last pass was refused.
  bool is_refused() const;
  // Whether a bucket of a pass has been handed over, and its last one has not.
  bool in_pass() const;

  // The weight of the pass that `bucket` belongs to; the pass's first bucket sends the message. Null without weights.
  // If a rank has no valid weight, all buckets of the pass fail with the same error on every rank. On an accelerator
  // this throws it, in the next pass where it has not waited for the message.
  PassWeightPtr of(const Bucket& bucket);

  // Takes over the weights of `from`, and the unit. again: the pass that has begun there last begins here again.
  void take_over(const PassWeights& from, bool again);
  // Σ wᵣ of the last pass, as another rank has received it. Call it when the engine has stopped.
  void finish_last(double sum);
  // The unit, of a pass that other ranks have had; see above. 0: none yet.
  void set_unit(double unit);

  // A warning for the user; empty if there is none.
  std::string take_notice();

 private:
  // Call these with mutex_ held.
  PassWeightPtr begin(bool is_shadow);
  void send(const PassWeightPtr& weight, const at::Tensor& values);
  // Reads the message of the pass before, where the host has not waited for it.
  void check_last();

  // The error, if the message says that a rank has no valid weight; else null.
  std::exception_ptr refusal_of(const double* values) const;
  void finish(PassWeight* weight, const double* values, double unit);
  // The same on an accelerator, where nobody waits: without a valid weight all gradients become NaN, and the next pass
  // throws.
  void finish_on_device(PassWeight* weight, const at::Tensor& values, double unit) const;

  Engine* const engine_;
  const std::shared_ptr<TensorTransport> transport_;
  const c10::Device device_;
  std::atomic<bool> is_deferred_{false};
  std::atomic<double> num_ranks_;
  std::atomic<bool> sums_to_zero_{false};  // whether all weights of a pass were 0

  mutable std::mutex mutex_;  // guards the members below
  bool is_on_ = false, of_sums_ = false, counts_active_ = false;
  std::optional<double> weight_, scale_;  // weight_: none before set()
  WeightProblem problem_ = WeightProblem::kNone;
  std::string invalid_;    // the value that is no weight
  int rank_;               // what errors call this rank
  WeightSums followed_{};  // from follow()
  double noted_ = 0;       // Σ of the weights of the passes that have been noted since the last message
  int64_t num_noted_ = 0;
  int noted_task_ = -1;  // of autograd's engine, which began the last of them
  double unit_ = 0;      // 0: no pass has had a weight yet
  bool in_pass_ = false;
  int task_ = -1;  // of autograd's engine, which began the pass
  bool has_said_zero_ = false;
  PassWeightPtr last_;
  PassWeightPtr again_;  // the weight of a pass that begins again; else null
};

}  // namespace fusedcomm
