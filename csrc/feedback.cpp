#include "feedback.h"

#include <cmath>

namespace fusedcomm {
namespace {

at::Tensor load(const at::Tensor& bytes, ResidualFormat format, int64_t block_numel, int64_t numel) {
  switch (format) {
    case ResidualFormat::kFp32:
      return bytes.view(at::kFloat).clone();
    case ResidualFormat::kBf16:
      return bytes.view(at::kBFloat16).to(at::kFloat);
    default: {
      const at::Tensor scales = bytes.slice(0, residual_scale_offset(numel)).view(at::kFloat);
      return bytes.narrow(0, 0, numel)
          .view(at::kChar)
          .to(at::kFloat)
          .view({-1, block_numel})
          .mul_(scales.unsqueeze(1))
          .view(-1);
    }
  }
}

void store(const at::Tensor& bytes, const at::Tensor& values, ResidualFormat format, int64_t block_numel) {
  switch (format) {
    case ResidualFormat::kFp32:
      bytes.view(at::kFloat).copy_(values);
      return;
    case ResidualFormat::kBf16:
      bytes.view(at::kBFloat16).copy_(values);
      return;
    default: {
      constexpr double kGreatest = 127, kLeastAbsmax = 0x1p-100;  // of reference.py
      const at::Tensor blocks = values.view({-1, block_numel});
      const at::Tensor absmax = blocks.abs().amax(1, /*keepdim=*/true);
      const at::Tensor scales = at::where(absmax >= kLeastAbsmax, absmax / kGreatest, 0.0);
      const at::Tensor codes = at::where(scales > 0, blocks / scales, 0.0).round().clamp(-kGreatest, kGreatest);
      bytes.narrow(0, 0, values.numel()).view(at::kChar).copy_(codes.view(-1));
      bytes.slice(0, residual_scale_offset(values.numel())).view(at::kFloat).copy_(scales.view(-1));
    }
  }
}

// Undoes the rotation of reference.py.
at::Tensor unrotated(const at::Tensor& values) {
  at::Tensor hadamard = at::ones({1, 1});
  while (hadamard.size(0) < kRotationNumel) {
    hadamard = at::cat({at::cat({hadamard, hadamard}, 1), at::cat({hadamard, -hadamard}, 1)}, 0);
  }
  at::Tensor signs = at::empty({kRotationNumel});
  for (int64_t i = 0; i < kRotationNumel; ++i) signs[i] = kRotationSigns >> i & 1U ? -1.0 : 1.0;
  const at::Tensor inverse = (hadamard * signs / static_cast<double>(kRotationNumel)).to(values.device());
  return values.view({-1, kRotationNumel}).matmul(inverse).view(-1);
}

at::Tensor zeros(ResidualFormat format, const BucketLayout& layout, int64_t numel, c10::Device device) {
  const int64_t nbytes = residual_nbytes(format, layout.block_numel, numel);
  return at::zeros({nbytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace

StreamResidual::StreamResidual(const BucketLayout& layout, ResidualFormat format, float pack_scale, float reduce_scale,
                               int rank, c10::Device device)
    : layout_(layout),
      format_(format),
      pack_scale_(pack_scale),
      reduce_scale_(reduce_scale),
      rank_(rank),
      packed_(zeros(format, layout, layout.padded_numel(), device)),
      reduced_(zeros(format, layout, reduced_numel(), device)) {}

at::Tensor StreamResidual::values() const {
  at::Tensor values = load(packed_, format_, layout_.block_numel, layout_.padded_numel());
  at::Tensor of_means = load(reduced_, format_, layout_.block_numel, reduced_numel());
  if (layout_.rotated) of_means = unrotated(of_means);
  const int64_t part_numel = layout_.part.lossy_numel;
  for (int64_t chunk = 0; chunk < layout_.num_chunks; ++chunk) {
    const Range range = layout_.lossy_range(chunk, rank_);
    values.narrow(0, range.begin, range.numel())
        .add_(of_means.narrow(0, chunk * part_numel, range.numel()), 1 / static_cast<double>(reduce_scale_));
  }
  return values.narrow(0, 0, layout_.lossy_numel).div_(pack_scale_);
}

void StreamResidual::set_values(const at::Tensor& values) {
  const int64_t padding = layout_.padded_numel() - layout_.lossy_numel;
  store(packed_, at::constant_pad_nd(values.mul(pack_scale_), {0, padding}), format_, layout_.block_numel);
  reduced_.zero_();
}

at::Tensor StreamResidual::packed_norm() const {
  const at::Tensor values = load(packed_, format_, layout_.block_numel, layout_.padded_numel());
  return at::linalg_vector_norm(values, 2, {}, false, at::kDouble).div_(pack_scale_);
}

}  // namespace fusedcomm
