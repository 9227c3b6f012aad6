"""What the tests of ShardedOptimizer train, with owners and with the same optimizer on every rank."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from models import Conv, normal, reducer_of
from torch import nn
from torch.distributed.tensor import DTensor

import fusedcomm
from fusedcomm.config import Config

FP32 = Config("fp32", sum="two-shot")
# Small enough that every model here has several buckets.
BUCKET_MIB = 1 / 256


class Net(nn.Module):
    """Sizes that no number of ranks divides; three matrices of one shape."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(45, 5)
        self.blocks = nn.ModuleList(nn.Linear(33, 33) for _ in range(3))
        self.wide = nn.Linear(33, 45, bias=False)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.wide(self.norm(x))).float()


class Scaled(Net):
    """With a parameter without dimensions, as the temperature of a loss may be."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def bf16_net() -> Net:
    return Net(torch.bfloat16)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight.requires_grad_(False)
        self.norm.bias.requires_grad_(False)


class Branches(nn.Module):
    """No rank uses `never`, `sometimes` is used in every other step, and `parity` by every other rank."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(7, 33), nn.Linear(33, 5)
        self.never, self.sometimes, self.parity = nn.Linear(33, 33), nn.Linear(33, 33), nn.Linear(33, 33)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        x = torch.tanh(self.trunk(x))
        if self.step % 2:
            x = x + self.sometimes(x)
        if (dist.get_rank() + self.step) % 2:
            x = x + self.parity(x)
        return self.head(x)


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        kind: names groups of groups_of(), or is the class of an optimizer.
        front: "reducer" or "parallel".
        accumulate: backward passes in a step, all but the last in no_sync().
        scaled: whether losses are scaled, and two steps have an Inf on the last rank.
        scheduled: whether learning rates and momenta change in every step.
        max_norm: if gradients are clipped.
        restore: if gradients are taken elsewhere, as by SAM: puts the parameters' values back before a step.
    """

    model: Callable[[], nn.Module] = Net
    kind: str | type[torch.optim.Optimizer] = "adamw"
    front: str = "reducer"
    config: Config = FP32
    update: str = "fp32"
    accumulate: int = 1
    find_unused: bool = False
    scaled: bool = False
    scheduled: bool = False
    restore: Callable[[nn.Module, list[torch.Tensor]], None] | None = None
    max_norm: float | None = None


def groups_of(model: nn.Module, kind: str | type[torch.optim.Optimizer]) -> list[dict]:
    """Groups of the model's trained parameters, each with its optimizer_class and all hyperparameters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, rest = [p for p in trained if p.dim() == 2], [p for p in trained if p.dim() != 2]
    adamw = {"optimizer_class": torch.optim.AdamW, "lr": 0.01, "weight_decay": 0.1}
    if kind == "adamw":
        return [{**adamw, "params": trained}]
    if kind == "two groups":
        return [{**adamw, "params": matrices}, {**adamw, "params": rest, "lr": 0.003, "weight_decay": 0.0}]
    if kind == "named":
        return [{**adamw, "params": list(model.named_parameters())}]
    if kind == "named groups":
        pairs = list(model.named_parameters())
        return [{**adamw, "params": pairs[:3]}, {**adamw, "params": pairs[3:], "optimizer_class": torch.optim.Adam}]
    if kind == "sgd":
        sgd = {"optimizer_class": torch.optim.SGD, "lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}
        return [{**sgd, "params": trained}]
    if kind == "muon":
        return [
            {"optimizer_class": torch.optim.Muon, "params": matrices, "lr": 0.02, "weight_decay": 0.1},
            {**adamw, "params": rest},
        ]
    # Of the second group several ranks own nothing if parameters are whole.
    parts = matrices, [p for p in rest if p is model.norm.weight], [p for p in rest if p is not model.norm.weight]
    rates = 0.01, 0.01, 0.02
    return [{"optimizer_class": kind, "params": part, "lr": lr} for part, lr in zip(parts, rates, strict=True)]


def plain_optimizers(model: nn.Module, kind: str | type[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """torch's optimizers of groups_of(), one for each class."""
    groups = groups_of(model, kind)
    made = []
    for each in dict.fromkeys(group["optimizer_class"] for group in groups):
        own = [
            {key: value for key, value in group.items() if key != "optimizer_class"}
            for group in groups
            if group["optimizer_class"] is each
        ]
        made.append(each(own))
    return made


def sharded(
    model: nn.Module, reducer: object, kind: str | type = "adamw", **kwargs: object
) -> fusedcomm.ShardedOptimizer:
    """A quiet ShardedOptimizer of groups_of(). `kwargs`: further arguments."""
    groups = groups_of(model, kind)
    main = groups[0]["optimizer_class"]
    if kind == "named":  # not in a group
        (group,) = groups
        given = iter(group.pop("params"))
        return fusedcomm.ShardedOptimizer(reducer, main, given, quiet=True, lr=0.01, weight_decay=0.1, **kwargs)
    return fusedcomm.ShardedOptimizer(reducer, main, groups, quiet=True, **kwargs)


def made(kind: str = "adamw", model: Callable[[], nn.Module] = Net, config: Config = FP32, **kwargs: object) -> tuple:
    """(model, reducer, ShardedOptimizer). `kwargs`: the optimizer's, and `find_unused` of the reducer."""
    torch.manual_seed(5)
    net = model()
    finds_unused = kwargs.pop("find_unused", False)
    reducer = reducer_of(net, config, bucket_mib=BUCKET_MIB, find_unused_parameters=finds_unused)
    return net, reducer, sharded(net, reducer, kind, **kwargs)


def whole(state: dict) -> dict:
    """A state_dict() with plain tensors."""
    of_tensors = {
        number: {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in values.items()}
        for number, values in state["state"].items()
    }
    return {"state": of_tensors, "param_groups": state["param_groups"]}


def unequal(a: dict, b: dict) -> list:
    """What differs between two states: (number or name, key) of tensors, and keys of groups."""
    found = [] if a["state"].keys() == b["state"].keys() else ["numbers"]
    for number in a["state"].keys() & b["state"].keys():
        mine, other = a["state"][number], b["state"][number]
        if mine.keys() != other.keys():
            found.append((number, sorted(mine.keys() ^ other.keys())))
        for key in mine.keys() & other.keys():
            x, y = torch.as_tensor(mine[key]), torch.as_tensor(other[key])
            if x.shape != y.shape or x.dtype != y.dtype or not torch.equal(x, y):
                found.append((number, key))
    for mine, other in zip(a["param_groups"], b["param_groups"], strict=True):
        found += [key for key in mine.keys() & other.keys() if listed(mine[key]) != listed(other[key])]
    return found


def listed(value: object) -> object:
    """Tuples come back from torch's functions as lists."""
    return list(value) if isinstance(value, tuple) else value


def differs(values: torch.Tensor) -> bool:
    """Whether the ranks' values (fp32 [numel]) have other bits."""
    of_all = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, values)
    return any(not torch.equal(each.view(torch.int32), values.view(torch.int32)) for each in of_all)


def by_data(model: nn.Module, values: list[torch.Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.data.copy_(value)


def by_new_data(model: nn.Module, values: list[torch.Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = value.clone()


def flat(model: nn.Module) -> torch.Tensor:
    """A copy of all parameters: [numel], in one dtype."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def loss_of(forward: nn.Module, rank: int, step: int, part: int = 0) -> torch.Tensor:
    """Signed, different on every rank, in every step and in every part of a step."""
    takes_images = isinstance(getattr(forward, "module", forward), Conv)
    device = next(forward.parameters()).device
    x = normal(rank, 10 * step + part, (4, 3, 8, 8) if takes_images else (6, 7)).to(device)
    return (forward(x) - normal(0, 10 * step + part + 1, (len(x), 5)).to(device)).square().mean()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """zero_grad(), a backward pass and a step."""
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def _spoiled(model: nn.Module) -> torch.Tensor:
    """A loss whose gradient is Inf in one element of one parameter."""
    first = next(p for p in model.parameters() if p.requires_grad)
    return (first * torch.where(torch.arange(first.numel()).view_as(first) == 3, torch.inf, 0.0).to(first)).sum()


def clip(model: nn.Module, max_norm: float, owners: fusedcomm.ShardedOptimizer | None) -> None:
    """Clips by the owners' norm, or by the same arithmetic on the means in p.grad."""
    if owners is not None:
        assert torch.equal(owners.grad_norm(), owners.grad_norm())  # it changes nothing
        norm = owners.clip_grad_norm_(max_norm)
        assert norm.dtype == torch.float32 and norm.dim() == 0
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum(gradient.double().square().sum() for gradient in gradients).sqrt().float()
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(gradients), rtol=1e-6, atol=0)
    for gradient in gradients:
        gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def train(way: Way, rank: int, world_size: int, steps: int, owners: bool, device: str = "cpu") -> list:
    """(parameters, scale of the loss, groups without their parameters) after each step. owners: whether a
    ShardedOptimizer steps; otherwise every rank runs torch's optimizers on the means."""
    torch.manual_seed(5)
    model = way.model().to(device)
    options = {"find_unused_parameters": way.find_unused, "quiet": True}
    if way.front == "parallel":
        forward = given = fusedcomm.DataParallel(model, config=way.config, bucket_cap_mb=BUCKET_MIB, **options)
        reducer = forward.comm
    else:
        forward = model
        reducer = given = fusedcomm.GradReducer(model, way.config, bucket_mib=BUCKET_MIB, **options)
    if owners:
        optimizers = [sharded(model, given, way.kind, update=way.update)]
    else:
        optimizers = plain_optimizers(model, way.kind)
    make_scaler = optimizers[0].grad_scaler if owners else torch.amp.GradScaler
    scaler = make_scaler(device, init_scale=2.0**10, growth_interval=3, enabled=way.scaled)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(
            each, [3 * group["lr"] for group in each.param_groups], total_steps=steps + 1
        )
        for each in (optimizers if way.scheduled else [])
    ]

    def backward(step: int, part: int) -> None:
        if way.config.weighted is not None:
            reducer.weight = (rank + step) % 3
        loss = loss_of(forward, rank, step, part)
        if way.scaled and step in (2, 7) and rank == world_size - 1:
            loss = loss + _spoiled(model)
        scaler.scale(loss).backward()

    seen = []
    for step in range(steps):
        old = [p.detach().clone() for p in model.parameters()]
        if way.restore:
            with given.no_sync():
                backward(step, 0)
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=0.1)
            model.zero_grad()
        for part in range(way.accumulate):
            with given.no_sync() if part + 1 < way.accumulate else contextlib.nullcontext():
                backward(step, part)
        if way.restore:
            way.restore(model, old)
        if way.max_norm is not None:
            clip(model, way.max_norm, optimizers[0] if owners else None)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        groups = [
            {k: copy.copy(v) for k, v in each.items() if k != "params"} for o in optimizers for each in o.param_groups
        ]
        seen.append((flat(model).cpu(), scaler.get_scale(), groups))
    reducer.detach()
    return seen
