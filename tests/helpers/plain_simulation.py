"""Local steps in plain torch, in fp64 and one process: what LocalSteps must do, without its code."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Mapping

import torch
from torch import nn

OUTER = {"lr": 0.5, "momentum": 0.9, "nesterov": True}


class Net(nn.Module):
    """Four modules with parameters, so four fragments have one each. So few elements are sent exactly in any wire; with
    a `width` of 100 they are not."""

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
    merge: str
    every: int
    delay: int
    fragments: int = 1
    steps: int = 30
    lr: float = 0.05
    width: int = 8
    weights: str | None = None

    def model(self) -> Net:
        return Net(self.width)

    def period(self) -> int | str:
        """LocalSteps' `every`."""
        return self.every

    def steps_before(self, rank: int, message: int) -> int:
        """The steps that a rank has made when it takes the snapshot of a message."""
        return (message + 1) * self.every // self.fragments

    def weight(self, num_steps: int) -> float:
        """Of a rank that has made so many steps since this fragment's last snapshot."""
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
        self.counted = [0] * run.fragments
        self.under_way: list[tuple] = []  # (fragment, step that merges it, snapshots, what becomes the merged state)
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def note(self) -> None:
        self.seen[self.steps] = flat_of(self.parameters), flat_of(self.merged)

    def train(self, until: int) -> None:
        while self.steps < until:
            self.steps += 1
            self.run.step(self.model, self.optimizer, self.rank, self.steps)
            self.end(lambda _, due: due <= self.steps)
            self.note()

    def end(self, is_due: Callable[[int, int], bool]) -> None:
        """Ends merges: z + (merged − snapshot)."""
        for each in [each for each in self.under_way if is_due(*each[:2])]:
            self.under_way.remove(each)
            for index, (snapshot, merged) in each[2].items():
                self.parameters[index].add_(merged - snapshot)
                self.merged[index] = merged

    def snapshot(self, fragment: int, indices: list[int]) -> tuple[float, dict[int, torch.Tensor]]:
        """(weight, snapshots by index)."""
        self.end(lambda index, _: index == fragment)  # of a window of time that was shorter than the delay
        weight = self.run.weight(self.steps - self.counted[fragment])
        self.counted[fragment] = self.steps
        return weight, {index: self.parameters[index].clone() for index in indices}

    def join(self, first: "Simulated") -> None:
        """Begins with the merged state, and the first member's optimizer and place."""
        self.steps, self.merged = first.steps, [merged.clone() for merged in first.merged]
        torch._foreach_copy_(self.parameters, self.merged)
        self.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))


def simulated(
    run: Run,
    world_size: int,
    takes_part: Callable[[int, int], bool] = lambda rank, message: True,
    joins: Mapping[int, int] | None = None,
) -> list[Simulated]:
    """takes_part(rank, message): whether a rank counts in a mean. joins: by rank, the message before which it joins."""
    ranks = [Simulated(run, rank) for rank in range(world_size)]
    names = [name for name, _ in ranks[0].model.named_parameters()]
    place = {module: i for i, module in enumerate(dict.fromkeys(name.rpartition(".")[0] for name in names))}
    outer = torch.optim.SGD([nn.Parameter(merged.clone()) for merged in ranks[0].merged], **OUTER)
    held = outer.param_groups[0]["params"]
    for message in itertools.count():
        present = [rank for rank in ranks if (joins or {}).get(rank.rank, -1) < message]
        for rank in present:
            rank.train(min(run.steps, run.steps_before(rank.rank, message)))
        for rank in ranks:
            if (joins or {}).get(rank.rank) == message:
                rank.join(ranks[0])
                present.append(rank)
        if any(run.steps_before(rank.rank, message) > run.steps for rank in present):
            return ranks
        fragment = message % run.fragments
        indices = [i for i, name in enumerate(names) if place[name.rpartition(".")[0]] % run.fragments == fragment]
        told = {rank.rank: rank.snapshot(fragment, indices) for rank in present}
        counted = [told[rank.rank] for rank in present if takes_part(rank.rank, message)]
        total = sum(weight for weight, _ in counted)
        outer.zero_grad()
        for index in indices:
            mean = sum(weight * snapshots[index] for weight, snapshots in counted) / total
            if run.merge == "nesterov":
                held[index].grad = held[index].data - mean
            else:
                held[index].data.copy_(mean)
        if run.merge == "nesterov":
            outer.step()
        for rank in present:
            snapshots = told[rank.rank][1]
            pairs = {index: (snapshots[index], held[index].data.clone()) for index in indices}
            rank.under_way.append((fragment, rank.steps + run.delay, pairs))
            rank.end(lambda _, due, now=rank.steps: due <= now)
            rank.note()
