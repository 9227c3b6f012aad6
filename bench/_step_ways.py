"""The ways of synchronizing that bench/step.py compares, with the memory that each reads and writes."""

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


@dataclasses.dataclass(frozen=True)
class Pass:
    """What one element costs on one of two ranks: bytes that code of torch, gloo or fusedcomm reads and writes."""

    what: str
    read_nbytes: int
    written_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.read_nbytes + self.written_nbytes


def ring(element_nbytes: int) -> Pass:
    """gloo's all-reduce between two ranks. Each half of the elements: send and receive into a spare buffer, add that to
    the own half; then send the sum and receive the other one in place. Reads the own half, the received and the own
    one, and the sum; writes the received half, the sum and the other sum."""
    return Pass("all-reduce", 4 * element_nbytes // 2, 3 * element_nbytes // 2)


INTO_BUCKET = Pass("copy into DDP's bucket", 4, 4)
OUT_OF_BUCKET = Pass("copy out of DDP's bucket", 4, 4)
# One read of the codes to send them, one write of the peer's.
EXCHANGE_BF16 = Pass("exchange codes", 2, 2)
PACK_BF16 = Pass("pack", 4, 2)
# The kernel reads the codes of both ranks and writes the mean.
SUM_BF16 = Pass("sum and unpack", 2 * 2, 4)


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


# torch.nn.utils.clip_grad_norm_ reads the gradients for their norm, and multiplies them always, also by 1.
CLIP_TORCH = (Pass("norm", 4, 0), Pass("multiply", 4, 4))
# GradScaler.unscale_ multiplies the gradients and looks for NaN and Inf.
UNSCALE_TORCH = (Pass("unscale", 4, 4),)
# Unpack has a tile of the gradients in the nearest cache when it adds up their squares, and multiplies it there.
SQUARES = Pass("squares", 4, 0)
UNSCALE_IN_UNPACK = (Pass("unscale in unpack", 4, 4),)


@dataclasses.dataclass(frozen=True)
class Way:
    name: str
    make: Callable[[nn.Module, float], tuple[nn.Module, Front]]
    """Takes a model and the tuned bucket size in MiB. Returns the module to call, and what synchronizes."""
    roundings: int
    """How often a value is rounded to bf16 on its way; 0: the mean has the bits of DDP's."""
    sync: tuple[Pass, ...]
    """From the gradient that autograd has written to the mean."""
    clip: Callable[[list[nn.Parameter], Front, torch.optim.Optimizer], torch.Tensor] = clip_by_torch
    clip_passes: tuple[Pass, ...] = CLIP_TORCH
    make_scaler: Callable[[Front], torch.amp.GradScaler] = torchs_scaler
    unscale_passes: tuple[Pass, ...] = UNSCALE_TORCH

    def traffic(self, amp: bool) -> dict[str, int]:
        """Bytes read and written for each element."""
        sync, clip = (sum(part.nbytes for part in passes) for passes in (self.sync, self.clip_passes))
        unscale = sum(part.nbytes for part in self.unscale_passes) if amp else 0
        return {"sync_nbytes": sync, "clip_nbytes": clip, "unscale_nbytes": unscale}


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


# What fusedcomm's norm and loss scale cost, in place of torch's.
EPILOGUE = {"clip": clip_by_front, "make_scaler": scaler_of_front, "unscale_passes": UNSCALE_IN_UNPACK}
CLIP = (SQUARES, Pass("multiply", 4, 4))


def ways(fused: bool = True) -> list[Way]:
    """The ways to compare. `fused`: also with an optimizer that clips while it steps, as torch's fused ones can."""
    of_hook, of_reducer = (INTO_BUCKET, PACK_BF16, EXCHANGE_BF16, SUM_BF16), (PACK_BF16, EXCHANGE_BF16, SUM_BF16)
    of_stock = (INTO_BUCKET, Pass("to bf16", 4, 2), Pass("divide", 2, 2), ring(2), Pass("to fp32", 2, 4))
    of_fp32 = (Pass("pack", 4, 4), ring(4), Pass("unpack", 4, 4))
    found = [
        Way(DDP, _ddp, 0, (INTO_BUCKET, ring(4), OUT_OF_BUCKET)),
        Way(DDP_TUNED, _ddp_tuned, 0, (INTO_BUCKET, ring(4))),
        Way(STOCK, _stock, 2, of_stock),
        Way(HOOK, _hook, 1, of_hook, clip_passes=CLIP, **EPILOGUE),
        Way(REDUCER, _reducer("bf16"), 1, of_reducer, clip_passes=CLIP, **EPILOGUE),
        Way(REDUCER_FP32, _reducer("fp32"), 0, of_fp32, clip_passes=CLIP, **EPILOGUE),
    ]
    if fused:
        clips = {**EPILOGUE, "clip": clip_by_optimizer}
        found.append(Way(REDUCER_FUSED, _reducer("bf16"), 1, of_reducer, clip_passes=(SQUARES,), **clips))
    return found
