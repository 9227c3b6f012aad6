"""Local steps in plain torch, in fp64 and one process: what LocalSteps must do, without its code."""

import dataclasses
import itertools

import torch
from torch import nn


class Net(nn.Module):
    """So few elements are sent exactly in any wire; with a `width` of 100 they are not."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.Sequential(
            nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 3)
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@dataclasses.dataclass(frozen=True)
class Run:
    every: int
    delay: int
    steps: int = 30
    lr: float = 0.05
    width: int = 8

    def model(self) -> Net:
        return Net(self.width)

    def period(self) -> int | str:
        """LocalSteps' `every`."""
        return self.every

    def steps_before(self, rank: int, message: int) -> int:
        """The steps that a rank has made when it takes the snapshot of a message."""
        return (message + 1) * self.every

    def weight(self, num_steps: int) -> float:
        """Of a rank that has made so many steps since its last snapshot."""
        return 1.0

    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        """Every rank has its own task, so the ranks drift apart."""
        like = next(model.parameters())
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(8, 6, generator=generator).to(like)
        y = torch.sin(x[:, :3] * (rank + 1)) - 0.2 * rank
        return (model(x) - y).square().mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.8)

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
        optimizer.zero_grad()
        self.loss(model, rank, step).backward()
        optimizer.step()


def flat_of(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).clone()


class Simulated:
    """One rank. `seen`: by step, the parameters and the merged state after it; both flat."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank, self.model = run, rank, run.model().double()
        self.optimizer, self.steps = run.optimizer(self.model), 0
        self.parameters = [parameter.data for parameter in self.model.parameters()]
        self.merged = [parameter.clone() for parameter in self.parameters]
        self.counted = 0
        self.under_way: tuple | None = None  # (step that merges it, snapshots, what becomes the merged state)
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self) -> None:
        self.seen[self.steps] = flat_of(self.parameters), flat_of(self.merged)

    def train(self, until: int) -> None:
        while self.steps < until:
            self.steps += 1
            self.run.step(self.model, self.optimizer, self.rank, self.steps)
            self.end_due()
            self.note()

    def end_due(self) -> None:
        if self.under_way and self.under_way[0] <= self.steps:
            self.end()

    def end(self) -> None:
        """Ends the merge under way: z + (merged − snapshot)."""
        _, snapshots, self.merged = self.under_way
        self.under_way = None
        for parameter, snapshot, merged in zip(self.parameters, snapshots, self.merged, strict=True):
            parameter.add_(merged - snapshot)

    def snapshot(self) -> tuple[float, list[torch.Tensor]]:
        """(weight, snapshots)."""
        if self.under_way:  # a window of time was shorter than the delay
            self.end()
        weight = self.run.weight(self.steps - self.counted)
        self.counted = self.steps
        return weight, [parameter.clone() for parameter in self.parameters]


def simulated(run: Run, world_size: int) -> list[Simulated]:
    ranks = [Simulated(run, rank) for rank in range(world_size)]
    for message in itertools.count():
        for rank in ranks:
            rank.train(min(run.steps, run.steps_before(rank.rank, message)))
        if any(run.steps_before(rank.rank, message) > run.steps for rank in ranks):
            return ranks
        told = [rank.snapshot() for rank in ranks]
        total = sum(weight for weight, _ in told)
        means = [
            sum(weight * snapshots[index] for weight, snapshots in told) / total
            for index in range(len(ranks[0].merged))
        ]
        for rank, (_, snapshots) in zip(ranks, told, strict=True):
            rank.under_way = (rank.steps + run.delay, snapshots, [mean.clone() for mean in means])
            rank.end_due()
            rank.note()
