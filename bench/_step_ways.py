"""The ways of synchronizing that bench/step.py compares."""

import dataclasses
from collections.abc import Callable

import torch
from lib.ways import stock_bf16_hook
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

MAX_NORM = 1.0

DDP, DDP_TUNED, STOCK = "ddp", "ddp tuned", "ddp, torch's bf16 hook"
HOOK, REDUCER, REDUCER_FP32 = "fusedcomm hook, bf16", "fusedcomm reducer, bf16", "fusedcomm reducer, fp32"
REDUCER_FUSED = "fusedcomm reducer, optimizer clips"

Front = fusedcomm.Handle | fusedcomm.GradReducer | None
"""What synchronizes, if it is fusedcomm's."""


def clip_by_torch(parameters: list[nn.Parameter], front: Front, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Clips the gradients' norm to MAX_NORM. Returns the norm before."""
    return torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def clip_by_front(parameters: list[nn.Parameter], front: Front, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """As clip_by_torch(); unpack has added up the squares."""
    return front.clip_grad_norm_(MAX_NORM)


def clip_by_optimizer(parameters: list[nn.Parameter], front: Front, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """As clip_by_front(), and the optimizer multiplies while it reads the gradients."""
    return front.clip_grad_norm_(MAX_NORM, optimizer=optimizer)


def torchs_scaler(front: Front) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu")


def scaler_of_front(front: Front) -> torch.amp.GradScaler:
    return fusedcomm.GradScaler(front, "cpu")


@dataclasses.dataclass(frozen=True)
class Way:
    name: str
    make: Callable[[nn.Module, float], tuple[nn.Module, Front]]
    """Takes a model and the tuned bucket size in MiB. Returns the module to call, and what synchronizes."""
    roundings: int
    """How often a value is rounded to bf16 on its way; 0: the mean has the bits of DDP's."""
    clip: Callable[[list[nn.Parameter], Front, torch.optim.Optimizer], torch.Tensor] = clip_by_torch
    make_scaler: Callable[[Front], torch.amp.GradScaler] = torchs_scaler


def _ddp(model: nn.Module, cap_mib: float) -> tuple[nn.Module, Front]:
    return DistributedDataParallel(model), None


def _tuned(model: nn.Module, cap_mib: float) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=cap_mib)


def _ddp_tuned(model: nn.Module, cap_mib: float) -> tuple[nn.Module, Front]:
    return _tuned(model, cap_mib), None


def _stock(model: nn.Module, cap_mib: float) -> tuple[nn.Module, Front]:
    ddp = _tuned(model, cap_mib)
    ddp.register_comm_hook(None, stock_bf16_hook)
    return ddp, None


def _hook(model: nn.Module, cap_mib: float) -> tuple[nn.Module, Front]:
    ddp = _tuned(model, cap_mib)
    return ddp, fusedcomm.attach(ddp, "bf16", quiet=True)


def _reducer(wire: str) -> Callable[[nn.Module, float], tuple[nn.Module, Front]]:
    return lambda model, cap_mib: (model, fusedcomm.GradReducer(model, wire, bucket_mib=cap_mib, quiet=True))


def ways(fused: bool = True) -> list[Way]:
    """The ways to compare. `fused`: also with an optimizer that clips while it steps, as torch's fused ones can."""
    found = [
        Way(DDP, _ddp, 0),
        Way(DDP_TUNED, _ddp_tuned, 0),
        Way(STOCK, _stock, 2),
        Way(HOOK, _hook, 1, clip_by_front, scaler_of_front),
        Way(REDUCER, _reducer("bf16"), 1, clip_by_front, scaler_of_front),
        Way(REDUCER_FP32, _reducer("fp32"), 0, clip_by_front, scaler_of_front),
    ]
    return found + ([Way(REDUCER_FUSED, _reducer("bf16"), 1, clip_by_optimizer, scaler_of_front)] if fused else [])
