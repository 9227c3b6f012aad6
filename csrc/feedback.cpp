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
                               const Place& place, c10::Device device)
    : layout_(layout),
      format_(format),
      pack_scale_(pack_scale),
      reduce_scale_(reduce_scale),
      place_(place),
      num_first_parts_(place.on_two_levels() ? place.num_hosts : layout.num_parts),
      first_(zeros(format, layout, first_numel(), device)),
      second_(zeros(format, layout, second_numel(), device)) {}

Range StreamResidual::first_range(int64_t chunk) const {
  const int64_t first = place_.on_two_levels() ? place_.local_rank * place_.num_hosts : 0;
  return {layout_.lossy_range(chunk, first).begin, layout_.lossy_range(chunk, first + num_first_parts_ - 1).end};
}

at::Tensor StreamResidual::values() const {
  const at::Tensor of_first = load(first_, format_, layout_.block_numel, first_numel());
  at::Tensor of_means = load(second_, format_, layout_.block_numel, second_numel());
  if (layout_.rotated) of_means = unrotated(of_means);
  const int64_t part_numel = layout_.part.lossy_numel;
  at::Tensor values = at::zeros({layout_.lossy_numel}, of_first.options());
  for (int64_t chunk = 0; chunk < layout_.num_chunks; ++chunk) {
    const Range of_chunk = first_range(chunk), of_part = layout_.lossy_range(chunk, place_.part());
    values.narrow(0, of_chunk.begin, of_chunk.numel())
        .copy_(of_first.narrow(0, chunk * num_first_parts_ * part_numel, of_chunk.numel()));
    values.narrow(0, of_part.begin, of_part.numel())
        .add_(of_means.narrow(0, chunk * part_numel, of_part.numel()), 1 / static_cast<double>(reduce_scale_));
  }
  return values.div_(pack_scale_);
}

at::Tensor StreamResidual::set_values(const at::Tensor& values) {
  at::Tensor rest = values.clone();
  at::Tensor of_first = at::zeros({first_numel()}, values.options());
  const int64_t part_numel = layout_.part.lossy_numel;
  for (int64_t chunk = 0; chunk < layout_.num_chunks; ++chunk) {
    const Range range = first_range(chunk);
    of_first.narrow(0, chunk * num_first_parts_ * part_numel, range.numel())
        .copy_(values.narrow(0, range.begin, range.numel()));
    rest.narrow(0, range.begin, range.numel()).zero_();
  }
  store(first_, of_first.mul_(pack_scale_), format_, layout_.block_numel);
  second_.zero_();
  return place_.on_two_levels() ? rest : at::Tensor();
}

at::Tensor StreamResidual::first_norm() const {
  const at::Tensor values = load(first_, format_, layout_.block_numel, first_numel());
  return at::linalg_vector_norm(values, 2, {}, false, at::kDouble).div_(pack_scale_);
}

}  // namespace fusedcomm
