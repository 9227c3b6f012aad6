"""What a rank of bench/step.py does: trains a model in every way in turn, or in one way to measure its memory."""

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _step_ways import MAX_NORM, Way, clip_by_optimizer, ways
from lib.common import Row, give_back_memory, keep_memory, percentiles
from torch import Tensor, nn

from fusedcomm.ranks import groups

WARMUP = 3
LEARNING_RATE = 1e-4
MEMORY_STEPS = 4
BF16_ERROR = 2.0**-8
"""The greatest relative error of a value that is rounded to bf16."""
FP32_ERROR = 2.0**-22
"""Room for the roundings of fp32 in a bf16 way, and in this check."""


class Inputs:
    """What the parameters are multiplied with on each rank, which is also their gradient: normal values. They lie in
    one piece of memory, in which parameters have different places."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._numel = max(torch.Size(shape).numel() for shape in shapes) + len(shapes)
        self._own = self._of_rank(dist.get_rank())
        self.own = self._views(self._own)

    def _of_rank(self, rank: int) -> Tensor:
        return torch.randn(self._numel, generator=torch.Generator().manual_seed(rank))

    def _views(self, values: Tensor) -> list[Tensor]:
        return [values[at : at + torch.Size(shape).numel()].view(shape) for at, shape in enumerate(self.shapes)]

    def of_both(self) -> list[tuple[Tensor, Tensor]]:
        first, second = (self._views(self._of_rank(rank)) for rank in range(2))
        return list(zip(first, second, strict=True))


class Model(nn.Module):
    """The loss is the sum of all parameters' dot products with their inputs."""

    def __init__(self, inputs: Inputs, weights: list[Tensor]) -> None:
        super().__init__()
        self._inputs = [values.flatten() for values in inputs.own]
        self.weights = nn.ParameterList(nn.Parameter(weight) for weight in weights)

    def forward(self) -> Tensor:
        pairs = zip(self.weights, self._inputs, strict=True)
        return torch.stack([torch.dot(weight.flatten(), values) for weight, values in pairs]).sum()


def transformer_shapes(num_layers: int, width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Shapes of an encoder's parameters: embedding, layers with separate projections, last norm."""
    attention = [(width, width), (width,)] * 4
    feed_forward = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    norms = [(width,)] * 4
    return [(vocabulary, width), *[*attention, *norms[:2], *feed_forward, *norms[2:]] * num_layers, *norms[:2]]


@dataclasses.dataclass
class Times:
    """Seconds of a step: until the loss is there, until backward() returns, until the optimizer has stepped."""

    forward_s: float
    backward_s: float
    after_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.after_s


class Runner:
    """One way on this rank. All ways train the same weights with the same optimizer state."""

    def __init__(self, way: Way, inputs: Inputs, weights: list[Tensor], arguments: argparse.Namespace) -> None:
        self.way = way
        model = Model(inputs, weights)
        self.parameters = list(model.parameters())
        self.module, self.front = way.make(model, arguments.cap_mib)
        self.scaler = way.make_scaler(self.front) if arguments.amp else None
        self.optimizer = make_optimizer(self.parameters, arguments)
        self.times: list[Times] = []

    def share_state(self, other: "Runner") -> None:
        for own, others in zip(self.parameters, other.parameters, strict=True):
            self.optimizer.state[own] = other.optimizer.state[others]

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)

    def clip(self) -> Tensor:
        return self.way.clip(self.parameters, self.front, self.optimizer)

    def step(self) -> Times:
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.module()
        computed = time.perf_counter()
        self.backward(loss)
        synchronized = time.perf_counter()
        self.unscale()
        self.clip()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return Times(computed - begin, synchronized - computed, time.perf_counter() - synchronized)

    def check(self, inputs: Inputs) -> None:
        """Raises RuntimeError if the mean, its norm or the clipped gradients are wrong."""
        self.optimizer.zero_grad()
        self.backward(self.module())
        self.unscale()
        square_sum, clipped_sum = 0.0, 0.0
        for index, (parameter, (first, second)) in enumerate(zip(self.parameters, inputs.of_both(), strict=True)):
            if self.way.roundings == 0:
                # Division by two is exact and a sum of two is rounded once, so these are DDP's own bits.
                wrong = parameter.grad != first * 0.5 + second * 0.5
            else:
                relative = (1 + BF16_ERROR) ** self.way.roundings - 1 + FP32_ERROR
                bound = relative * (first.abs() + second.abs()) / 2
                wrong = (parameter.grad.double() - (first.double() + second.double()) / 2).abs() > bound
            self._refuse(bool(wrong.any()), f"{int(wrong.sum())} wrong elements in the mean of parameter {index}")
            square_sum += parameter.grad.double().square().sum().item()
        norm, clipped = self._clipped()
        if self.scaler is not None:
            self.scaler.update()
        self._refuse(abs(norm / square_sum**0.5 - 1) > 1e-4, f"norm {norm} instead of {square_sum**0.5}")
        for gradient in clipped:
            clipped_sum += gradient.double().square().sum().item()
        expected = min(MAX_NORM, square_sum**0.5)
        self._refuse(abs(clipped_sum**0.5 / expected - 1) > 1e-4, f"clipped norm {clipped_sum**0.5}, not {expected}")

    def _clipped(self) -> tuple[float, list[Tensor]]:
        """The norm, and the clipped gradients."""
        if self.way.clip is not clip_by_optimizer:
            return self.clip().item(), [parameter.grad for parameter in self.parameters]
        # What a step of gradient descent subtracts.
        before = [parameter.detach().clone() for parameter in self.parameters]
        descent = torch.optim.SGD(self.parameters, lr=1.0, fused=True)
        norm = self.way.clip(self.parameters, self.front, descent).item()
        descent.step()
        with torch.no_grad():
            clipped = [value - parameter for value, parameter in zip(before, self.parameters, strict=True)]
            for value, parameter in zip(before, self.parameters, strict=True):
                parameter.copy_(value)
        return norm, clipped

    def _refuse(self, is_wrong: bool, text: str) -> None:
        if is_wrong:
            raise RuntimeError(f"{self.way.name}: rank {dist.get_rank()}: {text}")

    def close(self) -> None:
        self.optimizer.zero_grad()
        if self.front is not None:
            self.front.detach()


