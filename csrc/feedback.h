// Error feedback's residuals of one bucket's stream on this rank: what its two encoders have left out so far.
//
// They lie in the order of the stream, as encoders want them; whoever keeps them by parameter takes and sets values.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "codec.h"

namespace fusedcomm {

class StreamResidual {
 public:
  // All zeros. reduce_scale, rank: of the two-shot sum, in which this rank encodes the parts with its number.
  StreamResidual(const BucketLayout& layout, ResidualFormat format, float pack_scale, float reduce_scale, int rank,
                 c10::Device device);

  Residual of_pack() const { return {format_, static_cast<std::byte*>(packed_.data_ptr()), layout_.padded_numel()}; }
  Residual of_reduce() const { return {format_, static_cast<std::byte*>(reduced_.data_ptr()), reduced_numel()}; }
  std::vector<at::Tensor> storages() const { return {packed_, reduced_}; }

  // fp32 [layout.lossy_numel], in the unit of gradients: what this rank would have to add to its gradient now for
  // nothing to be left out. What it has left out of means counts once for each rank, since its gradient is one of them.
  at::Tensor values() const;
  // Makes `values` (as above) all that is left out.
  void set_values(const at::Tensor& values);
  // Of an fp32 residual: what the next pack adds to all it packs.
  void fill_packed(float value) { packed_.view(at::kFloat).fill_(value); }
  // float64 scalar: ‖what pack has left out‖₂, in the unit of gradients.
  at::Tensor packed_norm() const;

 private:
  int64_t reduced_numel() const { return layout_.num_chunks * layout_.part.lossy_numel; }

  const BucketLayout layout_;
  const ResidualFormat format_;
  const float pack_scale_, reduce_scale_;
  const int rank_;
  at::Tensor packed_, reduced_;  // uint8
};

}  // namespace fusedcomm
