"""The ways of synchronising gradients that bench/ddp_step.py compares: ours, DDP's own, and the hooks torch ships.

Peers run as they ship, but for what they cannot run without:

- DDP refuses the stock bf16 hook on gloo by its name alone, so it has another.
- PowerSGD compresses nothing in its first 1,000 steps; it is told to begin earlier.
- PowerSGD and the quantisation hooks wait for a collective inside the callback of another. On gloo a callback runs on
  one of the group's two threads, so two buckets under way block both and the step hangs, whatever the group's timeout
  (and with more threads, ranks may issue their collectives in different orders). They get one bucket.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback

DEFAULT, TUNED = "ddp default", "ddp tuned"
COMPUTE = "compute alone"
ONE_BUCKET_MB = 1 << 20
FIRST_COMPRESSED_STEP = 3
"""Of PowerSGD, counted from 0: the first whose result is checked."""

# Relative error of a mean of normal values, with a margin of two or more over what the roundings to the wire and back
# make of it. Loose enough for any rounding, tight enough for a lost scale, element or rank.
TOLERANCES = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 1e-2, "int8": 3e-2, "fp8": 1e-1, "int4": 3e-1}


@dataclasses.dataclass(frozen=True)
class Way:
    name: str
    register: Callable[[DistributedDataParallel, dist.ProcessGroup], object]
    """What it returns is kept as long as the module."""
    tolerance: float
    cap_mb: float | None = None
    """bucket_cap_mb; None: DDP's own."""
    bucket_views: bool = True
    """gradient_as_bucket_view, which DDP has off by default: its gradients need no copy out of the buckets."""
    max_rank: int | None = None
    """It can only send gradients of this rank, as matrices; None: any."""

    @property
    def chooses(self) -> bool:
        """In its first steps, which takes long; so it has DDP's own bucket size."""
        return self.name.startswith("fusedcomm auto")

    @property
    def is_peer(self) -> bool:
        """Where it fails, that is a finding and not an error of ours."""
        return not self.name.startswith(("fusedcomm", "ddp"))


def ways_by_name() -> dict[str, Way]:
    ways = [
        Way(DEFAULT, lambda ddp, group: None, TOLERANCES["fp32"], bucket_views=False),
        Way("python fp16 hook", _python(default_hooks.fp16_compress_hook), TOLERANCES["fp16"]),
        Way("c++ fp16 hook", _builtin_fp16, TOLERANCES["fp16"]),
        Way("python bf16 hook", _python(_stock_bf16_hook), TOLERANCES["bf16"]),
        Way("powersgd rank 1", _power_sgd(1), 1e-3, ONE_BUCKET_MB, max_rank=1),
        Way("powersgd rank 2", _power_sgd(2), 1e-3, ONE_BUCKET_MB, max_rank=2),
        # Codes of eight bits between the least and the greatest value of a bucket, or of 512 elements.
        Way(
            "pertensor hook", _python(quantization_hooks.quantization_pertensor_hook), TOLERANCES["int8"], ONE_BUCKET_MB
        ),
        Way(
            "perchannel hook",
            _python(quantization_hooks.quantization_perchannel_hook),
            TOLERANCES["int8"],
            ONE_BUCKET_MB,
        ),
    ]
    for wire in ("bf16", "fp16", "int8", "fp8", "int4"):
        ways.append(Way(f"fusedcomm {wire}", _ours(Config(wire)), TOLERANCES[wire]))
    # What sum="auto" takes of more than two ranks, and could of two.
    ways.append(Way("fusedcomm bf16 direct", _ours(Config("bf16", "direct")), TOLERANCES["bf16"]))
    for wire in ("int8", "int4"):
        ways.append(Way(f"fusedcomm {wire} two-shot", _ours(Config(wire, "two-shot")), TOLERANCES[wire]))
    # What they choose from has exact wires, too.
    ways.append(Way("fusedcomm auto", _ours(fusedcomm.Auto()), TOLERANCES["bf16"]))
    ways.append(Way("fusedcomm auto int8", _ours(fusedcomm.Auto(("fp32", "bf16", "int8"))), TOLERANCES["int8"]))
    for wire in ("bf16", "int8", "int4"):
        # The same as one level where a host has one rank.
        ways.append(Way(f"fusedcomm {wire} by host", _ours(Config(wire, hosts="auto")), TOLERANCES[wire]))
    # What earlier steps left out is in the result too.
    ways.append(Way("fusedcomm int4 feedback", _ours(Config("int4", feedback=Feedback())), 1.5 * TOLERANCES["int4"]))
    return {way.name: way for way in ways}


def with_cap(way: Way, cap_mb: float | None, name: str | None = None) -> Way:
    return dataclasses.replace(way, name=name or way.name, cap_mb=cap_mb)


def tuned(default: Way) -> Way:
    return dataclasses.replace(default, name=TUNED, bucket_views=True)


def _python(hook: Callable) -> Callable[[DistributedDataParallel, dist.ProcessGroup], None]:
    return lambda ddp, group: ddp.register_comm_hook(group, hook)


def _stock_bf16_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(group, bucket)


def _builtin_fp16(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def _power_sgd(rank: int) -> Callable[[DistributedDataParallel, dist.ProcessGroup], None]:
    def register(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        state = powerSGD_hook.PowerSGDState(group, rank, start_powerSGD_iter=FIRST_COMPRESSED_STEP)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def _ours(config: Config | fusedcomm.Auto) -> Callable[[DistributedDataParallel, dist.ProcessGroup], fusedcomm.Handle]:
    return lambda ddp, group: fusedcomm.attach(ddp, config, quiet=True)
