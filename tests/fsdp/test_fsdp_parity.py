"""fusedcomm on FSDP2 beside FSDP2 as it comes, one way to use FSDP2 at a time: the same steps give the same gradients.
What FSDP2 has in common with other front ends is in tests/test_like_ddp.py.

In wire fp32 sums are added in fp32, in the order of ranks. On two ranks that gives the same bits as gloo in every step.
Elsewhere sums may be added in another order.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from models import worst
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fusedcomm
from fusedcomm.config import Config

NUM_STEPS = 3


class Model(nn.Module):
    """Of sizes that no number of ranks divides, unless others are given. `spare` is left out where a test says so.

    is_tied: two blocks have a parameter in common. Only parameters of one parameter group can be one.
    """

    def __init__(self, width: int = 33, hidden: int = 71, is_tied: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(7, width), nn.Linear(width, 7, bias=False)
        layers = [
            (nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)) for _ in range(3)
        ]
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in layers)
        self.spare = nn.Linear(width, width)
        self.uses_spare = True
        if is_tied:
            self.blocks[2][1].weight = self.blocks[0][1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.uses_spare:
            x = self.spare(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- what is done in a step


def _once(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(5, model.embed.in_features, generator=generator)).square().mean().backward()


def _reduce_twice(model: nn.Module, rank: int, step: int) -> None:
    """Two passes that both reduce: the second adds to the first's result."""
    for i in range(2):
        _once(model, rank, 10 * step + i)


def _leave_out(model: nn.Module, rank: int, step: int) -> None:
    model.uses_spare = step % 2 == 0
    _once(model, rank, step)


# ---- what is changed after fully_shard


def _each(model: nn.Module, change: Callable[[FSDPModule], None]) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            change(module)


def _divide(factor: float, is_forced: bool) -> Callable[[nn.Module, bool], None]:
    """gloo takes factors only where sums are forced, so the plain model forces them in every case."""

    def change(model: nn.Module, is_ours: bool) -> None:
        _each(model, lambda module: module.set_gradient_divide_factor(factor))
        if is_forced or not is_ours:
            _each(model, lambda module: module.set_force_sum_reduction_for_comms(True))

    return change


def _prefetch(model: nn.Module, is_ours: bool) -> None:
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[2].set_modules_to_backward_prefetch([blocks[1], blocks[0]])


def _send_unused(model: nn.Module, is_ours: bool) -> None:
    _each(model, lambda module: module.set_reduce_scatter_unused_params(True))


# ---- the ways


