"""Local steps in plain torch, in fp64 and one process: what LocalSteps must do, without its code."""

import dataclasses

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
    every: int | str
    """Of the simulation steps."""
    delay: int
    fragments: int = 1
    steps: int = 30
    lr: float = 0.05
    width: int = 8

    def model(self) -> Net:
        return Net(self.width)

    def has_turn(self, fragment: int, step: int) -> bool:
        """Whether a merge of this fragment begins after a step."""
        first = (fragment + 1) * self.every // self.fragments
        return step >= first and (step - first) % self.every == 0

    def loss(self, model: nn.Module, rank: int, step: int) -> torch.Tensor:
        """Every rank has its own task, so the ranks drift apart."""
        like = next(model.parameters())
        generator = torch.Generator().manual_seed(1000 * rank + step)
        x = torch.randn(8, 6, generator=generator).to(like)
        y = torch.sin(x[:, :3] * (rank + 1)) - 0.2 * rank
        return (model(x) - y).square().mean()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.8)

    def num_steps(self, rank: int) -> int:
        return self.steps

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
        optimizer.zero_grad()
        loss = self.loss(model, rank, step)
        loss.backward()
        optimizer.step()
        return loss.item()


def simulated(run: Run, world_size: int) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """fp64: (each rank's parameters after each step, flat; the merged state at the end)."""
    models = [run.model().double() for _ in range(world_size)]
    optimizers = [run.optimizer(model) for model in models]
    ours = [list(model.parameters()) for model in models]
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name, _ in models[0].named_parameters()))
    members: list[list[int]] = [[] for _ in range(run.fragments)]
    for index, (name, _) in enumerate(models[0].named_parameters()):
        members[modules.index(name.rpartition(".")[0]) % run.fragments].append(index)
    anchors = [parameter.detach().clone() for parameter in ours[0]]
    outer = torch.optim.SGD([nn.Parameter(anchor) for anchor in anchors], **OUTER)
    held = outer.param_groups[0]["params"]  # they share the anchors' memory
    snapshots: dict[int, tuple[int, list[list[torch.Tensor]]]] = {}
    seen: list[list[torch.Tensor]] = [[] for _ in range(world_size)]

    def merge(fragment: int) -> None:
        _, of_ranks = snapshots.pop(fragment)
        for place, index in enumerate(members[fragment]):
            old = anchors[index].clone()
            mean = torch.stack([of_rank[place] for of_rank in of_ranks]).mean(0)
            if run.merge == "nesterov":
                held[index].grad = old - mean
            else:
                anchors[index].copy_(mean)
        if run.merge == "nesterov":
            outer.step()
            outer.zero_grad()
        for rank in range(world_size):
            for place, index in enumerate(members[fragment]):
                now, merged, snapshot = ours[rank][index].data, anchors[index], of_ranks[rank][place]
                if run.merge == "average":
                    now.copy_(merged)
                else:
                    now.copy_(now + (merged - snapshot))

    for step in range(1, run.steps + 1):
        for rank in range(world_size):
            run.step(models[rank], optimizers[rank], rank, step)
        with torch.no_grad():
            for fragment in [f for f, (began, _) in snapshots.items() if began + run.delay == step]:
                merge(fragment)
            for fragment in range(run.fragments):
                if run.has_turn(fragment, step):
                    taken = [[ours[r][i].detach().clone() for i in members[fragment]] for r in range(world_size)]
                    snapshots[fragment] = (step, taken)
                    if run.delay == 0:
                        merge(fragment)
        for rank in range(world_size):
            seen[rank].append(torch.cat([parameter.detach().flatten() for parameter in ours[rank]]))
    return seen, anchors
