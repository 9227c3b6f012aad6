#include "gradients/residuals.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "devices/stream_device.h"

namespace fusedcomm {
namespace {

// Residuals are state: they are computed in their own dtype and without autograd, whatever the model is computed in.
class NoAutocast {
 private:
  const at::NoGradGuard no_grad_;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
};

// `value` as a tensor to divide `like` by. By a number, or by a tensor on the CPU without dimensions, CUDA's kernels do
// not divide: they multiply by its reciprocal (is_cpu_scalar in torch's BinaryDivTrueKernel.cu), which changes the last
// bit of some quotients. The reference, the CPU codec and the device kernels divide.
at::Tensor divisor(double value, const at::Tensor& like) {
  return at::full(std::vector<int64_t>(static_cast<size_t>(like.dim()), 1), value, like.options());
}

at::Tensor zeros(int64_t numel, c10::Device device) {
  return at::zeros({numel}, at::TensorOptions().dtype(at::kFloat).device(device));
}

// A residual may be read on another stream than that it was made on, FSDP2's for example, and released soon after.
void will_read(const at::Tensor& residual) {
  if (!residual.is_cpu()) residual.record_stream(current_stream_of(residual.device()));
}

}  // namespace

ResidualBuffer::ResidualBuffer(const BucketLayout& layout, float reduce_scale, const Place& place, c10::Device device,
                               bool of_first_only)
    : layout_(layout),
      reduce_scale_(reduce_scale),
      place_(place),
      num_first_parts_(place.on_two_levels() ? place.num_hosts : layout.num_parts),
      has_second_(!of_first_only),
      first_(zeros(first_numel(), device)),
      second_(zeros(has_second_ ? second_numel() : 0, device)) {}

Range ResidualBuffer::first_range(int64_t chunk) const {
  const int64_t first = place_.on_two_levels() ? place_.local_rank * place_.num_hosts : 0;
  return {layout_.lossy_range(chunk, first).begin, layout_.lossy_range(chunk, first + num_first_parts_ - 1).end};
}

void ResidualBuffer::weigh_first(double share) {
  if (share == 0 || share == first_share_) return;
  const NoAutocast no_autocast;
  first_.mul_(share / first_share_);
  first_share_ = share;
}

void ResidualBuffer::weigh_second(double factor) {
  if (factor == 0 || factor == second_factor_) return;
  const NoAutocast no_autocast;
  second_.mul_(second_factor_ / factor);
  second_factor_ = factor;
}

void ResidualBuffer::weigh_second(const at::Tensor& factor) {
  const NoAutocast no_autocast;
  if (!second_on_device_.defined()) second_on_device_ = at::full_like(factor, second_factor_);
  const at::Tensor now = at::where(factor > 0, factor, second_on_device_);
  second_.mul_(second_on_device_ / now);
  second_on_device_ = now;
}

at::Tensor ResidualBuffer::of_first(int64_t begin, int64_t numel) const {
  const at::Tensor values = first_.narrow(0, begin, numel);
  return first_share_ == 1 ? values : values / divisor(first_share_, values);
}

at::Tensor ResidualBuffer::values(int64_t begin, int64_t numel) const {
  const NoAutocast no_autocast;
  for (const at::Tensor& residual : storages()) will_read(residual);
  const int64_t part_numel = layout_.part.lossy_numel, chunk_numel = layout_.num_parts * part_numel;
  const Range wanted{begin, begin + numel};
  const auto overlap = [&wanted](const Range& range) {
    return Range{std::max(wanted.begin, range.begin), std::min(wanted.end, range.end)};
  };
  at::Tensor values = at::zeros({numel}, first_.options().dtype(at::kFloat));
  if (numel == 0) return values;
  // By 1 no bit changes.
  const at::Tensor factor = second_on_device_.defined() ? second_on_device_ : divisor(second_factor_, values);
  for (int64_t chunk = wanted.begin / chunk_numel; chunk * chunk_numel < wanted.end; ++chunk) {
    const Range of_chunk = first_range(chunk), first = overlap(of_chunk);
    if (first.numel() > 0) {
      const int64_t at = chunk * num_first_parts_ * part_numel + first.begin - of_chunk.begin;
      values.narrow(0, first.begin - begin, first.numel()).add_(of_first(at, first.numel()));
    }
    if (!has_second_) continue;
    const Range of_part = layout_.lossy_range(chunk, place_.part()), second = overlap(of_part);
    if (second.numel() > 0) {
      const int64_t at = chunk * part_numel + second.begin - of_part.begin;
      values.narrow(0, second.begin - begin, second.numel())
          .add_(second_.narrow(0, at, second.numel()) * factor / divisor(reduce_scale_, values));
    }
  }
  return values;
}

at::Tensor ResidualBuffer::set_values(const at::Tensor& values) {
  const NoAutocast no_autocast;
  first_share_ = second_factor_ = 1;
  second_on_device_ = at::Tensor();
  at::Tensor rest = values.clone();
  at::Tensor of_first = at::zeros({first_numel()}, values.options());
  const int64_t part_numel = layout_.part.lossy_numel;
  for (int64_t chunk = 0; chunk < layout_.num_chunks; ++chunk) {
    const Range range = first_range(chunk);
    of_first.narrow(0, chunk * num_first_parts_ * part_numel, range.numel())
        .copy_(values.narrow(0, range.begin, range.numel()));
    rest.narrow(0, range.begin, range.numel()).zero_();
  }
  first_.copy_(of_first);
  second_.zero_();
  return place_.on_two_levels() ? rest : at::Tensor();
}

at::Tensor ResidualBuffer::own_first() const {
  return first_.view({layout_.num_chunks, num_first_parts_, layout_.part.lossy_numel})
      .select(1, place_.on_two_levels() ? place_.host : place_.part());
}

std::optional<EncoderResiduals> ResidualBuffer::of_encoders() const {
  const bool is_known = is_unscaled();
  if (is_known && !has_second_) return std::nullopt;
  const NoAutocast no_autocast;
  for (const at::Tensor& residual : storages()) will_read(residual);
  const double factor = second_on_device_.defined() ? second_on_device_.item<double>() : second_factor_;
  const at::Tensor first = is_known ? own_first() : first_;
  return EncoderResiduals(first.flatten().clone(), second_.clone(), first_share_, factor);
}

bool ResidualBuffer::take(const EncoderResiduals& of_encoders) {
  const NoAutocast no_autocast;
  const auto& [first, second, share, factor] = of_encoders;
  const at::Tensor own = first.numel() == first_.numel() ? first_ : own_first();
  if (first.numel() != own.numel() || second.numel() != second_.numel()) return false;
  own.copy_(first.view_as(own));
  second_.copy_(second);
  first_share_ = share;
  second_factor_ = factor;
  return true;
}

}  // namespace fusedcomm
