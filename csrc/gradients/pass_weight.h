// Weights of the ranks in the mean: instead of Σ gᵣ / p a gradient becomes Σ wᵣ·gᵣ / Σ wᵣ. Every bucket carries the
// weight itself, so none waits for another:
//
//   pack      multiplies by wᵣ / unit, in fp32, before it rounds, and writes wᵣ / unit to the head of each part
//   reduce    adds up the heads
//   unpack    multiplies by p / Σ (wᵣ / unit), which it finds in the head
//
// The unit is kFirstUnit in the first pass, in which no rank knows the others' weights, and that pass's mean weight
// from then on: what is encoded has the magnitude of gradients as long as weights have that of the first pass.
// Residuals of error feedback keep their size beside unweighted gradients; see ResidualBuffer.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "gradients/bucket.h"

namespace fusedcomm {

// The weight of this rank in one backward pass.
struct PassWeight {
  // Multiplies gradients before they are encoded. 0: this rank takes part with zeros and keeps its residuals.
  double pack = 1;
  // The rank's weight / unit: `pack`, and what the loss has multiplied gradients by.
  double share = 1;
  // fp32 [4], on the device: the head of this rank's messages. `share`, or NaN if the rank has no valid weight; the
  // rank's mark if it has none; zeros.
  at::Tensor head;
  double num_ranks = 1;      // whose weights a sum of heads has
  bool is_deferred = false;  // another session's sum follows, which divides by the weights
  // The mean of the ranks' shares; negative as long as this rank has received none.
  std::atomic<double> mean{-1};
  // Accelerators: the pass's first sum of heads on the host, and when it is there.
  at::Tensor on_host;
  StampPtr arrived;

  // The unit of residuals in that of the gradients; 0 if the rank has no weight.
  double of_residuals() const { return pack == 0 ? 0 : share / pack; }
  // What multiplies decoded gradients; 0 if no rank has a weight, or one has none that is valid. sum: of heads.
  double factor(const float* sum) const;
  // The same on the device of `sum`, fp32 [], but NaN if a rank has no valid weight.
  at::Tensor factor_of(const at::Tensor& sum) const;
};
using PassWeightPtr = std::shared_ptr<PassWeight>;

class PassWeights {
 public:
  // `engine` must outlive this object, but its lanes must end before it does.
  PassWeights(Engine* engine, c10::Device device);

  // Weighs the passes from now on; every rank must call it. of_sums: gradients are those of a sum, w times a mean.
  void use(bool of_sums);
  bool of_sums() const;
  // Whether every rank with a backward pass weighs 1 and one without weighs 0, where use() was not called.
  void count_active(bool counts);
  // This rank's weight in the passes to come. Returns whether a pass under way has had another one, which is an error
  // of every rank in the next pass.
  bool set(double weight);
  // The same for a value that is no weight: the next pass is an error of every rank.
  void set_invalid();
  // Call for every backward pass, before its first gradient is added to others, where passes add up gradients: the
  // weight of the sum is that of all passes. Returns whether the pass has a weight: if not, its gradients must not be
  // added.
  bool note_pass();
  // Whether passes have been noted since the last one that was sent.
  bool has_noted() const;
  // Forgets these passes.
  void forget_passes();
  // Uses this unit in all passes, for ranks that have not seen the first one.
  void fix_unit(double unit);
  // The sums of another session follow those of this one, and divide. rank: what errors call this one.
  void defer(int rank);
  // The other session's part: from now on the weights are those of `num_ranks` ranks.
  void spread(int64_t num_ranks, int rank);
  // Takes the sum of heads that the last bucket of `of_rows` has received as this rank's head, and tells it the unit.
  void follow(PassWeights& of_rows);
  // Whether a bucket of the last pass has been refused.
  bool is_refused() const { return is_refused_; }
  // Whether a bucket of a pass has been handed over, and its last one has not.
  bool in_pass() const;

  // The weight of the pass that `bucket` belongs to. Null without weights. On an accelerator throws what received()
  // would have returned in the pass before, so that all ranks throw in the same pass.
  PassWeightPtr of(const Bucket& bucket);
  // Notes the sum of heads that a bucket has received, fp32 [4] in host memory, or in the device's and on its lane.
  // Returns what every rank throws in place of the bucket's result, if a rank has no valid weight; else null.
  std::exception_ptr received(PassWeight* weight, const at::Tensor& sum);
  // The bucket's sum of heads, for a session that follows.
  void note_sum(const at::Tensor& sum);

  // Takes over the weights of `from`, but not the unit, which ranks that are new do not know.
  void take_over(const PassWeights& from);
  // A warning for the user; empty if there is none.
  std::string take_notice();

 private:
  // A power of two, so that it rounds nothing, between the weights that users give: 1, or thousands of tokens.
  static constexpr double kFirstUnit = 256;

  // Call these with mutex_ held.
  PassWeightPtr begin(bool is_shadow);
  void learn_from(PassWeight* last);
  std::exception_ptr refusal_of(const float* sum) const;

  Engine* const engine_;
  const c10::Device device_;
  std::atomic<bool> is_refused_{false};
  std::atomic<bool> sums_to_zero_{false};  // whether all weights of a pass were 0

  mutable std::mutex mutex_;  // guards the members below
  bool is_on_ = false, of_sums_ = false, counts_active_ = false, is_deferred_ = false;
  double num_ranks_;
  int rank_;                      // what errors call this rank
  std::optional<double> weight_;  // none before set()
  bool is_invalid_ = false, is_late_ = false;
  double noted_ = 0;  // Σ of the weights of the passes that have been noted since the last one that was sent
  int64_t num_noted_ = 0;
  int noted_task_ = -1;  // of autograd's engine, which began the last of them
  double unit_ = kFirstUnit;
  bool knows_unit_ = false;
  at::Tensor followed_;  // from follow(); else undefined
  at::Tensor last_sum_;  // from note_sum()
  bool in_pass_ = false;
  int task_ = -1;  // of autograd's engine, which began the pass
  bool has_said_zero_ = false;
  PassWeightPtr last_;
};

}  // namespace fusedcomm