def make_optimizer(parameters: list[nn.Parameter], arguments: argparse.Namespace) -> torch.optim.Optimizer:
    fused = True if arguments.fused else None  # None: torch chooses
    if arguments.optimizer == "adamw":
        return torch.optim.AdamW(parameters, LEARNING_RATE, fused=fused)
    return torch.optim.SGD(parameters, LEARNING_RATE, momentum=0.9, fused=fused)


def begin(arguments: argparse.Namespace) -> tuple[Inputs, list[Tensor]]:
    """(the inputs, the weights, equal on all ranks)."""
    torch.set_num_threads(1)
    shapes = transformer_shapes(arguments.layers, arguments.width, arguments.vocabulary)
    generator = torch.Generator().manual_seed(2)
    return Inputs(shapes), [torch.randn(shape, generator=generator) for shape in shapes]


def chosen(arguments: argparse.Namespace) -> list[Way]:
    return [way for way in ways(arguments.fused) if not arguments.ways or way.name in arguments.ways]


def measure_times(arguments: argparse.Namespace, results: str) -> int:
    """Runs on every rank; rank 0 writes the rows to the file `results`. Returns the exit status."""
    keep_memory()
    inputs, weights = begin(arguments)
    runners = [Runner(way, inputs, weights, arguments) for way in chosen(arguments)]
    runners[0].step()  # makes the optimizer's state
    for runner in runners[1:]:
        runner.share_state(runners[0])
    for runner in runners:
        for _ in range(WARMUP):  # DDP and the reducer rebuild their buckets after the first step
            runner.step()
        runner.check(inputs)
        runner.optimizer.zero_grad()
    for turn in range(-1, arguments.rounds):
        first = turn % len(runners)
        for runner in runners[first:] + runners[:first]:
            dist.barrier()
            times = runner.step()
            runner.optimizer.zero_grad()
            if turn >= 0:
                runner.times.append(times)
    rows = [make_row(runner, arguments) for runner in runners]
    refuse_different(weights)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    for runner in runners:
        runner.close()
    groups.end_together()
    return 0


def refuse_different(weights: list[Tensor]) -> None:
    """Raises RuntimeError if the ranks' weights differ."""
    sums = torch.stack([weight.double().sum() for weight in weights])
    others = [torch.empty_like(sums) for _ in range(dist.get_world_size())]
    dist.all_gather(others, sums)
    if not all(torch.equal(sums, other) for other in others):
        raise RuntimeError("the ranks ended with different weights")


def make_row(runner: Runner, arguments: argparse.Namespace) -> Row:
    """The times of each step are the slowest rank's."""
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, runner.times)

    def slowest(name: str) -> list[float]:
        return [max(getattr(times, name) for times in of_step) for of_step in zip(*of_ranks, strict=True)]

    seconds = slowest("step_s")
    numel = sum(parameter.numel() for parameter in runner.parameters)
    medians = {name: statistics.median(slowest(name)) for name in ("forward_s", "backward_s", "after_s")}
    return Row(
        case=case_of(arguments, len(runner.parameters)),
        impl=runner.way.name,
        numel=numel,
        traffic_bytes=4 * numel,
        median_s=statistics.median(seconds),
        best_s=min(seconds),
        checked=True,
        percentiles_s=percentiles(seconds),
        figures=medians,
    )


def case_of(arguments: argparse.Namespace, num_tensors: int) -> str:
    optimizer = f"{'fused ' if arguments.fused else ''}{arguments.optimizer}{', GradScaler' if arguments.amp else ''}"
    return f"step/{num_tensors} tensors, {optimizer}"


def measure_memory(arguments: argparse.Namespace, name: str, results: str) -> int:
    """Runs on every rank, in processes that do nothing else. Rank 0 writes the greatest peaks of a rank's memory to the
    file `results`: in the first steps, and in later ones, in bytes. Returns the exit status."""
    give_back_memory()
    inputs, weights = begin(arguments)
    (way,) = [way for way in ways() if way.name == name]
    reset_peak()
    runner = Runner(way, inputs, weights, arguments)
    peaks = []
    for num_steps in (WARMUP, MEMORY_STEPS):
        for _ in range(num_steps):
            runner.step()
        peaks.append(peak_nbytes())
        reset_peak()
    greatest = torch.tensor(peaks)
    dist.all_reduce(greatest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(greatest.tolist()))
    runner.close()
    groups.end_together()
    return 0


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak_nbytes() -> int:
    """Most bytes of memory that this process has had at a time since reset_peak()."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
