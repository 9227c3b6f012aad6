// Error feedback's residuals of one bucket's stream on this rank: what its two encoders have left out so far. The first
// is pack, which has every part; where sums have two levels it is the sum over the host's ranks, which has those parts
// that this rank sums. The second is the sum that has this rank's own part.
//
// They lie in the order of the stream, as encoders want them; whoever keeps them by parameter takes and sets values.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "codec/args.h"
#include "transport/transport.h"

namespace fusedcomm {

class StreamResidual {
 public:
  // All zeros. reduce_scale, place: of the two-shot sum, in which this rank encodes the parts of its place.
  // of_first_only: there is no residual of the second, since nothing is encoded twice or only the first is looked at.
  StreamResidual(const BucketLayout& layout, ResidualFormat format, float pack_scale, float reduce_scale,
                 const Place& place, c10::Device device, bool of_first_only = false);

  Residual of_first() const { return {format_, static_cast<std::byte*>(first_.data_ptr()), first_numel()}; }
  Residual of_second() const { return {format_, static_cast<std::byte*>(second_.data_ptr()), second_numel()}; }
  std::vector<at::Tensor> storages() const { return {first_, second_}; }

  // fp32 [numel], the stream's elements from `begin` on, in the unit of gradients: what this rank would have to add to
  // its gradient now for nothing to be left out. What it has left out of means counts once for each rank, since its
  // gradient is one of them.
  at::Tensor values(int64_t begin, int64_t numel) const;
  // Makes `values` ([layout.lossy_numel], as above) all that is left out, but for what this rank's encoders never meet:
  // that is returned, as above; undefined if it is nothing.
  at::Tensor set_values(const at::Tensor& values);
  // Of an fp32 residual: what the first encoder adds next time to all it encodes.
  void fill_first(float value) { first_.fill_(value); }
  // float64 scalar: ‖what the first encoder has left out‖₂, in the unit of gradients.
  at::Tensor first_norm() const;

 private:
  int64_t first_numel() const { return layout_.num_chunks * num_first_parts_ * layout_.part.lossy_numel; }
  int64_t second_numel() const { return layout_.num_chunks * layout_.part.lossy_numel; }
  // What the second encoder has left out, as if it had not been rotated.
  at::Tensor of_means(int64_t begin, int64_t numel) const;
  // The stream's elements that the first encoder has of a chunk.
  Range first_range(int64_t chunk) const;

  const BucketLayout layout_;
  const ResidualFormat format_;
  const float pack_scale_, reduce_scale_;
  const Place place_;
  const int64_t num_first_parts_;  // of a chunk, that the first encoder has
  const bool has_second_;
  at::Tensor first_, second_;  // in format_
};

}  // namespace fusedcomm
