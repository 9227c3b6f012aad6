"""One rank of bench/horovod.py, which starts the ranks and reads the results that rank 0 writes."""

import argparse
import dataclasses
import faulthandler
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _ddp_step_rank import NUM_CHECKS, OPTIMIZERS, Known, Task, WireCounter, digest, wait_for
from _ddp_step_rank import Runner as OfDdp
from lib.common import Report, Row, in_turn, keep_memory, make_row, percentiles
from lib.models import make_model, numel_of
from lib.rank import gathered
from lib.ways import COMPUTE, TOLERANCES
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
import fusedcomm.horovod as hvd
from fusedcomm.ranks import groups

DIST = "dist.all_reduce"
SMALL_NUMELS = (1, 1_000, 100_000)
NUM_TENSORS = 300
TENSOR_NUMELS = [round(10 ** (1 + 3 * (index % 10) / 9)) for index in range(NUM_TENSORS)]
"""10 to 10,000 elements."""
WARM_CALLS = 10
WARM_CYCLES = 4
WARM_STEPS = 6
"""Untimed steps of each turn."""


@dataclasses.dataclass(frozen=True)
class Way:
    """`module` synchronizes in its backward pass, or `optimizer` in synchronize()."""

    name: str
    wire: str
    make: Callable[[Task, str], tuple[nn.Module, torch.optim.Optimizer, object]]
    """(task, kind of optimizer) -> module to call, optimizer, what is to be kept as long as they."""


def _ddp(wire: str | None) -> Callable:
    def make(task: Task, optimizer: str) -> tuple:
        ddp = DistributedDataParallel(task, init_sync=False, gradient_as_bucket_view=True)
        held = None if wire is None else fusedcomm.attach(ddp, wire, quiet=True)
        return ddp, OPTIMIZERS[optimizer](task.parameters()), held

    return make


def _hvd(wire: str) -> Callable:
    def make(task: Task, optimizer: str) -> tuple:
        # Several optimizers live in this process, so each has its own names.
        named = [(f"{wire}/{name}", parameter) for name, parameter in task.named_parameters()]
        compression = getattr(hvd.Compression, wire)
        inner = OPTIMIZERS[optimizer](task.parameters())
        return task, hvd.DistributedOptimizer(inner, named, compression), None

    return make


WAYS = [
    Way("ddp", "fp32", _ddp(None)),
    Way("fusedcomm hook bf16", "bf16", _ddp("bf16")),
    Way("fusedcomm hook int8", "int8", _ddp("int8")),
    Way("hvd none", "fp32", _hvd("none")),
    Way("hvd bf16", "bf16", _hvd("bf16")),
    Way("hvd int8", "int8", _hvd("int8")),
]


class Runner(OfDdp):
    """One way's module and optimizer on this rank. Without a way, it only computes."""

    def make(self, way: Way | None, task: Task, optimizer: str, group: dist.ProcessGroup | None) -> tuple:
        return super().make(None, task, optimizer, group) if way is None else way.make(task, optimizer)

    def synchronize_alone(self, gradients: list[Tensor]) -> tuple[float, list[Tensor]]:
        """(seconds of a backward pass that only synchronizes `gradients`, the means)."""
        self.optimizer.zero_grad()
        begin = time.perf_counter()
        self.module(None, gradients).backward()
        if not hasattr(self.optimizer, "synchronize"):
            wait_for(gradients[0])
            taken = time.perf_counter() - begin
            return taken, [parameter.grad.cpu().clone() for parameter in self.task.parameters()]
        self.optimizer.synchronize()
        wait_for(gradients[0])
        taken = time.perf_counter() - begin
        means = [parameter.grad.cpu().clone() for parameter in self.task.parameters()]
        self.optimizer.zero_grad()
        with self.optimizer.skip_synchronize():
            self.optimizer.step()  # with no gradients: it only ends the step
        return taken, means


