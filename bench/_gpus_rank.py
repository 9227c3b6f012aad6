"""One rank of bench/gpus.py, which starts the ranks and reads what rank 0 writes: sums of one bucket, or steps."""

import argparse
import dataclasses
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _hook_rank import Impl, synchronize
from _hook_rank import noop_hook as noop_in_python
from lib import noop_hook
from lib.common import Report, in_turn, make_row
from lib.gpu_timeline import events_of, figures_of
from lib.models import make_model, numel_of
from lib.rank import gathered
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import Config
from fusedcomm.ranks import groups

ALONE, DDP, BASE = "compute alone", "DDP", "no-op hook, C++"
CHECK_LR, LR = 1.0, 1e-3
"""The step whose change of the parameters is checked is large beside their rounding."""


def fp16_compress(ddp: DistributedDataParallel) -> None:
    """Registers torch's hook in C++."""
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


# ---- sums of one bucket


class Collective(Impl):
    """A sum as somebody would write it without a hook, on one tensor."""

    def __init__(self, name: str, numel: int, device: str, average: Callable[[Tensor], None]) -> None:
        self.name, self.device, self.average, self.num_buckets = name, device, average, 1
        self.tensor = torch.empty(numel, device=device)
        self.buckets = [self]
        self.call_s, self.result_s = [], []

    def check(self, rank: int, world_size: int) -> bool:
        self.tensor.fill_(rank + 1)
        self.average(self.tensor)
        return self.tensor.unique().tolist() == [(world_size + 1) / 2]

    def run(self, bucket: object) -> "Collective":
        self.average(self.tensor)
        return self

    def wait(self) -> None:
        """Nothing: whoever times it waits for the device."""


def in_fp32(tensor: Tensor) -> None:
    tensor.div_(dist.get_world_size())
    dist.all_reduce(tensor)


def in_bf16(tensor: Tensor) -> None:
    sent = tensor.div(dist.get_world_size()).to(torch.bfloat16)
    dist.all_reduce(sent)
    tensor.copy_(sent)


class Registered(Collective):
    """NCCL on memory that is registered with its communicator."""

    def __init__(self, name: str, numel: int, device: str) -> None:
        super().__init__(name, 1, device, in_fp32)
        backend = dist.group.WORLD._get_backend(torch.device(device))
        self.pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self.pool):
            self.tensor = torch.empty(numel, device=device)
        backend.register_mem_pool(self.pool)


class WithCupy(Collective):
    """CuPy's binding of NCCL, with the scale and the cast in one kernel each: what is written by hand today."""

    def __init__(self, name: str, numel: int, device: str) -> None:
        super().__init__(name, numel, device, self._average)
        import cupy
        from cupy.cuda import nccl

        rank, world_size = dist.get_rank(), dist.get_world_size()
        unique = [nccl.get_unique_id() if rank == 0 else None]
        dist.broadcast_object_list(unique, src=0)
        self.communicator = nccl.NcclCommunicator(world_size, unique[0], rank)
        self.pack = cupy.ElementwiseKernel("float32 x, float32 scale", "float16 y", "y = x * scale", "pack")
        self.unpack = cupy.ElementwiseKernel("float16 x", "float32 y", "y = x", "unpack")
        self.own = cupy.asarray(self.tensor)
        self.sent = cupy.empty(numel, "float16")
        self.stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        self.kind = nccl.NCCL_FLOAT16, nccl.NCCL_SUM

    def _average(self, tensor: Tensor) -> None:
        with self.stream:
            self.pack(self.own, 1 / dist.get_world_size(), self.sent)
            place = self.sent.data.ptr
            self.communicator.allReduce(place, place, self.sent.size, *self.kind, self.stream.ptr)
            self.unpack(self.sent, self.own)


