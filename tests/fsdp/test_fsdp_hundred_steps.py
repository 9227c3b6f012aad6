"""A hundred steps on FSDP2 with fusedcomm, beside FSDP2 as it comes, one way to use FSDP2 at a time.

On two ranks, wire fp32 gives the same bits in every step. Elsewhere sums may be added in another order, and other wires
round: there both models begin every step with the same parameters.
"""

import dataclasses
from collections.abc import Callable

import pytest
import test_fsdp_parity as parity
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import fusedcomm

NUM_STEPS = 100


def _build(layout: str, world_size: int, options: dict, model: nn.Module) -> nn.Module:
    by, mesh = fully_shard, init_device_mesh("cpu", (world_size,))
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replica", "shard"))
    if layout == "replicate":
        by = replicate
    # Blocks hand their outputs on as they are; the whole model's may have another dtype.
    policy = options.get("mp_policy", MixedPrecisionPolicy())
    for block in model.blocks:
        by(block, mesh=mesh, **{**options, "mp_policy": dataclasses.replace(policy, output_dtype=None)})
    return by(model, mesh=mesh, **options)


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


def _policy(param: torch.dtype | None, reduce: torch.dtype | None, output: torch.dtype | None = None) -> dict:
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce, output_dtype=output)}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to use FSDP2.

    options: of fully_shard. change: called with the model and whether fusedcomm will be attached to it. bound: the
    relative error of gradients where sums are added in another order. is_exact: whether two ranks give the same bits.
    """

    options: dict = dataclasses.field(default_factory=dict)
    model: dict = dataclasses.field(default_factory=dict)
    change: Callable[[nn.Module, bool], None] | None = None
    backward: Callable = parity._once
    bound: float = 1e-6
    is_exact: bool = True
    layouts: tuple[str, ...] = ("shards", "hsdp", "replicate")


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHARDS = ("shards", "hsdp")
WAYS = {
    "plain": Way(),
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
    "accumulated": Way(backward=parity._accumulate),
    "reduced twice": Way(backward=parity._reduce_twice),
    "frozen and thawed": Way(backward=parity._freeze),
    "unused": Way(backward=parity._leave_out),
    "unused, sent as zeros": Way(change=_send_unused, backward=parity._leave_out),
    "tied": Way(model={"tied": True}),
    "Shard(1)": Way(
        {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 48 else Shard(0)},
        layouts=("shards",),
    ),
    "prefetching": Way(change=_prefetch, layouts=SHARDS),
    "kept whole after forward": Way({"reshard_after_forward": False}, layouts=SHARDS),
    "sharded after forward": Way({"reshard_after_forward": True}, layouts=SHARDS),
    "sharded by two after forward": Way({"reshard_after_forward": 2}, layouts=("shards",)),
    "checkpointed": Way(model={"checkpointed": True}),
    "compiled": Way(change=_compile),
}


class Even(parity.Model):
    """With layers whose columns any of the numbers of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(7, 48), nn.Linear(48, 7, bias=False)
        self.blocks, self.spare = nn.ModuleList(parity.Block(48, 96) for _ in range(3)), nn.Linear(48, 48)


class Tied(parity.Model):
    """Ties within one block: parameters of two parameter groups cannot be one."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.again = nn.Linear(33, 71, bias=False)
            block.again.weight = block.up.weight


def _made(way: Way, layout: str, world_size: int, is_ours: bool) -> nn.Module:
    torch.manual_seed(0)
    if "shard_placement_fn" in way.options:
        model = Even()
    elif way.model.get("tied"):
        model = Tied()
    else:
        model = parity.Model(**way.model)
    model = _build(layout, world_size, way.options, model)
    if way.change is not None:
        way.change(model, is_ours)
    return model


def _train(rank: int, world_size: int, name: str, layout: str, wire: str, is_exact: bool) -> tuple[float, int]:
    """The largest relative error of a step's gradients, and the number of reductions by fusedcomm."""
    way, worst = WAYS[name], 0.0
    plain, ours = (_made(way, layout, world_size, is_ours) for is_ours in (False, True))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5) for model in (plain, ours)]
    with fusedcomm.attach(ours, wire) as comm:
        for step in range(NUM_STEPS):
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                optimizer.zero_grad()
                way.backward(model, rank, step)
            worst = max(worst, parity._error(parity._local(ours), parity._local(plain)))
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            if not is_exact:
                with torch.no_grad():
                    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
                        mine.to_local().copy_(theirs.to_local())
        return worst, comm.stats().buckets


# A case takes seconds, so the others run when there is time for them: see tests/helpers/budget.py.
WHEN_THERE_IS_TIME = (pytest.mark.full, pytest.mark.executed)
BY_DEFAULT = (("accumulated", "shards", 2),)


def _case(*values) -> object:
    return pytest.param(*values, marks=() if values in BY_DEFAULT else WHEN_THERE_IS_TIME)


CASES = [
    _case(name, layout, world_size)
    for name, way in WAYS.items()
    for layout, world_size in [("shards", 2), ("shards", 4), ("hsdp", 4), ("replicate", 2)]
    if layout in way.layouts and (world_size > 2 or "by two" not in name)
]


@pytest.mark.parametrize(("name", "layout", "world_size"), CASES)
def test_a_hundred_steps_give_the_gradients_of_fsdp(ranks, name, layout, world_size):
    is_exact = world_size == 2 and WAYS[name].is_exact
    for error, num_buckets in ranks.run(_train, name, layout, "fp32", is_exact, world_size=world_size):
        assert error <= (0 if is_exact else WAYS[name].bound) and num_buckets >= NUM_STEPS


@pytest.mark.full
@pytest.mark.executed
@pytest.mark.parametrize("wire", parity.ERRORS)
@pytest.mark.parametrize(("layout", "world_size"), [("shards", 2), ("shards", 4), ("hsdp", 4), ("replicate", 2)])
@pytest.mark.parametrize("name", ["plain", "bf16, sums in fp32", "accumulated"])
def test_other_wires_stay_within_their_error(ranks, name, layout, world_size, wire):
    bound = parity.ERRORS[wire] * (1.5 if layout == "hsdp" else 1)
    # Gradients in bf16 need no rounding to it. In HSDP sums of them follow, which do.
    is_lossless = name == "bf16, sums in fp32" and wire == "bf16" and layout != "hsdp"
    for error, num_buckets in ranks.run(_train, name, layout, wire, False, world_size=world_size):
        assert (error < 1e-6 if is_lossless else 0 < error < bound) and num_buckets >= NUM_STEPS
