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

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "gradients/bucket.h"
#include "transport/tensor_transport.h"

namespace fusedcomm {

// What the weights do to the buckets of one backward pass.
struct PassWeight {
  // Multiplies gradients before they are encoded. 0: this rank takes part with zeros and keeps its residuals.
  double pack = 1;
  // The rank's weight / unit: `pack`, and what the gradients have been multiplied by before.
  double share = 1;
  // Multiplies what is decoded. Written ahead of the pass's buckets on the reduce and unpack lanes.
  double unpack = 1;
  at::Tensor on_device;      // accelerators: `unpack` as a float32 scalar on the device; else undefined
  double sum = 0;            // Σ wᵣ; not on accelerators
  bool is_deferred = false;  // another session's sum follows, which applies `unpack`
  // Accelerators: the message on the host, and when it is there.
  at::Tensor values;
  StampPtr arrived;

  // The unit of residuals in that of the gradients; 0 if the rank has no weight.
  double of_residuals() const { return pack == 0 ? 0 : share / pack; }
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
  // This rank's weight in the passes to come. scale: what multiplies gradients if that is not the weight.
  void set(double weight, std::optional<double> scale = std::nullopt);
  // The same for a value that is no weight. `what`: the value, for the error that every rank throws in the next pass.
  void set_invalid(const std::string& what);
  // Call for every backward pass, before its first gradient is added to others, where passes add up gradients: the
  // weight of the sum is that of all passes. Returns what multiplies the gradients of the pass before they are added.
  double note_pass();
  // Forgets the passes that have been noted since the last message.
  void forget_passes();
  // Whether the sums of another session follow those of this one, and end with Σ wᵣ.
  void defer() { is_deferred_ = true; }
  // The weights are those of `num_ranks` ranks, where other sessions have added up some of them.
  void spread(int64_t num_ranks) { num_ranks_ = static_cast<double>(num_ranks); }
  // (Σ wᵣ, unit) of the last pass. Not on accelerators. Call it when a bucket of the pass is done.
  std::pair<double, double> last() const;
  // Whether a bucket of a pass has been handed over, and its last one has not.
  bool in_pass() const;

  // The weight of the pass that `bucket` belongs to; the pass's first bucket sends the message. Null without weights.
  // Throws the same error on every rank if one has no valid weight; if the message is under way, the engine fails.
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
  enum class Problem : uint8_t { kNone, kMissing, kInvalid, kLate };

  // Call these with mutex_ held.
  PassWeightPtr begin(bool is_shadow);
  void send(const PassWeightPtr& weight, const at::Tensor& values);
  // Reads the message of the pass before, where the host has not waited for it.
  void check_last();

  // Throws if the message says that a rank has no valid weight.
  void refuse(const double* values) const;
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
  Problem problem_ = Problem::kNone;
  std::string invalid_;  // the value that is no weight
  double noted_ = 0;     // Σ of the weights of the passes that have been noted since the last message
  int64_t num_noted_ = 0;
  double unit_ = 0;  // 0: no pass has had a weight yet
  bool in_pass_ = false;
  int task_ = -1;  // of autograd's engine, which began the pass
  bool has_said_zero_ = false;
  PassWeightPtr last_;
  PassWeightPtr again_;  // the weight of a pass that begins again; else null
};

}  // namespace fusedcomm
