"""Trains one network in several ways, and measures each.

The runs take turns in short slices, so other load on this machine slows all of them alike.
"""

import dataclasses
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.tools import output
from fusedcomm.tools.demo.results import DEFAULT_NAME, STOCK_FP16_NAME, RunResult, RunSpec
from fusedcomm.tools.tcp_counter import tcp_nbytes_sent

BATCH_PER_RANK = 32
LEARNING_RATE = 0.05
MOMENTUM = 0.9
# Steps of a run before it is the next run's turn.
SLICE_STEPS = 20
# The first steps are not measured: DDP rebuilds its buckets, and caches and allocators fill.
WARMUP_STEPS = 10
REDUCER_WIRE = "bf16"


def run_specs(num_seeds: int, wires: tuple[str, ...]) -> list[RunSpec]:
    """Every way of synchronizing with every seed. Differences between the seeds of one way are noise.

    One wire, REDUCER_WIRE if it is among `wires`, is also run with GradReducer instead of DDP.
    """
    of_reducer = REDUCER_WIRE if REDUCER_WIRE in wires else wires[0]
    ways = [(DEFAULT_NAME, "fp32", False), (STOCK_FP16_NAME, "fp16", False)]
    ways += [(f"fusedcomm {wire}", wire, False) for wire in wires]
    ways.append((f"fusedcomm {of_reducer} reducer", of_reducer, True))
    return [RunSpec(name, wire, seed, has_reducer) for seed in range(num_seeds) for name, wire, has_reducer in ways]


def train(specs: list[RunSpec], num_steps: int) -> list[RunResult]:
    """Trains every run for `num_steps`; collective over the default process group."""
    torch.set_num_threads(1)  # the ranks share the cores
    digits = Digits.of_this_rank()
    runs = [Run(spec, digits, num_steps) for spec in specs]
    # A log file keeps every update of the bar, so there are few.
    seconds_between_updates = 0.1 if sys.stderr.isatty() else 5
    with output.bar(
        total=len(runs) * num_steps, unit="step", disable=dist.get_rank() != 0, mininterval=seconds_between_updates
    ) as bar:
        for turn, slice_steps, measured in _slices(num_steps):
            for run in runs[turn % len(runs) :] + runs[: turn % len(runs)]:  # no run always goes first
                bar.set_description(f"{run.spec.name:<22}", refresh=False)
                run.train_slice(slice_steps, measured)
                bar.update(slice_steps)
    return [run.finish() for run in runs]


