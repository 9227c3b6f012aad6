"""The ways of synchronizing gradients that bench/ddp_step.py compares: fusedcomm's front ends, DDP alone, and torch's
own hooks.

Torch's hooks run unchanged, except where they could not run at all:

- DDP refuses the stock bf16 hook on gloo because of its name, so it is registered under another name.
- PowerSGD compresses nothing in its first 1,000 steps. Here it begins earlier.
- PowerSGD and the quantization hooks wait for a collective inside the callback of another. On gloo a callback runs on
  one of the group's two threads. Two buckets under way therefore block both threads, and the step hangs, whatever the
  group's timeout. (With more threads, ranks may issue their collectives in different orders.) They get one bucket.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
import fusedcomm.horovod as hvd
from fusedcomm.config import Config, Feedback

DEFAULT, TUNED = "ddp default", "ddp tuned"
COMPUTE = "compute alone"
ONE_BUCKET_MB = 1 << 20
FIRST_COMPRESSED_STEP = 3
"""The first step in which PowerSGD compresses, counted from 0. It is also the first step whose result is checked."""

# Greatest relative error of a mean of normal values that passes the check: at least twice the error that rounding to
# the wire causes. A lost scale, element or rank causes a greater error.
TOLERANCES = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 1e-2, "int8": 3e-2, "fp8": 1e-1, "int4": 3e-1}


@dataclasses.dataclass(frozen=True)
class Way:
    name: str
    register: Callable[[DistributedDataParallel, dist.ProcessGroup], object] | None
    """Registers the way on a module with its process group. The result is kept as long as the module. None: the way has
    no DDP."""
    tolerance: float
    cap_mb: float | None = None
    """bucket_cap_mb; None: DDP's own, which is the reducer's, too."""
    bucket_views: bool = True
    """gradient_as_bucket_view, off by default in DDP. With it gradients need no copy out of the buckets."""
    max_rank: int | None = None
    """The greatest matrix rank of gradients that the way can send without error; None: it can send any gradients."""
    reducer: Config | None = None
    """What fusedcomm.GradReducer, without DDP, is given; None: the way has no reducer."""
    members: bool = False
    """Whether the reducer's ranks are those of a fusedcomm.Members, of whom none is lost."""
    compression: str = ""
    """A name of hvd.Compression: fusedcomm.horovod's DistributedOptimizer synchronizes, without DDP. Empty: another."""

    def wrap(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup
    ) -> tuple[nn.Module, torch.optim.Optimizer, object]:
        """(the module to call in place of `module`, the optimizer to step, what is to be kept as long as they). All
        ranks must have the same weights."""
        if self.compression:
            hvd.init()
            # Several optimizers live in this process, so each has its own names.
            named = [(f"{self.name}/{name}", parameter) for name, parameter in module.named_parameters()]
            compression = getattr(hvd.Compression, self.compression)
            return module, hvd.DistributedOptimizer(optimizer, named, compression), None
        if self.members:
            members = fusedcomm.Members()
            held = fusedcomm.GradReducer(module, self.reducer, members=members, quiet=True)
            members.carry(optimizer=optimizer)
            return module, optimizer, held
        if self.reducer is not None:
            size = {} if self.cap_mb is None else {"bucket_mib": self.cap_mb}
            held = fusedcomm.GradReducer(module, self.reducer, process_group=group, quiet=True, **size)
            return module, optimizer, held
        ddp = DistributedDataParallel(
            module,
            process_group=group,
            init_sync=False,  # there is nothing to broadcast
            bucket_cap_mb=self.cap_mb,
            gradient_as_bucket_view=self.bucket_views,
        )
        return ddp, optimizer, self.register(ddp, group)

    @property
    def has_one_size(self) -> bool:
        """Whether no other bucket size is tried: it is given, or fusedcomm.horovod's own; or the way takes long to
        begin, because it chooses a wire or its ranks meet as members."""
        return self.cap_mb is not None or self.members or bool(self.compression) or self.name == "fusedcomm auto"

    @property
    def is_peer(self) -> bool:
        """Whether the way is torch's. Its failure is then a finding, not an error of fusedcomm's."""
        return not self.name.startswith(("fusedcomm", "hvd", "ddp"))


