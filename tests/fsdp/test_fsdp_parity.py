"""fusedcomm on FSDP2 beside FSDP2 as it comes, one way to use FSDP2 at a time: the same steps give the same gradients.

In wire fp32 sums are added in fp32, in the order of ranks. On two ranks that gives the same bits as gloo in every step.
Elsewhere sums may be added in another order, and other wires round: there both models begin every step with the same
parameters. `make test` runs every way for a few steps, and `make test-all` for a hundred.
"""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fusedcomm

FEW_STEPS, MANY_STEPS = 3, 100
# Relative errors of one rounding, and of two; see docs/accuracy.md.
ERRORS = {"bf16": 0.005, "fp16": 0.001, "int8": 0.02, "fp8": 0.08, "int4": 0.2}


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Of sizes that no number of ranks divides, unless others are given. `spare` is left out where a test says so.

    ties: "", "blocks", or "within blocks". Only parameters of one parameter group can be one.
    """

    def __init__(self, width: int = 33, hidden: int = 71, ties: str = "", checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(7, width), nn.Linear(width, 7, bias=False)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(3))
        self.spare = nn.Linear(width, width)
        self.checkpointed, self.uses_spare = checkpointed, True
        if ties == "blocks":
            self.blocks[2].up.weight = self.blocks[0].up.weight
        if ties == "within blocks":
            for block in self.blocks:
                block.again = nn.Linear(width, hidden, bias=False)
                block.again.weight = block.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.uses_spare:
            x = self.spare(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


# ---- what is done in a step


def _once(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + rank)
    model(torch.randn(5, model.embed.in_features, generator=generator)).square().mean().backward()


def _accumulate(model: nn.Module, rank: int, step: int) -> None:
    """Two passes that reduce nothing, and a third that does."""
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        _once(model, rank, 10 * step + i)


def _reduce_twice(model: nn.Module, rank: int, step: int) -> None:
    """Two passes that both reduce: the second adds to the first's result."""
    for i in range(2):
        _once(model, rank, 10 * step + i)


def _freeze(model: nn.Module, rank: int, step: int) -> None:
    model.blocks[1].up.weight.requires_grad_(step % 2 == 0)
    _once(model, rank, step)


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


def _compile(model: nn.Module, is_ours: bool) -> None:
    for block in model.blocks:
        block.compile(backend="eager")


def _hook(model: nn.Module, is_ours: bool) -> None:
    """Hooks that change gradients as soon as they are there."""

    def double(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(2)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(double)


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
    "one group": Way(groups=""),
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
    "accumulated": Way(backward=_accumulate),
    "reduced twice": Way(backward=_reduce_twice),
    "frozen and thawed": Way(backward=_freeze),
    "unused": Way(backward=_leave_out),
    "unused, sent as zeros": Way(change=_send_unused, backward=_leave_out),
    "tied": Way(model={"ties": "within blocks"}),
    "tied in one group": Way(model={"ties": "blocks"}, groups="", layouts=("shards",)),
    "Shard(1)": Way(
        {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 48 else Shard(0)},
        model={"width": 48, "hidden": 96},  # columns that any of the numbers of ranks divides
        layouts=("shards",),
    ),
    "prefetching": Way(change=_prefetch, layouts=SHARDS),
    "kept whole after forward": Way({"reshard_after_forward": False}, layouts=SHARDS),
    "sharded after forward": Way({"reshard_after_forward": True}, layouts=SHARDS),
    "sharded by two after forward": Way({"reshard_after_forward": 2}, layouts=("shards",)),
    "checkpointed": Way(model={"checkpointed": True}),
    "compiled": Way(change=_compile),
    "hooks on gradients": Way(change=_hook),
}
PLACES = [("shards", 2), ("shards", 4), ("hsdp", 4), ("replicate", 2)]
CASES = [
    (name, layout, world_size)
    for name, way in WAYS.items()
    for layout, world_size in PLACES
    if layout in way.layouts and (world_size > 2 or "by two" not in name)
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


def _train(
    rank: int, world_size: int, name: str, layout: str, config: str | fusedcomm.Config, is_exact: bool, num_steps: int
) -> tuple[float, int]:
    """The largest relative error of a step's gradients, and the number of reductions by fusedcomm."""
    worst = 0.0
    models = plain, ours = [_made(name, layout, world_size, is_ours) for is_ours in (False, True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5) for model in models]
    with fusedcomm.attach(ours, config) as comm:
        for step in range(num_steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                WAYS[name].backward(model, rank, step)
            worst = max(worst, _error(_local(ours), _local(plain)))
            for model, optimizer in zip(models, optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            if not is_exact:
                with torch.no_grad():
                    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
                        mine.to_local().copy_(theirs.to_local())
        return worst, comm.stats().buckets


def _check(ranks, num_steps: int, name: str, layout: str, world_size: int) -> None:
    is_exact = world_size == 2 and WAYS[name].is_exact
    for error, num_buckets in ranks.run(_train, name, layout, "fp32", is_exact, num_steps, world_size=world_size):
        assert error <= (0 if is_exact else WAYS[name].bound) and num_buckets >= num_steps


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "layout", "world_size"), CASES)
def test_steps_give_the_gradients_of_fsdp(ranks, name, layout, world_size):
    _check(ranks, FEW_STEPS, name, layout, world_size)


@pytest.mark.full
@pytest.mark.parametrize(("name", "layout", "world_size"), CASES)
def test_a_hundred_steps_give_the_gradients_of_fsdp(ranks, name, layout, world_size):
    _check(ranks, MANY_STEPS, name, layout, world_size)


def _check_wire(ranks, num_steps: int, name: str, layout: str, world_size: int, wire: str) -> None:
    bound = ERRORS[wire] * (1.5 if layout == "hsdp" else 1)
    # Gradients in bf16 need no rounding to it. In HSDP sums of them follow, which do.
    is_lossless = name == "bf16, sums in fp32" and wire == "bf16" and layout != "hsdp"
    for error, num_buckets in ranks.run(_train, name, layout, wire, False, num_steps, world_size=world_size):
        assert (error < 1e-6 if is_lossless else 0 < error < bound) and num_buckets >= num_steps


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ERRORS)
@pytest.mark.parametrize(
    ("name", "layout", "world_size"), [*(("plain", *p) for p in PLACES), ("one group", "shards", 3)]
)
def test_other_wires_round(ranks, name, layout, world_size, wire):
    _check_wire(ranks, 1, name, layout, world_size, wire)


@pytest.mark.full
@pytest.mark.parametrize("wire", ERRORS)
@pytest.mark.parametrize(("layout", "world_size"), PLACES)
@pytest.mark.parametrize("name", ["plain", "bf16, sums in fp32", "accumulated"])
def test_other_wires_stay_within_their_error(ranks, name, layout, world_size, wire):
    _check_wire(ranks, MANY_STEPS, name, layout, world_size, wire)


def test_chunks_change_nothing(ranks):
    config = fusedcomm.Config("int8", chunks=fusedcomm.Chunks(nbytes=4096, in_flight=2), wires={"1d": "int8"})
    for error, _ in ranks.run(_train, "one group", "shards", config, False, 1, world_size=3):
        assert error < ERRORS["int8"]


def _ranks_agree(rank, world_size):
    model = _made("plain", "replicate", world_size)
    with fusedcomm.attach(model, "int4"):
        _once(model, rank, 0)
        return [gradient.numpy() for gradient in _local(model)]


def test_replicas_have_the_same_bits(ranks):
    first, *others = ranks.run(_ranks_agree, world_size=3)
    for other in others:
        assert all((a == b).all() for a, b in zip(first, other, strict=True))


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
