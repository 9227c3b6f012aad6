// Error feedback's residuals of lossy elements on this rank: what its two encoders have left out so far. The first
// encoder is pack, which encodes every part. On two levels it is the local reduce, which encodes the parts that this
// rank sums over its host. The second encoder is the reduce, which encodes this rank's own part.
//
// Encoders need residuals in the order of the slice list. Code that keeps them by parameter reads and writes ranges of
// it with values() and set_values().
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>
#include <vector>

#include "codec/args.h"
#include "transport/transport.h"

namespace fusedcomm {

// What the two encoders have left out, each for itself: the first residual, of this rank's own part or of all that it
// encodes; the second; and the share and factor by which they count, see ResidualBuffer::weigh_first().
using EncoderResiduals = std::tuple<at::Tensor, at::Tensor, double, double>;

class ResidualBuffer {
 public:
  // All residuals are zero at first. reduce_scale: of the bucket's plan. place: tells which parts this rank
  // encodes in a two-shot. of_first_only: there is no second residual, because nothing is encoded
  // twice.
  ResidualBuffer(const BucketLayout& layout, float reduce_scale, const Place& place, c10::Device device,
                 bool of_first_only = false);

  Residual of_first() const { return {first_.data_ptr<float>(), first_numel()}; }
  Residual of_second() const { return {second_.data_ptr<float>(), second_numel()}; }
  // Error feedback of gradients with weights. `share`: of the rank's weight in the mean weight, by which its gradients
  // are multiplied before they are encoded, here or by the loss. `factor`: what multiplies the encoded sum afterwards.
  // The first residual keeps its size beside the gradients of the rank, the second beside the mean, whatever they are
  // multiplied by next. Call them before the encoders run, on their lanes. A share or factor of 0 changes nothing.
  void weigh_first(double share);
  void weigh_second(double factor);
  void weigh_second(const at::Tensor& factor);  // a scalar on the device
  // The second residual as it was when remember_second() was called, once forget_second() had been; does nothing if
  // that was not called. For sums that are made again.
  void forget_second() { remembered_.reset(); }
  void remember_second() { remembered_ = Second{second_.clone(), second_factor_, second_on_device_}; }
  void restore_second() {
    if (!remembered_) return;
    second_.copy_(remembered_->values);
    second_factor_ = remembered_->factor;
    second_on_device_ = remembered_->factor_on_device;
  }
  std::vector<at::Tensor> storages() const { return {first_, second_}; }

  // The residual of the lossy elements from `begin` on: fp32 [numel], in the unit of gradients, with weights those of a
  // mean loss. If this rank added it to its gradient, nothing would be left out. The second encoder's residual is of
  // means, so it counts multiplied by the world size.
  at::Tensor values(int64_t begin, int64_t numel) const;
  // Replaces the residual by `values` ([layout.lossy_numel], in the unit of gradients). With two levels this rank
  // encodes only part of the list: returns what lies outside it, to be added to the gradient. On one level the result
  // is undefined.
  at::Tensor set_values(const at::Tensor& values);
  // What a checkpoint needs beside values(), in which the two residuals are one, for the bits of the next steps. None
  // where values() tells all.
  std::optional<EncoderResiduals> of_encoders() const;
  // Replaces the residuals by what of_encoders() has returned for a buffer like this one. Returns whether it was.
  bool take(const EncoderResiduals& of_encoders);

 private:
  int64_t first_numel() const { return layout_.num_chunks * num_first_parts_ * layout_.part.lossy_numel; }
  int64_t second_numel() const { return layout_.num_chunks * layout_.part.lossy_numel; }
  // Whether values() has the first residual's own bits where nothing is encoded twice.
  bool is_unscaled() const { return first_share_ == 1; }
  // The first residual's view of the part that this rank encodes twice.
  at::Tensor own_first() const;
  // Elements of the first residual, as of a rank with the mean weight.
  at::Tensor of_first(int64_t begin, int64_t numel) const;
  // The range of a chunk's elements that the first encoder encodes.
  Range first_range(int64_t chunk) const;

  const BucketLayout layout_;
  const float reduce_scale_;
  const Place place_;
  const int64_t num_first_parts_;  // parts of a chunk that the first encoder encodes
  const bool has_second_;
  at::Tensor first_, second_;                   // fp32
  double first_share_ = 1, second_factor_ = 1;  // what they have been multiplied by, and what multiplies them
  at::Tensor second_on_device_;                 // second_factor_ if it is a tensor
  struct Second {
    at::Tensor values;
    double factor;
    at::Tensor factor_on_device;
  };
  std::optional<Second> remembered_;
};

}  // namespace fusedcomm