class Bench:
    def __init__(self, arguments: argparse.Namespace, results: str) -> None:
        self.arguments, self.device = arguments, torch.device("cpu")
        if arguments.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            if "NCCL_SOCKET_IFNAME" in os.environ:
                os.environ["NCCL_HOSTID"] = f"fusedcomm-{os.environ['RANK']}"
        dist.init_process_group("cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo")
        dist.all_reduce(torch.ones(1))
        self.link = os.environ.get("FUSEDCOMM_BENCH_LINK", "loopback")
        self.threads_before = set(os.listdir("/proc/self/task"))
        hvd.init()
        self.rank, self.is_first = dist.get_rank(), dist.get_rank() == 0
        self.report = Report(results if self.is_first else None)

    def begin(self, what: str) -> None:
        """Limits the time until the next call: after --timeout this process prints its stack and ends."""
        faulthandler.dump_traceback_later(self.arguments.timeout, exit=True)
        self.report.extra["at"] = what
        self.report.write()
        if self.is_first:
            print(what, flush=True)

    def slowest(self, seconds: list[float]) -> list[float]:
        """Each element's greatest value over ranks."""
        found = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return found.tolist()

    def turns(self, functions: dict[str, Callable[[], None]], warm: int, calls: int) -> dict[str, list[float]]:
        """Seconds of one call, the mean of `calls` of the slowest rank, in each round."""
        seconds = {name: [] for name in functions}
        for index in range(self.arguments.rounds):
            for name in in_turn(functions, index):
                for _ in range(1 if name == DIST else warm):
                    functions[name]()
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(calls):
                    functions[name]()
                seconds[name].append((time.perf_counter() - begin) / calls)
        return {name: self.slowest(of_way) for name, of_way in seconds.items()}

    # ---- single collectives

    def latency(self) -> None:
        for numel in SMALL_NUMELS:
            case = f"{self.link}/all-reduce of {4 * numel} bytes"
            self.begin(case)
            theirs, ours = torch.zeros(numel), torch.zeros(numel)
            name = f"x{numel}"

            functions = {
                DIST: lambda theirs=theirs: dist.all_reduce(theirs),
                "hvd.allreduce_": lambda ours=ours, name=name: hvd.allreduce_(ours, op=hvd.Sum, name=name),
                "hvd.allreduce": lambda ours=ours, name=name: hvd.allreduce(ours, op=hvd.Sum, name=name),
            }
            exact = torch.full((numel,), self.rank - 1.5)
            total = torch.full((numel,), float(sum(range(dist.get_world_size()))) - 1.5 * dist.get_world_size())
            dist.all_reduce(given := exact.clone())
            right = torch.equal(hvd.allreduce(exact, op=hvd.Sum, name=name), total) and torch.equal(given, total)
            seconds = self.turns(functions, WARM_CALLS, self.arguments.calls)
            self.add(case, numel, seconds, right)

    def many(self) -> None:
        case = f"{self.link}/{NUM_TENSORS} tensors"
        self.begin(case)
        theirs = [torch.zeros(numel) for numel in TENSOR_NUMELS]
        ours = [torch.zeros(numel) for numel in TENSOR_NUMELS]

        def submit(tensors: list[Tensor]) -> None:
            handles = [hvd.allreduce_async_(each, op=hvd.Sum, name=f"t{i}") for i, each in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)

        def single() -> None:
            for tensor in theirs:
                dist.all_reduce(tensor)

        def grouped() -> None:
            hvd.grouped_allreduce_(ours, op=hvd.Sum, name="group")

        checked = [torch.full((numel,), float(i - 7 * self.rank)) for i, numel in enumerate(TENSOR_NUMELS)]
        size = dist.get_world_size()
        submit(checked)
        right = all(torch.all(each == size * i - 7 * sum(range(size))) for i, each in enumerate(checked))
        functions = {DIST: single, "hvd.allreduce_async_": lambda: submit(ours), "hvd.grouped_allreduce_": grouped}
        self.add(case, sum(TENSOR_NUMELS), self.turns(functions, WARM_CYCLES, 1), bool(right))

    def add(self, case: str, numel: int, seconds: dict[str, list[float]], right: bool) -> None:
        self.report.rows += [make_row(case, name, numel, 8 * numel, each, right) for name, each in seconds.items()]
        self.report.write()

    # ---- threads without work

    def idle(self) -> None:
        self.begin("idle")
        dist.barrier()
        hvd.barrier()
        time.sleep(0.2)
        before = wakeups()
        time.sleep(self.arguments.idle_s)
        after = wakeups()
        added = [each for each in after if each in before and each not in self.threads_before]
        rates = {each: (after[each] - before[each]) / self.arguments.idle_s for each in added}
        gloos = [each for each in added if "gloo" in Path(f"/proc/self/task/{each}/comm").read_text()]
        own = [rates[each] for each in added if each not in gloos]
        dist.barrier()
        self.report.extra["idle"] = {
            "own_wakeups_s": sum(own),
            "num_own": len(own),
            "num_others": len(gloos),
            "other_wakeups_s": statistics.mean(rates[each] for each in gloos) if gloos else 0.0,
        }
        self.report.write()

    # ---- training steps

    def steps(self) -> None:
        arguments = self.arguments
        model = make_model(arguments.model, int(arguments.params), arguments.size)
        batch = model.batch(arguments.batch, torch.Generator().manual_seed(self.rank))
        case = f"{self.link}/{arguments.model}"
        known = Known(model, None)
        model.to(self.device)
        batch = tuple(each.to(self.device) for each in batch)
        known.own = [each.to(self.device) for each in known.own]
        runners = {COMPUTE: Runner(None, model, arguments.optimizer, None)}
        for way in WAYS:
            self.begin(f"{case}, {way.name}: checking")
            runners[way.name] = Runner(way, model, arguments.optimizer, None)
            self.check(runners[way.name], known)
        counter = WireCounter()
        for index in range(arguments.rounds):
            self.begin(f"{case}, round {index + 1} of {arguments.rounds}")
            for name in in_turn(runners, index):
                self.turn(runners[name], batch, known, counter)
        self.report.rows += [self.row(case, name, each, numel_of(model)) for name, each in runners.items()]
        same = len(set(gathered(digest([each.cpu() for each in model.parameters()])))) == 1
        if not same and self.is_first:
            self.report.missing(case, "all", "the ranks ended with different weights")
        self.report.write()

    def check(self, runner: Runner, known: Known) -> None:
        for _ in range(NUM_CHECKS):
            _, means = runner.synchronize_alone(known.own)
            runner.error = max(runner.error, known.error_of(means))
            if not runner.error <= TOLERANCES[runner.way.wire]:
                raise RuntimeError(f"{runner.way.name}: relative error {runner.error:.2e} on rank {self.rank}")
            if len(set(gathered(digest(means)))) > 1:
                raise RuntimeError(f"{runner.way.name}: the ranks have different gradients")

    def turn(self, runner: Runner, batch: tuple[Tensor, Tensor], known: Known, counter: WireCounter) -> None:
        # Without communication nothing has to become warm but caches.
        for _ in range(1 if runner.way is None else WARM_STEPS):
            runner.step(batch)
        dist.barrier()
        before = counter.read()
        seconds = [runner.step(batch) for _ in range(self.arguments.steps)]
        dist.barrier()
        sent = (counter.read() - before) / self.arguments.steps
        runner.step_s += self.slowest(seconds)
        if runner.way is not None:
            runner.sync_s += self.slowest([runner.synchronize_alone(known.own)[0]])
            counted = [each for each in gathered(sent) if not math.isnan(each)]
            runner.sent_nbytes += [statistics.mean(counted)] if counted else []

    def row(self, case: str, name: str, runner: Runner, numel: int) -> Row:
        samples = [self.arguments.batch / seconds for seconds in runner.step_s]
        figures = {"samples_s": statistics.mean(samples), "samples_s_spread": 1.96 * statistics.pstdev(samples)}
        if runner.way is not None:
            figures.update(sync_s=statistics.median(runner.sync_s), error=runner.error)
        if runner.sent_nbytes:
            figures["wire_nbytes"] = statistics.median(runner.sent_nbytes)
        row = make_row(case, name, numel, 4 * numel, runner.step_s, checked=True)
        return dataclasses.replace(row, percentiles_s=percentiles(runner.step_s), figures=figures)


def wakeups() -> dict[str, int]:
    """How often each thread of this process has woken up after it had waited, by thread."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("voluntary_ctxt_switches:")]
        found[task] = int(line.split()[1])
    return found


def main() -> None:
    keep_memory()
    torch.set_num_threads(1)
    results, arguments = sys.argv[1:]
    bench = Bench(argparse.Namespace(**json.loads(arguments)), results)
    if "latency" in bench.arguments.parts:
        bench.latency()
        bench.many()
    if "idle" in bench.arguments.parts:
        bench.idle()
    if "steps" in bench.arguments.parts:
        bench.steps()
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    hvd.shutdown()
    groups.end_together()


if __name__ == "__main__":
    main()