def _policy(param: torch.dtype | None, reduce: torch.dtype | None, output: torch.dtype | None = None) -> dict:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to use FSDP2.

    options: of fully_shard. model: arguments of Model. change: called with the model and whether fusedcomm will be
    attached to it. bound: the relative error of gradients where sums are added in another order. is_exact: whether two
    ranks give the same bits. groups: the modules that are sharded before the whole, "blocks", "a list", too, or "".
    """

    options: dict = dataclasses.field(default_factory=dict)
    model: dict = dataclasses.field(default_factory=dict)
    change: Callable[[nn.Module, bool], None] | None = None
    backward: Callable = _once
    bound: float = 1e-6
    is_exact: bool = True
    layouts: tuple[str, ...] = ("shards", "hsdp", "replicate")
    groups: str = "blocks"


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARDS = ("shards", "hsdp")
WAYS = {
    "plain": Way(),
    "a list of modules": Way(groups="a list", layouts=SHARDS),  # as Accelerate does with the last norm and the head
    "bf16, sums in fp32": Way(_policy(BF16, FP32)),
    "bf16, sums in bf16": Way(_policy(BF16, BF16), bound=0.01),
    "bf16, sums as they come": Way(_policy(BF16, None), bound=0.01),
    "fp16, sums in fp32": Way(_policy(FP16, FP32)),
    "fp16, sums in fp16": Way(_policy(FP16, FP16), bound=0.002),
    "fp32, sums in bf16": Way(_policy(None, BF16), bound=0.01),
    "outputs in fp32": Way(_policy(BF16, FP32, FP32)),
    # With replicate(), where a shard has one rank, torch divides forced sums twice.
    "divided by 4": Way(change=_divide(4.0, False), layouts=SHARDS),
    "divided by 3": Way(change=_divide(3.0, False), is_exact=False, layouts=SHARDS),
    "divided by 4, as a sum": Way(change=_divide(4.0, True)),
    "as a sum": Way(change=lambda m, _: _each(m, lambda each: each.set_force_sum_reduction_for_comms(True))),
    "reduced twice": Way(backward=_reduce_twice),
    "unused, sent as zeros": Way(change=_send_unused, backward=_leave_out),
    "tied": Way(model={"is_tied": True}, groups="", layouts=("shards",)),
    "Shard(1)": Way(
        {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 48 else Shard(0)},
        model={"width": 48, "hidden": 96},  # columns that any of the numbers of ranks divides
        layouts=("shards",),
    ),
    "prefetching": Way(change=_prefetch, layouts=SHARDS),
    "sharded by two after forward": Way({"reshard_after_forward": 2}, layouts=("shards",)),
}
PLACES = [("shards", 2), ("shards", 4), ("shards by host", 4), ("hsdp", 4), ("replicate", 2)]
CASES = [
    (name, layout, world_size, params)
    for name, way in WAYS.items()
    for layout, world_size in PLACES
    for params in ("fp32", "int8")
    if layout.removesuffix(" by host") in way.layouts and (world_size > 2 or "by two" not in name)
    if (params, layout) != ("int8", "replicate")
]


def _made(name: str, layout: str, world_size: int, is_ours: bool = True) -> nn.Module:
    way, by, mesh = WAYS[name], fully_shard, init_device_mesh("cpu", (world_size,))
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replica", "shard"))
    if layout == "replicate":
        by = replicate
    torch.manual_seed(0)
    model = Model(**way.model)
    if way.groups == "a list":
        by([model.spare, model.head], mesh=mesh, **way.options)
    # Blocks hand their outputs on as they are; the whole model's may have another dtype.
    policy = way.options.get("mp_policy", MixedPrecisionPolicy())
    for block in model.blocks if way.groups else ():
        by(block, mesh=mesh, **{**way.options, "mp_policy": dataclasses.replace(policy, output_dtype=None)})
    by(model, mesh=mesh, **way.options)
    if way.change is not None:
        way.change(model, is_ours)
    return model


def _local(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]


def _error(got: list, want: list) -> float:
    """The relative error of all gradients together."""
    assert [g is None for g in got] == [w is None for w in want]
    pairs = [(g.double(), w.double()) for g, w in zip(got, want, strict=True) if g is not None]
    error = sum((g - w).square().sum() for g, w in pairs)
    return (error / sum(w.square().sum() for _, w in pairs)).sqrt().item()


def _of_one_magnitude(model: nn.Module) -> None:
    """Makes weights such that codes have them exactly."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                local = parameter.to_local()
                local.copy_(torch.where(local < 0, -0.125, 0.125))


def _train(rank: int, world_size: int, name: str, layout: str, params: str) -> tuple[float, int]:
    """The largest relative error of a step's gradients, and the number of reductions by fusedcomm. Parameters stay what
    they are."""
    errors = []
    plain, ours = (_made(name, layout, world_size, is_ours) for is_ours in (False, True))
    for model in (plain, ours) if params != "fp32" else ():
        _of_one_magnitude(model)
    hosts = 2 if layout.endswith("by host") else "auto"
    with fusedcomm.attach(ours, Config("fp32", hosts=hosts, params=params)) as comm:
        for step in range(NUM_STEPS):
            for model in (plain, ours):
                model.zero_grad()
                WAYS[name].backward(model, rank, step)
            errors.append(_error(_local(ours), _local(plain)))
        return worst(errors), comm.stats().buckets


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "layout", "world_size", "params"), CASES)
def test_steps_give_the_gradients_of_fsdp(ranks, name, layout, world_size, params):
    is_exact = world_size == 2 and WAYS[name].is_exact
    least = NUM_STEPS * (2 if params != "fp32" else 1)  # all-gathers, too
    for error, num_buckets in ranks.run(_train, name, layout, params, world_size=world_size):
        assert error <= (0 if is_exact else WAYS[name].bound) and num_buckets >= least


def _beside_plain(rank, world_size, how):
    """The error of a model that was attached before, or that is attached through what torch.compile made of it."""
    plain, ours = (_made("plain", "shards", world_size) for _ in range(2))
    if how == "detached":
        with fusedcomm.attach(ours, "int4"):
            _once(ours, rank, 0)
        ours.zero_grad()
        comm = None
    else:
        comm = fusedcomm.attach(torch.compile(ours, backend="eager"), "fp32")
    for model in (plain, ours):
        _once(model, rank, 1)
    num_buckets = comm.stats().buckets if comm else 0
    if comm:
        comm.detach()
    return _error(_local(ours), _local(plain)), num_buckets > 0


@pytest.mark.parametrize("how", ["detached", "compiled"])
def test_detach_restores_torchs_own_and_a_compiled_model_is_unwrapped(ranks, how):
    assert ranks.run(_beside_plain, how, world_size=2) == [(0, how == "compiled")] * 2