def ways_by_name() -> dict[str, Way]:
    ways = [
        Way(DEFAULT, lambda ddp, group: None, TOLERANCES["fp32"], bucket_views=False),
        Way("python fp16 hook", _python(default_hooks.fp16_compress_hook), TOLERANCES["fp16"]),
        Way("c++ fp16 hook", _builtin_fp16, TOLERANCES["fp16"]),
        Way("python bf16 hook", _python(stock_bf16_hook), TOLERANCES["bf16"]),
        Way("powersgd rank 1", _power_sgd(1), 1e-3, ONE_BUCKET_MB, max_rank=1),
        Way("powersgd rank 2", _power_sgd(2), 1e-3, ONE_BUCKET_MB, max_rank=2),
        # 8-bit codes between the least and the greatest value of a bucket (pertensor), or of 512 elements (perchannel).
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
    # One level also where hosts have several ranks; "by host" below has two there, as the default has.
    for wire in ("bf16", "fp16", "int8", "fp8", "int4"):
        ways.append(Way(f"fusedcomm {wire}", _ours(Config(wire, hosts=None)), TOLERANCES[wire]))
    for wire in ("bf16", "int8"):
        ways.append(Way(f"fusedcomm reducer {wire}", None, TOLERANCES[wire], reducer=Config(wire, hosts=None)))
    for wire in ("bf16", "int8"):
        config = Config(wire, hosts=None)
        ways.append(Way(f"fusedcomm members {wire}", None, TOLERANCES[wire], reducer=config, members=True))
    for compression, wire in (("none", "fp32"), ("bf16", "bf16"), ("int8", "int8")):
        ways.append(Way(f"hvd {compression}", None, TOLERANCES[wire], compression=compression))
    # The sums that sum="auto" takes for more than two ranks. With two ranks they are possible, too.
    ways.append(Way("fusedcomm bf16 direct", _ours(Config("bf16", "direct")), TOLERANCES["bf16"]))
    for wire in ("int8", "int4"):
        ways.append(Way(f"fusedcomm {wire} two-shot", _ours(Config(wire, "two-shot", hosts=None)), TOLERANCES[wire]))
    # The tolerance is that of the least exact wire among those to choose from.
    ways.append(Way("fusedcomm auto", _ours("auto"), TOLERANCES["int8"]))
    for wire in ("bf16", "int8", "int4"):
        # With one rank on each host this is the same as a sum on one level.
        ways.append(Way(f"fusedcomm {wire} by host", _ours(Config(wire)), TOLERANCES[wire]))
    # The result contains the residual of earlier steps, too.
    int4 = Config("int4", feedback=Feedback(), hosts=None)
    ways.append(Way("fusedcomm int4 feedback", _ours(int4), 1.5 * TOLERANCES["int4"]))
    return {way.name: way for way in ways}


def with_cap(way: Way, cap_mb: float | None, name: str | None = None) -> Way:
    return dataclasses.replace(way, name=name or way.name, cap_mb=cap_mb)


def tuned(default: Way) -> Way:
    return dataclasses.replace(default, name=TUNED, bucket_views=True)


def _python(hook: Callable) -> Callable[[DistributedDataParallel, dist.ProcessGroup], None]:
    return lambda ddp, group: ddp.register_comm_hook(group, hook)


def stock_bf16_hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.bf16_compress_hook(group, bucket)


def _builtin_fp16(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def _power_sgd(rank: int) -> Callable[[DistributedDataParallel, dist.ProcessGroup], None]:
    def register(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        state = powerSGD_hook.PowerSGDState(group, rank, start_powerSGD_iter=FIRST_COMPRESSED_STEP)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


def _ours(config: Config | str) -> Callable[[DistributedDataParallel, dist.ProcessGroup], fusedcomm.Handle]:
    return lambda ddp, group: fusedcomm.attach(ddp, config, quiet=True)
