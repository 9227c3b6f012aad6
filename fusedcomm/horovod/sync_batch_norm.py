"""Batch normalisation over the batches of all ranks."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fusedcomm.horovod.checks import Sum
from fusedcomm.horovod.ops import allreduce
from fusedcomm.horovod.world import world


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm's arithmetic with the sums over this job's ranks. Input: (N, C) or (N, C, …), on any
    device; the ranks' N may differ, and be 0. With one rank, and in eval mode with running statistics, plain batch
    norm. Gradients of weight and bias are this rank's: the optimizer reduces them like any other."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the input's shape. Raises ValueError for fewer than 2 dimensions."""
        self._check_input_dim(input)
        if world().size == 1 or not (self.training or not self.track_running_stats):
            return super().forward(input)
        # Sums in fp32 at least: a channel may have millions of values.
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, input.dim())]
        num_values = wide.new_tensor([input.numel() // input.shape[1] if input.shape[1] else 0])
        # An allreduce's gradient is the sum of the ranks' gradients.
        total, count = allreduce(torch.cat([wide.sum(dims), num_values]), op=Sum).split([input.shape[1], 1])
        mean = total / count
        # Deviations from the mean of all ranks: sums of squares minus squared sums would cancel.
        centred = wide - _per_channel(mean, wide)
        var = allreduce(centred.square().sum(dims), op=Sum) / count
        if self.training and self.track_running_stats:
            self._track(mean, var, count)
        scale = (var + self.eps).rsqrt()
        if self.weight is None:
            return (centred * _per_channel(scale, wide)).to(input.dtype)
        output = centred * _per_channel(scale * self.weight.to(wide.dtype), wide)
        return (output + _per_channel(self.bias.to(wide.dtype), wide)).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        self.num_batches_tracked += 1
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`values`, of shape (channels,), so that it broadcasts against `like`, of shape (N, channels, …)."""
    return values.view(1, -1, *[1] * (like.dim() - 2))
