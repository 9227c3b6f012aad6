"""Trains one network in several ways, one after another, and measures what each learns and sends."""

import dataclasses
import sys
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
from fusedcomm.tools.tcp_counter import tcp_nbytes_sent

BATCH_PER_RANK = 32
LEARNING_RATE = 0.05
MOMENTUM = 0.9
DEFAULT_NAME, STOCK_FP16_NAME = "DDP default", "DDP fp16 hook"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The measurements of one run on all ranks; the same on every rank."""

    name: str  # the way of synchronizing
    seed: int
    accuracy: float  # on the test digits
    final_loss: float  # on all training digits, after the last step
    wire_bytes_per_step: float | None  # sent by a rank over TCP, mean over ranks; None: not measurable here
    ranks_identical: bool  # every rank ended with the same parameters, bit for bit


def train(num_steps: int, num_seeds: int, wires: tuple[str, ...]) -> list[RunResult]:
    """Trains every way of synchronizing with every seed; collective over the default process group. Differences between
    the seeds of one way are noise."""
    torch.set_num_threads(1)  # the ranks share the cores
    digits = Digits.of_this_rank()
    ways: dict[str, str | None] = {DEFAULT_NAME: None, STOCK_FP16_NAME: None}
    ways |= {f"fusedcomm {wire}": wire for wire in wires}
    results, total = [], num_seeds * len(ways) * num_steps
    # A log file keeps every update of the bar, so there are few.
    every_s = 0.1 if sys.stderr.isatty() else 5
    with output.bar(total=total, unit="step", disable=dist.get_rank() != 0, mininterval=every_s) as bar:
        for seed in range(num_seeds):
            for name, wire in ways.items():
                bar.set_description(f"{name:<14}", refresh=False)
                run = Run(name, wire, seed, digits, num_steps)
                for _ in range(num_steps):
                    run.step()
                    bar.update()
                results.append(run.finish())
    return results


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


class Run:
    """One network under one way of synchronizing, and its measurements on this rank. wire: fusedcomm's, if it is."""

    def __init__(self, name: str, wire: str | None, seed: int, digits: Digits, num_steps: int) -> None:
        self._name, self._seed, self._digits, self._num_steps = name, seed, digits, num_steps
        self._batches = digits.batches(seed)
        torch.manual_seed(seed)
        self._network = network()
        self._ddp = DistributedDataParallel(self._network)
        self._comm = None if wire is None else fusedcomm.attach(self._ddp, wire, quiet=True)
        if name == STOCK_FP16_NAME:
            self._ddp.register_comm_hook(None, fp16_compress_hook)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        # The learning rate falls to zero: at a constant rate the last loss spike would decide the final loss.
        self._schedule = torch.optim.lr_scheduler.LinearLR(self._optimizer, 1, 0, total_iters=num_steps)
        dist.barrier()  # what attaching sends is not counted
        self._sent_before = tcp_nbytes_sent()

    def step(self) -> None:
        """Takes a step. Collective over the default process group, as the method below."""
        images, labels = next(self._batches)
        self._optimizer.zero_grad()
        F.cross_entropy(self._ddp(images), labels).backward()
        self._optimizer.step()
        self._schedule.step()

    @torch.no_grad()
    def finish(self) -> RunResult:
        """Evaluates the network and detaches fusedcomm."""
        dist.barrier()
        before, after = self._sent_before, tcp_nbytes_sent()
        sent_nbytes = _of_all_ranks(-1 if before is None or after is None else after - before)
        mine = nn.utils.parameters_to_vector(self._network.parameters())
        firsts = mine.clone()
        dist.broadcast(firsts, src=0)
        predicted = self._network(self._digits.test_images).argmax(dim=1)
        final_loss = F.cross_entropy(self._network(self._digits.train_images), self._digits.train_labels)
        if self._comm is not None:
            self._comm.detach()
        return RunResult(
            name=self._name,
            seed=self._seed,
            accuracy=(predicted == self._digits.test_labels).double().mean().item(),
            final_loss=final_loss.item(),
            wire_bytes_per_step=sent_nbytes.mean().item() / self._num_steps if sent_nbytes.min() >= 0 else None,
            ranks_identical=bool(_of_all_ranks(torch.equal(mine.view(torch.int32), firsts.view(torch.int32))).all()),
        )


def _of_all_ranks(value: float) -> Tensor:
    """The values of all ranks: float64 [world_size], the same on every rank."""
    mine = torch.tensor([value], dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return torch.cat(gathered)