def sums_of(numel: int, device: str, has_noop: bool) -> dict[str, Callable[[], Impl]]:
    """By name, what sums a bucket of `numel` elements. has_noop: whether lib/noop_hook.py can be compiled."""
    world_size = dist.get_world_size()

    def hook(name: str, register: Callable[[DistributedDataParallel], object]) -> Callable[[], Impl]:
        return lambda: Impl(name, register, numel, 1, device, num_buckets=1)

    def ours(name: str, config: Config) -> Callable[[], Impl]:
        return hook(name, lambda ddp: fusedcomm.attach(ddp, config, quiet=True))

    group = dist.group.WORLD
    ways: dict[str, Callable[[], Impl]] = {
        "no-op hook, Python": hook("no-op", lambda ddp: ddp.register_comm_hook(group, noop_in_python)),
        "NCCL fp32": lambda: Collective("NCCL fp32", numel, device, in_fp32),
        "NCCL bf16": lambda: Collective("NCCL bf16", numel, device, in_bf16),
        "c++ fp16 hook": hook("c++ fp16 hook", fp16_compress),
    }
    if has_noop:
        ways[BASE] = hook("no-op", lambda ddp: noop_hook.module().register_on(ddp.reducer))
    if device != "cpu":
        ways["NCCL fp32, registered"] = lambda: Registered("NCCL fp32, registered", numel, device)
        ways["CuPy, fp16"] = lambda: WithCupy("CuPy, fp16", numel, device)
        ways["bf16 hook"] = hook(
            "bf16 hook", lambda ddp: ddp.register_comm_hook(group, default_hooks.bf16_compress_hook)
        )
    ways["fusedcomm fp32"] = ours("fusedcomm fp32", Config("fp32"))
    ways["fusedcomm bf16 direct"] = ours("fusedcomm bf16 direct", Config("bf16", "direct", wires={"1d": "bf16"}))
    for wire in ("bf16", "int8", "fp8", "int4"):
        for sum in ("one-shot", "two-shot"):
            name = f"fusedcomm {wire} {sum}"
            ways[name] = ours(name, Config(wire, sum, wires={"1d": wire}, hosts=None))
    if world_size >= 4 and world_size % 2 == 0:
        halves = [list(range(world_size // 2)), list(range(world_size // 2, world_size))]
        ways["fusedcomm int8 two levels"] = ours(
            "fusedcomm int8 two levels", Config("int8", wires={"1d": "int8"}, hosts=halves)
        )
    return ways


def measure_sums(arguments: argparse.Namespace, report: Report, until: float) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for index, numel in enumerate(arguments.numel):
        made: dict[str, Impl] = {}
        for name, make in sums_of(numel, arguments.device, arguments.noop).items():
            try:
                way = make()
                problem = "" if way.check(rank, world_size) else "wrong result"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            if any(problems := gathered(problem)):
                failed = name.startswith("fusedcomm") or "wrong result" in problems
                report.missing(f"bucket/{numel}", name, next(filter(None, problems)), failed=failed)
            else:
                made[name] = way
        share = (until - time.monotonic()) / (len(arguments.numel) - index)
        take_turns(made, lambda way: way.time_once(), arguments.rounds, time.monotonic() + share)
        rows = []
        for name, way in made.items():
            row = make_row(f"bucket/{numel}", name, numel, 4 * numel, way.result_s[1:], True)
            call_s = statistics.median(way.call_s[1:])
            bus = 2 * (world_size - 1) / world_size * 4 * numel / row.median_s
            rows.append(dataclasses.replace(row, figures={"call_s": call_s, "bus_bytes_per_s": bus}))
        report.add(rows)
        made.clear()
        gc.collect()


# ---- steps of a model


@dataclasses.dataclass(frozen=True)
class Way:
    """make(model, learning rate): returns what runs the forward pass, and the optimizer. `tolerance`: of the change of
    the parameters, relative to that with DDP."""

    make: Callable[[nn.Module, float], tuple[nn.Module, torch.optim.Optimizer]]
    tolerance: float = 1e-2


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def alone(model: nn.Module, lr: float) -> tuple:
    return model, sgd(model, lr)


def ddp(register: Callable[[DistributedDataParallel], object] = lambda ddp: None) -> Callable[..., tuple]:
    def make(model: nn.Module, lr: float) -> tuple:
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
        register(forward)
        return forward, sgd(model, lr)

    return make


def attached(wire: str) -> Callable[..., tuple]:
    return ddp(lambda forward: fusedcomm.attach(forward, wire, quiet=True))


def reducer(model: nn.Module, lr: float) -> tuple:
    fusedcomm.GradReducer(model, "int8", quiet=True)
    return model, sgd(model, lr)


def owners(model: nn.Module, lr: float) -> tuple:
    optimizer = torch.optim.SGD
    return model, fusedcomm.ShardedOptimizer(
        fusedcomm.GradReducer(model, "int8", quiet=True), optimizer, update="bf16", quiet=True, lr=lr
    )


def sharded(config: Config | None) -> Callable[..., tuple]:
    def make(model: nn.Module, lr: float) -> tuple:
        for layer in model.layers.layers:
            fully_shard(layer)
        fully_shard(model)
        if config is not None:
            fusedcomm.attach(model, config, quiet=True)
        return model, sgd(model, lr)

    return make


WAYS = {
    ALONE: Way(alone, float("inf")),
    DDP: Way(ddp(), 0),
    "DDP, c++ fp16 hook": Way(ddp(fp16_compress), 3e-2),
    "DDP, bf16": Way(attached("bf16"), 3e-2),
    "DDP, int8": Way(attached("int8"), 6e-2),
    "GradReducer, int8": Way(reducer, 6e-2),
    "ShardedOptimizer, int8": Way(owners, 6e-2),
    "FSDP2": Way(sharded(None)),
    "FSDP2, int8": Way(sharded(Config("int8")), 6e-2),
    "FSDP2, int8, params int8": Way(sharded(Config("int8", params="int8")), 0.3),
}


class Runner:
    def __init__(self, way: Way, arguments: argparse.Namespace) -> None:
        self.device = arguments.device
        self.model = make_model("transformer", arguments.params, arguments.length).to(self.device)
        self.numel = numel_of(self.model)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.batch = [part.to(self.device) for part in self.model.batch(arguments.batch, generator)]
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.forward, self.optimizer = way.make(self.model, CHECK_LR)
        self.step()
        self.change = [now - old for now, old in zip(self._whole(), before, strict=True)]
        for group in self.optimizer.param_groups:
            group["lr"] = LR
        self.step_s: list[float] = []

    def _whole(self) -> list[Tensor]:
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]

    def step(self) -> None:
        inputs, targets = self.batch
        self.optimizer.zero_grad()
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.device != "cpu"):
            loss = F.cross_entropy(self.forward(inputs), targets)
        loss.backward()
        self.optimizer.step()

    def time_once(self) -> None:
        synchronize(self.device)
        started = time.perf_counter()
        self.step()
        synchronize(self.device)
        self.step_s.append(time.perf_counter() - started)

    def timeline(self) -> dict[str, float]:
        """See lib/gpu_timeline.py, of one step."""

        def once() -> None:
            self.step()
            synchronize(self.device)

        return figures_of(events_of(once))


def error_of(change: list[Tensor], right: list[Tensor]) -> float:
    off = sum((got - want).double().square().sum().item() for got, want in zip(change, right, strict=True))
    return (off / sum(want.double().square().sum().item() for want in right)) ** 0.5


def measure_steps(arguments: argparse.Namespace, report: Report, until: float) -> None:
    made: dict[str, Runner] = {}
    errors: dict[str, float] = {}
    right: list[Tensor] = []
    for name in (DDP, *(name for name in WAYS if name != DDP)):
        try:
            runner = Runner(WAYS[name], arguments)
            right = right or runner.change
            errors[name] = error_of(runner.change, right)
            runner.change = []
            is_right = errors[name] <= WAYS[name].tolerance
            problem = "" if is_right else f"its change of the parameters is off by {errors[name]:.2g}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if any(problems := gathered(problem)):
            report.missing("step", name, next(filter(None, problems)))
        else:
            made[name] = runner
    right.clear()
    made = {name: made[name] for name in WAYS if name in made}
    take_turns(made, lambda runner: runner.time_once(), arguments.rounds, until)
    timelines = {name: runner.timeline() for name, runner in made.items()}
    rows = []
    for name, runner in made.items():
        row = make_row("step", name, runner.numel, 4 * runner.numel, runner.step_s[1:], True)
        rows.append(dataclasses.replace(row, figures={"error": errors[name], **timelines[name]}))
    report.add(rows)


# ---- both


def take_turns(ways: dict, once: Callable[..., None], rounds: int, until: float) -> None:
    """Every way in every round, in another order each time, until rank 0's clock says `until`; at least twice."""
    for index in range(rounds):
        for name in in_turn(ways, index):
            dist.barrier()
            once(ways[name])
        is_late = [time.monotonic() > until]
        dist.broadcast_object_list(is_late, src=0)
        if is_late[0] and index > 0:
            return


def main() -> None:
    torch.set_num_threads(1)
    results, text = sys.argv[1:]
    arguments = argparse.Namespace(**json.loads(text))
    started = time.monotonic()
    if arguments.device != "cpu":
        arguments.device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(arguments.device)
    dist.init_process_group("gloo" if arguments.device == "cpu" else "nccl")
    report = Report(Path(results) if dist.get_rank() == 0 else None)
    measure = measure_sums if arguments.part == "sums" else measure_steps
    measure(arguments, report, started + arguments.seconds)
    groups.end_together()


if __name__ == "__main__":
    main()
