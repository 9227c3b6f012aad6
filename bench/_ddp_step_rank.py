"""One rank of bench/ddp_step.py, which starts the ranks and reads the results that rank 0 writes."""

import argparse
import copy
import datetime
import faulthandler
import gc
import hashlib
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib.common import Report, Row, in_turn, keep_memory, percentiles, worst
from lib.models import make_model, numel_of
from lib.oracle import tcp_nbytes_sent
from lib.rank import gathered
from lib.ways import COMPUTE, DEFAULT, Way, tuned, ways_by_name, with_cap
from torch import Tensor, nn

import fusedcomm.horovod as hvd
from fusedcomm.ranks import groups

# Checked steps of each way, with known gradients.
NUM_CHECKS = 3
# Greatest number of samples that --compute-ms tries.
MAX_BATCH = 1 << 12
CHECK_SCALE = 0.1
"""Standard deviation of known gradients. They exceed the model's own, of which error feedback has kept a residual."""
LEARNING_RATE = 1e-4
SEARCH_ROUNDS = 4
"""Turns of each bucket size in the search for the best one."""
WORTHWHILE = 0.98
"""Another bucket size is chosen if its step takes at most this part of the step with DDP's own. Less may be chance."""


class Supply(torch.autograd.Function):
    """A loss with given gradients: its backward pass computes nothing."""

    @staticmethod
    def forward(context, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        context.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(context, _) -> tuple:
        return None, *context.gradients


class Task(nn.Module):
    """The module that DDP wraps, or that has a reducer. It is called with a batch, or with gradients that its backward
    pass supplies."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Tensor, Tensor] | None, gradients: list[Tensor] | None = None) -> Tensor:
        if gradients is not None:
            return Supply.apply(gradients, *self.model.parameters())
        return F.cross_entropy(self.model(batch[0]), batch[1])


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, LEARNING_RATE, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, LEARNING_RATE, fused=True),
}


class Runner:
    """One way's module, gradients, buckets and optimizer on this rank. Without a way, it only computes."""

    def __init__(self, way: Way | None, model: nn.Module, optimizer: str, group: dist.ProcessGroup | None) -> None:
        self.way, self.task = way, Task(copy.deepcopy(model))
        if way is not None:
            for own, shared in zip(self.task.parameters(), model.parameters(), strict=True):
                own.data = shared.data  # all ways train one set of weights
        self.module, self.optimizer, self.held = self.task, OPTIMIZERS[optimizer](self.task.parameters()), None
        if way is not None:
            self.module, self.optimizer, self.held = way.wrap(self.task, self.optimizer, group)
        self.means: list[Tensor] = []
        """What synchronize_alone() has found."""
        self.step_s: list[float] = []
        self.sync_s: list[float] = []
        self.sent_nbytes: list[float] = []
        self.busy_ticks = self.all_ticks = 0
        """Ticks of all cores of this rank's machine, during timed steps."""
        self.error = 0.0

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        """Seconds of a step: forward, backward with its synchronization, optimizer."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.module(batch).backward()
        self.optimizer.step()
        wait_for(batch[0])
        return time.perf_counter() - begin

    def backward_alone(self, batch: tuple[Tensor, Tensor]) -> None:
        self.optimizer.zero_grad()
        self.module(batch).backward()
        self._synchronize()

    def _synchronize(self) -> None:
        """Ends a backward pass after which the optimizer does not step. Keeps the means."""
        own = getattr(self.optimizer, "synchronize", None)  # hvd's waits for the means before its steps
        if own is not None:
            own()
        self.means = [parameter.grad for parameter in self.task.parameters()]
        if own is not None:
            self.optimizer.zero_grad()
            with self.optimizer.skip_synchronize():
                self.optimizer.step()  # with no gradients: it only ends hvd's step

    def tune(self, batch: tuple[Tensor, Tensor]) -> str:
        """Trains until "auto" has chosen, and returns its report; empty for a way that does not choose."""
        tuning = getattr(self.held, "tuning", lambda: None)
        while tuning() is not None and not tuning().finished:
            self.step(batch)
        return "" if tuning() is None else str(tuning())

    def synchronize_alone(self, gradients: list[Tensor]) -> float:
        """Seconds of a backward pass that only synchronizes `gradients`."""
        self.optimizer.zero_grad()
        begin = time.perf_counter()
        self.module(None, gradients).backward()
        self._synchronize()
        wait_for(gradients[0])
        return time.perf_counter() - begin

    def count_ticks(self, before: tuple[int, int] | None, after: tuple[int, int] | None) -> None:
        if before is not None and after is not None:
            self.busy_ticks += after[0] - before[0]
            self.all_ticks += after[1] - before[1]

    def close(self) -> None:
        self.optimizer.zero_grad()
        if self.way is not None and self.way.members:
            self.held.runs.members.leave()
        elif hasattr(self.held, "detach"):
            self.held.detach()


class Known:
    """Gradients that every rank can compute for all ranks: this rank's, and the exact mean rounded to fp32. As
    matrices they have at most `matrix_rank`, for PowerSGD; None: any rank."""

    def __init__(self, model: nn.Module, matrix_rank: int | None) -> None:
        self.own, self.mean = [], []
        for index, parameter in enumerate(model.parameters()):
            total = torch.zeros(parameter.shape, dtype=torch.float64)
            for rank in range(dist.get_world_size()):
                gradient = self._gradient(parameter, index, rank, matrix_rank)
                total += gradient
                if rank == dist.get_rank():
                    self.own.append(gradient)
            self.mean.append((total / dist.get_world_size()).float())

    @staticmethod
    def _gradient(parameter: Tensor, index: int, rank: int, matrix_rank: int | None) -> Tensor:
        if matrix_rank is not None and parameter.dim() > 1:
            # Ranks' gradients differ only by a factor, so the mean has no higher matrix rank. To PowerSGD a parameter
            # is a matrix: its first dimension by all the others.
            generator = torch.Generator().manual_seed(index)
            rows, columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
            left = torch.randn(rows, matrix_rank, generator=generator)
            right = torch.randn(matrix_rank, columns, generator=generator)
            return ((rank + 1) * CHECK_SCALE * left @ right).view(parameter.shape)
        generator = torch.Generator().manual_seed(1000 * index + rank)
        return CHECK_SCALE * torch.randn(parameter.shape, generator=generator)

    def error_of(self, gradients: list[Tensor]) -> float:
        """‖gradients − mean‖ / ‖mean‖."""
        pairs = list(zip((gradient.cpu() for gradient in gradients), self.mean, strict=True))
        difference = sum((gradient.double() - mean).square().sum() for gradient, mean in pairs)
        return (difference / sum(mean.double().square().sum() for mean in self.mean)).sqrt().item()


class WireCounter:
    """Counts bytes sent so far: by the host's interface, on the host's first rank; or, without an interface of its own,
    by this rank's TCP sockets."""

    def __init__(self) -> None:
        interface = os.environ.get("FUSEDCOMM_BENCH_INTERFACE")
        self._file = Path(f"/sys/class/net/{interface}/statistics/tx_bytes") if interface else None
        self.counts = self._file is None or os.environ["LOCAL_RANK"] == "0"
        self.what = f"{interface} of each host" if interface else "TCP sockets of each rank"

    def read(self) -> float:
        """NaN where this rank does not count."""
        if not self.counts:
            return float("nan")
        nbytes = tcp_nbytes_sent() if self._file is None else int(self._file.read_text())
        return float("nan") if nbytes is None else nbytes


def core_ticks() -> tuple[int, int] | None:
    """(busy, all) ticks of this machine's cores so far, of the kernel and all processes. None without /proc/stat."""
    file = Path("/proc/stat")
    if not file.exists():
        return None
    user, nice, system, idle, iowait, irq, softirq, *_ = map(int, file.read_text().split("\n")[0].split()[1:])
    busy = user + nice + system + irq + softirq
    return busy, busy + idle + iowait


class Bench:
    """Makes, checks and times every way on this rank. Rank 0 writes the results to the JSON file `results`."""

    def __init__(self, arguments: argparse.Namespace, results: str) -> None:
        self.arguments, self.device = arguments, torch.device("cpu")
        if arguments.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
            if "NCCL_SOCKET_IFNAME" in os.environ:  # see --device in ddp_step.py
                os.environ["NCCL_HOSTID"] = f"fusedcomm-{os.environ['RANK']}"
        # Ways have their own process groups, so a way that fails does not break this one.
        backends = "cpu:gloo,cuda:nccl" if arguments.device == "cuda" else "gloo"
        dist.init_process_group(backends, timeout=datetime.timedelta(seconds=arguments.timeout + 60))
        self.is_first = dist.get_rank() == 0
        self.report = Report(results if self.is_first else None)
        self.model = make_model(arguments.model, int(arguments.params), arguments.size)
        self.numel = numel_of(self.model)
        self.case = f"{arguments.model}/{os.environ.get('FUSEDCOMM_BENCH_LINK', 'loopback')}"
        self.counter = WireCounter()
        self.known: dict[int | None, Known] = {}
        self.model.to(self.device)
        self.batch = self._make_batch(arguments.batch)
        self.compute = Runner(None, self.model, arguments.optimizer, None)
        for _ in range(3):
            self.compute.step(self.batch)
        if arguments.compute_ms is not None:
            arguments.batch = self._fitting_batch(arguments.compute_ms / 1e3)
            self.batch = self._make_batch(arguments.batch)
        self.say(f"{self.case}: {self.numel:,} parameters, {dist.get_world_size()} ranks, batch {arguments.batch}")

    def say(self, text: str) -> None:
        if self.is_first:
            print(text, flush=True)

    def begin(self, what: str) -> None:
        """Limits the time until the next call: after twice --timeout and a minute this process prints its stack and
        ends. A hook can hang where its process group's timeout has no effect."""
        faulthandler.dump_traceback_later(2 * self.arguments.timeout + 60, exit=True)
        self.report.extra["at"] = what
        self.report.write()

    def _make_batch(self, samples: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.model.batch(samples, torch.Generator().manual_seed(dist.get_rank()))
        return inputs.to(self.device), targets.to(self.device)

    def _fitting_batch(self, wanted_s: float) -> int:
        """The number of samples whose step without synchronization takes `wanted_s`, from steps with more and more
        samples. Rank 0's times decide, so every rank has equally many samples."""
        samples = 1
        while True:
            batch = self._make_batch(samples)
            dist.barrier()
            taken_s = torch.tensor(statistics.median(self.compute.step(batch) for _ in range(5)), dtype=torch.float64)
            dist.broadcast(taken_s, 0)
            if taken_s >= wanted_s / 3 or samples >= MAX_BATCH:
                return max(1, round(samples * wanted_s / taken_s.item()))
            samples *= 2

    # ---- making and checking

    def make(self, way: Way) -> Runner | None:
        """A warm runner with right results. None on every rank if any rank fails; the report then has the reason."""
        self.begin(f"{way.name}, checking")
        group = dist.new_group(timeout=datetime.timedelta(seconds=self.arguments.timeout))
        runner, reason = None, ""
        try:
            runner = Runner(way, self.model, self.arguments.optimizer, group)
            # DDP rebuilds its buckets in the order in which the first of these makes gradients ready.
            # synchronize_alone() has another order.
            for _ in range(2):
                runner.backward_alone(self.batch)
            if found := runner.tune(self.batch):
                self.say(f"{self.case} {way.name}: {found}")
                self.report.extra.setdefault("case", {}).setdefault("chosen", {})[way.name] = found
            runner.synchronize_alone(self.known_of(runner).own)
            reason = self._check(runner)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        reasons = [f"rank {rank}: {reason}" for rank, reason in enumerate(gathered(reason)) if reason]
        if not reasons:
            return runner
        self.missing(way.name, reasons[0], failed=not way.is_peer)
        return None

    def _check(self, runner: Runner) -> str:
        """Text that says what is wrong with the results; empty if they are right."""
        known = self.known_of(runner)
        problems = []
        for index in range(3, 3 + NUM_CHECKS):
            runner.synchronize_alone(known.own)
            error = known.error_of(runner.means)
            runner.error = worst([runner.error, error])
            if not error <= runner.way.tolerance:
                problems.append(f"step {index}: the relative error {error:.2e} exceeds {runner.way.tolerance:.0e}")
            digests = gathered(digest(runner.means))
            if len(set(digests)) > 1:
                problems.append(f"step {index}: the ranks have different gradients")
        return "; ".join(problems)

    def known_of(self, runner: Runner) -> Known:
        rank = runner.way.max_rank
        if rank not in self.known:
            self.known[rank] = Known(self.model, rank)
            self.known[rank].own = [gradient.to(self.device) for gradient in self.known[rank].own]
        return self.known[rank]

    def missing(self, impl: str, reason: object, failed: bool = True) -> None:
        if self.is_first:
            self.report.missing(self.case, impl, reason, failed=failed)

    # ---- timing

    def turn(self, runner: Runner, num_steps: int, also_sync: bool = True) -> None:
        """Runs and times one way's steps. Raises RuntimeError on every rank if a step failed on any rank."""
        self.begin(runner.way.name if runner.way else COMPUTE)
        reason, steps_s, sync_s, sent = "", [0.0] * num_steps, 0.0, 0.0
        try:
            dist.barrier()
            runner.step(self.batch)
            dist.barrier()
            before, cores_before = self.counter.read(), core_ticks()
            steps_s = [runner.step(self.batch) for _ in range(num_steps)]
            runner.count_ticks(cores_before, core_ticks())
            dist.barrier()  # bytes that other ranks still send count, too
            sent = (self.counter.read() - before) / num_steps
            if also_sync and runner.way is not None:
                sync_s = runner.synchronize_alone(self.known_of(runner).own)
            runner.optimizer.zero_grad()
            runner.means = []
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        everyone = gathered((reason, steps_s, sync_s, sent))
        reasons = [f"rank {rank}: {entry[0]}" for rank, entry in enumerate(everyone) if entry[0]]
        if reasons:
            raise RuntimeError(reasons[0])
        runner.step_s += [max(of_ranks) for of_ranks in zip(*(entry[1] for entry in everyone), strict=True)]
        runner.sync_s.append(max(entry[2] for entry in everyone))
        counted = [entry[3] for entry in everyone if entry[3] == entry[3]]
        if counted:
            runner.sent_nbytes.append(statistics.mean(counted))

    def search_cap(self, way: Way) -> float | None:
        """The best bucket_cap_mb for this way among --caps and DDP's own, which is None."""
        candidates: list[float | None] = [None, *self.arguments.caps]
        runners = {cap: self.make(with_cap(way, cap, f"{way.name}, {cap or 'own'} MiB")) for cap in candidates}
        runners = {cap: runner for cap, runner in runners.items() if runner is not None}
        for index in range(SEARCH_ROUNDS):
            for cap in list(runners)[:: -1 if index % 2 else 1]:
                self.turn(runners[cap], 2, also_sync=False)
        medians = {cap: statistics.median(runner.step_s) for cap, runner in runners.items()}
        found = {str(cap or "own"): round(seconds, 6) for cap, seconds in medians.items()}
        case = self.report.extra.setdefault("case", {})
        case.setdefault("step_s_by_bucket_cap_mb", {})[way.name] = found
        times = ", ".join(f"{cap} {seconds * 1e3:.1f} ms" for cap, seconds in found.items())
        self.say(f"{self.case} {way.name}, bucket_cap_mb: {times}")
        best = min(medians, key=medians.get, default=None)
        chosen = None if not medians or medians[best] > WORTHWHILE * medians.get(None, math.inf) else best
        case.setdefault("bucket_cap_mb", {})[way.name] = chosen
        gc.collect()
        return chosen

    def with_best_cap(self, way: Way) -> Way:
        """The way with its best bucket size. DDP's default and ways that have but one size keep theirs."""
        return way if way.has_one_size or way.name == DEFAULT else with_cap(way, self.search_cap(way))

    def run(self) -> None:
        arguments, ways = self.arguments, ways_by_name()
        chosen = [ways[name] for name in ways if not arguments.ways or name in arguments.ways]
        if ways[DEFAULT] in chosen:
            chosen.insert(chosen.index(ways[DEFAULT]) + 1, tuned(ways[DEFAULT]))
        if arguments.caps:
            chosen = [self.with_best_cap(way) for way in chosen]
        runners = {COMPUTE: self.compute}
        for way in chosen:
            runner = self.make(way)
            if runner is not None:
                self.say(f"{self.case} {way.name}: right, relative error {runner.error:.1e}")
                runners[way.name] = runner
        for index in range(arguments.rounds):
            for name in in_turn(runners, index):
                try:
                    self.turn(runners[name], arguments.steps)
                except RuntimeError as error:
                    self.missing(name, error, failed=runners[name].way is None or not runners[name].way.is_peer)
                    del runners[name]
            self.say(f"{self.case}: round {index + 1} of {arguments.rounds}")
            self.write(runners)
        weights = gathered(digest(list(self.model.parameters())))
        if len(set(weights)) > 1:
            self.missing("all", "the ranks ended with different weights")
        for runner in runners.values():
            runner.close()

    def write(self, runners: dict[str, Runner]) -> None:
        compute_s = statistics.median(self.compute.step_s)
        rows = [self.row(name, runner, compute_s) for name, runner in runners.items()]
        case = self.report.extra.setdefault("case", {})
        case.update(batch=self.arguments.batch, wire_nbytes_from=self.counter.what)
        self.report.rows = rows
        self.report.write()

    def row(self, name: str, runner: Runner, compute_s: float) -> Row:
        seconds = sorted(runner.step_s)
        figures = {}
        if runner.all_ticks:
            figures["cores_busy"] = runner.busy_ticks / runner.all_ticks
        if runner.way is not None:
            exposed_s, sync_s = statistics.median(seconds) - compute_s, statistics.median(runner.sync_s)
            figures.update(sync_s=sync_s, exposed_s=exposed_s, overlap=1 - exposed_s / sync_s)
            figures.update(error=runner.error, tolerance=runner.way.tolerance)
            if runner.sent_nbytes:
                figures["wire_nbytes"] = statistics.median(runner.sent_nbytes)
        return Row(
            case=self.case,
            impl=name,
            numel=self.numel,
            traffic_bytes=4 * self.numel,
            median_s=statistics.median(seconds),
            best_s=seconds[0],
            checked=True,
            percentiles_s=percentiles(seconds),
            figures=figures,
        )


def wait_for(tensor: Tensor) -> None:
    """Waits until the tensor's device has done all it was given."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def digest(tensors: list[Tensor]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().numpy())
    return hashed.hexdigest()


def main() -> None:
    keep_memory()
    torch.set_num_threads(1)
    results, arguments = sys.argv[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the quantization hooks' observers warn in every step
        bench = Bench(argparse.Namespace(**json.loads(arguments)), results)
        bench.run()
        faulthandler.cancel_dump_traceback_later()
    if hvd.is_initialized():
        dist.barrier()
        hvd.shutdown()
    groups.end_together()


if __name__ == "__main__":
    main()
