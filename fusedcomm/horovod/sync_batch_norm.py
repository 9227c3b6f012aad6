"""Batch normalisation over the batches of all ranks."""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import fusedcomm.horovod.async_ops as async_ops
from fusedcomm.horovod.checks import Sum
from fusedcomm.horovod.handles import synchronize
from fusedcomm.horovod.world import world


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm's arithmetic with the sums over this job's ranks. Input: (N, C) or (N, C, …), on any
    device; the ranks' N may differ, and be 0. With one rank, and in eval mode with running statistics, plain batch
    norm."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the input's shape. Raises ValueError for fewer than 2 dimensions."""
        self._check_input_dim(input)
        if world().size == 1 or not (self.training or not self.track_running_stats):
            return super().forward(input)
        output, mean, var, count = _Normalise.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._track(mean, var, count)
        return output

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


def _summed(*values: torch.Tensor) -> list[torch.Tensor]:
    """Sums of one-dimensional tensors over all ranks, in one message."""
    packed = synchronize(async_ops.allreduce_async(torch.cat(values), op=Sum))
    return list(packed.split([each.numel() for each in values]))


class _Normalise(torch.autograd.Function):
    """Returns (output, mean, biased variance, number of values of a channel), the last three over all ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, ...]:
        # Sums in fp32 at least: a channel may have millions of values.
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = [0, *range(2, input.dim())]
        num_values = wide.new_tensor([input.numel() // input.shape[1] if input.shape[1] else 0])
        total, count = _summed(wide.sum(dims), num_values)
        mean = total / count
        centred = wide - _per_channel(mean, wide)
        # Deviations from the mean of all ranks: sums of squares minus squared sums would cancel.
        (squares,) = _summed(centred.square().sum(dims))
        var = squares / count
        inverse = (var + eps).rsqrt()
        normalised = centred * _per_channel(inverse, wide)
        output = normalised
        if weight is not None:
            output = output * _per_channel(weight.to(wide.dtype), wide)
        if bias is not None:
            output = output + _per_channel(bias.to(wide.dtype), wide)
        ctx.save_for_backward(normalised, inverse, weight, count)
        ctx.has_bias = bias is not None
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(input.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple:
        normalised, inverse, weight, count = ctx.saved_tensors
        wide = grad.to(normalised.dtype)
        dims = [0, *range(2, grad.dim())]
        own_sum, own_dot = wide.sum(dims), (wide * normalised).sum(dims)
        total, dot = _summed(own_sum, own_dot)
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        centred = wide - _per_channel(total / count, wide) - normalised * _per_channel(dot / count, wide)
        grad_input = (centred * _per_channel(scale, wide)).to(grad.dtype)
        # Gradients of weight and bias are this rank's: the optimizer reduces them like any other.
        grad_weight = own_dot.to(weight.dtype) if weight is not None else None
        grad_bias = own_sum.to(grad.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return grad_input, grad_weight, grad_bias, None