def _slices(num_steps: int) -> Iterator[tuple[int, int, bool]]:
    """(turn, number of steps, whether they are measured) of each slice. The warm-up comes first."""
    warmup_steps = min(WARMUP_STEPS, num_steps // 2)
    if warmup_steps:
        yield 0, warmup_steps, False
    for turn, begin in enumerate(range(warmup_steps, num_steps, SLICE_STEPS), start=1):
        yield turn, min(SLICE_STEPS, num_steps - begin), True


@dataclasses.dataclass(frozen=True)
class Digits:
    """scikit-learn's 8×8 handwritten digits. Images float32 [n, 1, 8, 8] in 0…1, labels int64 [n]."""

    shard_images: Tensor  # this rank's training digits; every rank has the same number
    shard_labels: Tensor
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @staticmethod
    def of_this_rank() -> "Digits":
        """The digits as this rank of the default process group trains them. Needs scikit-learn."""
        images, labels = load_digits(return_X_y=True)
        images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
        split = train_test_split(images, labels.astype(np.int64), test_size=0.3, random_state=0, stratify=labels)
        train_images, test_images, train_labels, test_labels = map(torch.from_numpy, split)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        shared = len(train_labels) // world_size * world_size
        shard = slice(rank, shared, world_size)
        return Digits(train_images[shard], train_labels[shard], train_images, train_labels, test_images, test_labels)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (images, labels) of this rank without end, in a new order each epoch."""
        generator = torch.Generator().manual_seed(seed)
        batch = min(BATCH_PER_RANK, len(self.shard_labels))
        while True:
            order = torch.randperm(len(self.shard_labels), generator=generator)
            for chosen in order[: len(order) // batch * batch].view(-1, batch):
                yield self.shard_images[chosen], self.shard_labels[chosen]


def network() -> nn.Module:
    """A convolutional network. With 284,000 parameters, headers and padding do not matter on the wire."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def synchronized(model: nn.Module, spec: RunSpec) -> tuple[nn.Module, fusedcomm.Handle | fusedcomm.GradReducer | None]:
    """(the module to call, what synchronizes, if it is fusedcomm's)."""
    if spec.has_reducer:
        return model, fusedcomm.GradReducer(model, spec.wire, quiet=True)
    ddp = DistributedDataParallel(model)
    if spec.name == DEFAULT_NAME:
        return ddp, None
    if spec.name == STOCK_FP16_NAME:
        ddp.register_comm_hook(None, fp16_compress_hook)
        return ddp, None
    return ddp, fusedcomm.attach(ddp, spec.wire, quiet=True)


class Run:
    """One network under one way of synchronizing, and its measurements on this rank."""

    def __init__(self, spec: RunSpec, digits: Digits, num_steps: int):
        self.spec = spec
        self._digits = digits
        self._batches = digits.batches(spec.seed)
        torch.manual_seed(spec.seed)
        self._network = network()
        self._forward, self._comm = synchronized(self._network, spec)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        # The learning rate falls to zero: at a constant rate the last loss spike would decide the final loss.
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1, 0, total_iters=num_steps)

        self._last_gradient_s = 0.0
        for parameter in self._network.parameters():
            parameter.register_post_accumulate_grad_hook(self._stamp)

        self._losses: list[Tensor] = []
        self._step_s: list[float] = []
        self._exposed_s: list[float] = []
        self._sent_nbytes: int | None = 0

    def train_slice(self, num_steps: int, measured: bool) -> None:
        """Takes `num_steps` steps. Collective over the default process group."""
        # The barriers keep the bytes and slow ranks of one run out of the next run's measurements.
        dist.barrier()
        before = tcp_nbytes_sent()
        timings = [self._step() for _ in range(num_steps)]
        dist.barrier()
        after = tcp_nbytes_sent()
        if not measured:
            return
        for step_s, exposed_s in timings:
            self._step_s.append(step_s)
            self._exposed_s.append(exposed_s)
        countable = None not in (before, after, self._sent_nbytes)
        self._sent_nbytes = self._sent_nbytes + after - before if countable else None

    def finish(self) -> RunResult:
        """Evaluates the network and detaches fusedcomm. Collective over the default process group."""
        sent_nbytes = _of_all_ranks([-1 if self._sent_nbytes is None else self._sent_nbytes])
        result = RunResult(
            spec=self.spec,
            accuracy=self._accuracy(),
            final_loss=self._train_loss(),
            wire_bytes_per_step=sent_nbytes.mean() / len(self._step_s) if sent_nbytes.min() >= 0 else None,
            step_ms=1e3 * _of_all_ranks(self._step_s).ravel(),
            exposed_ms=1e3 * _of_all_ranks(self._exposed_s).ravel(),
            loss_curve=_of_all_ranks(self._losses).mean(axis=0).tolist(),
            ranks_identical=self._ranks_identical(),
        )
        if self._comm is not None:
            self._comm.detach()
        return result

    def _stamp(self, _parameter: Tensor) -> None:
        self._last_gradient_s = time.perf_counter()

    def _step(self) -> tuple[float, float]:
        """Takes a step. Returns its seconds, and the seconds from the last gradient to the end of the backward pass."""
        images, labels = next(self._batches)
        begin_s = time.perf_counter()
        self._optimizer.zero_grad()
        loss = F.cross_entropy(self._forward(images), labels)
        loss.backward()
        backward_end_s = time.perf_counter()
        self._optimizer.step()
        end_s = time.perf_counter()
        self._schedule.step()
        self._losses.append(loss.detach())
        return end_s - begin_s, backward_end_s - self._last_gradient_s

    @torch.no_grad()
    def _accuracy(self) -> float:
        predicted = self._network(self._digits.test_images).argmax(dim=1)
        return (predicted == self._digits.test_labels).double().mean().item()

    @torch.no_grad()
    def _train_loss(self) -> float:
        return F.cross_entropy(self._network(self._digits.train_images), self._digits.train_labels).item()

    def _ranks_identical(self) -> bool:
        """Whether all ranks have the same parameters, bit for bit."""
        mine = nn.utils.parameters_to_vector(self._network.parameters()).detach()
        theirs = mine.clone()
        dist.broadcast(theirs, src=0)
        same = torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
        return bool(_of_all_ranks([same]).all())


def _of_all_ranks(values: list) -> np.ndarray:
    """The values of all ranks: float64 [world_size, len(values)], the same on every rank."""
    mine = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return torch.stack(gathered).numpy()
