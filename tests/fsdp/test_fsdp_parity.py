"""fusedcomm on FSDP2 beside FSDP2 as it comes: the same steps give the same gradients.

In wire fp32 sums are added in fp32, in the order of ranks. With two ranks that gives the same bits as gloo; with more
the last bits may differ. Other wires differ by their rounding.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import fusedcomm

# Relative errors of one rounding, and of two; see docs/accuracy.md.
ERRORS = {"bf16": 0.005, "fp16": 0.001, "int8": 0.02, "fp8": 0.08, "int4": 0.2}


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, hidden), nn.Linear(hidden, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes that no number of ranks divides. `spare`: used in every second step only."""

    def __init__(self, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(7, 33), nn.Linear(33, 7, bias=False)
        self.blocks = nn.ModuleList(Block(33, 71) for _ in range(3))
        self.spare = nn.Linear(33, 33)
        self.checkpointed, self.uses_spare = checkpointed, True
        if tied:
            self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        if self.uses_spare:
            x = self.spare(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def shard(model: nn.Module, by: Callable = fully_shard, **options) -> nn.Module:
    for block in getattr(model, "blocks", ()):
        by(block, **options)
    by(model, **options)
    return model


def wide(placement_of=None, **options) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(24, 24, bias=False) for _ in range(3)])
    by = fully_shard if placement_of is None else lambda m, **o: fully_shard(m, shard_placement_fn=placement_of, **o)
    for layer in model:
        by(layer, **options)
    return by(model, **options) or model


def _mesh(world_size: int) -> dict:
    return {"mesh": init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replica", "shard"))}


def _hooked(model: nn.Module) -> nn.Module:
    """Hooks that read gradients as soon as they are there."""

    def double(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(2)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    return model


def _divided(model: nn.Module, factor: float) -> nn.Module:
    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_gradient_divide_factor(factor)
    return model


def _bf16(**policy) -> nn.Module:
    return shard(Model(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, **policy))


def _listed() -> nn.Module:
    """Two modules given to fully_shard together, as Accelerate does with the last norm and the head."""
    model = Model()
    fully_shard([model.spare, model.head])
    return shard(model)


MODELS = {
    "plain": lambda n: shard(Model()),
    "a list of modules": lambda n: _listed(),
    "one group": lambda n: fully_shard(Model()),
    "tied": lambda n: fully_shard(Model(tied=True)),
    "checkpointed": lambda n: shard(Model(checkpointed=True)),
    "kept whole after forward": lambda n: shard(Model(), reshard_after_forward=False),
    "Shard(1)": lambda n: wide(lambda parameter: Shard(1)),
    "bf16 parameters, fp32 sums": lambda n: _bf16(reduce_dtype=torch.float32),
    "hooks on gradients": lambda n: _hooked(shard(Model())),
    "replicate": lambda n: shard(Model(), replicate, mesh=init_device_mesh("cpu", (n,))),
    "hsdp": lambda n: shard(Model(), **_mesh(n)),
}


def _input(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, first.in_features, generator=generator)


def _local(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]


def _error(got: list, want: list) -> float:
    """The relative error of all gradients together."""
    assert [g is None for g in got] == [w is None for w in want]
    pairs = [(g.double(), w.double()) for g, w in zip(got, want, strict=True) if g is not None]
    error = sum((g - w).square().sum() for g, w in pairs)
    return (error / sum(w.square().sum() for _, w in pairs)).sqrt().item()


def _both(name: str, world_size: int) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MODELS[name](world_size))
    return models[0], models[1]


def _steps(rank: int, model: nn.Module, num_steps: int, backward: Callable) -> list[list]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradients = []
    for step in range(num_steps):
        optimizer.zero_grad()
        backward(model, rank, step)
        gradients.append(_local(model))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert torch.isfinite(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
    return gradients


def _once(model: nn.Module, rank: int, step: int) -> None:
    model(_input(model, rank, step)).square().mean().backward()


def _accumulate(model: nn.Module, rank: int, step: int) -> None:
    """Two passes that reduce nothing, and a third that does."""
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        model(_input(model, rank, 10 * step + i)).square().mean().backward()


def _reduce_twice(model: nn.Module, rank: int, step: int) -> None:
    """Two passes that both reduce: the second adds to the first's result."""
    for i in range(2):
        model(_input(model, rank, 10 * step + i)).square().mean().backward()


def _freeze(model: nn.Module, rank: int, step: int) -> None:
    model.blocks[1].up.weight.requires_grad_(step % 2 == 0)
    _once(model, rank, step)


def _leave_out(model: nn.Module, rank: int, step: int) -> None:
    model.uses_spare = step % 2 == 0
    _once(model, rank, step)


PASSES = {
    "accumulated": _accumulate,
    "reduced twice": _reduce_twice,
    "frozen and thawed": _freeze,
    "unused parameters": _leave_out,
}


def _compare(rank, world_size, name, wire, backward, num_steps=4):
    plain, ours = _both(name, world_size)
    want = _steps(rank, plain, num_steps, backward)
    with fusedcomm.attach(ours, wire) as handle:
        # Of one step: afterwards the parameters differ.
        got = _steps(rank, ours, num_steps if wire == "fp32" else 1, backward)
        numel = sum(row.numel for row in handle.plan().rows)
    return max(_error(g, w) for g, w in zip(got, want, strict=False)), numel


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_fp32_sums_are_those_of_fsdp(ranks, name, world_size):
    bound = 0 if world_size == 2 and "bf16" not in name else 1e-6
    for error, numel in ranks.run(_compare, name, "fp32", _once, world_size=world_size):
        assert error <= bound and numel > 0


@pytest.mark.parametrize("way", PASSES)
def test_passes_of_every_kind_give_the_gradients_of_fsdp(ranks, way):
    for error, _ in ranks.run(_compare, "plain", "fp32", PASSES[way], world_size=2):
        assert error == 0


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ERRORS)
@pytest.mark.parametrize(("name", "world_size"), [("plain", 2), ("one group", 3), ("hsdp", 4), ("replicate", 2)])
def test_other_wires_round(ranks, name, world_size, wire):
    for error, _ in ranks.run(_compare, name, wire, _once, world_size=world_size):
        assert 0 < error < ERRORS[wire] * (1.5 if name == "hsdp" else 1)


def _ranks_agree(rank, world_size):
    torch.manual_seed(0)
    model = shard(Model(), replicate, mesh=init_device_mesh("cpu", (world_size,)))
    with fusedcomm.attach(model, "int4"):
        return [g.numpy() for step in _steps(rank, model, 3, _once) for g in step]


def test_replicas_have_the_same_bits(ranks):
    first, *others = ranks.run(_ranks_agree, world_size=3)
    for other in others:
        assert all((a == b).all() for a, b in zip(first, other, strict=True))


def _divided_by(rank, world_size):
    plain, ours = _both("plain", world_size)
    _divided(ours, 4.0)
    with fusedcomm.attach(ours, "fp32"):
        for model in (plain, ours):
            _once(model, rank, 0)
    return _error(_local(ours), [g * world_size / 4 for g in _local(plain)])


def test_gradients_may_be_divided_by_any_factor(ranks):
    """gloo refuses the sum that torch asks for then."""
    assert ranks.run(_divided_by, world_size=2) == [0, 0]


def _half_output(rank, world_size):
    """Gradients in bf16 with sums in bf16: torch rounds at every addition, fusedcomm once."""
    torch.manual_seed(0)
    model = _bf16()
    with fusedcomm.attach(model, "bf16"):
        _once(model, rank, 0)
        ours = _local(model)
    model.zero_grad()
    _once(model, rank, 0)
    return _error(ours, _local(model))


def test_bf16_gradients_are_added_in_fp32(ranks):
    for error in ranks.run(_half_output, world_size=4):
        assert 0 < error < 0.01


def _chunked(rank, world_size):
    torch.manual_seed(0)
    plain, ours = fully_shard(nn.Linear(300, 401)), None
    torch.manual_seed(0)
    ours = fully_shard(nn.Linear(300, 401))
    config = fusedcomm.Config("int8", chunks=fusedcomm.Chunks(nbytes=4096, in_flight=2), wires={"1d": "int8"})
    with fusedcomm.attach(ours, config):
        for model in (plain, ours):
            _once(model, rank, 0)
        return _error(_local(ours), _local(plain))


def test_chunks_change_nothing(ranks):
    for error in ranks.run(_chunked, world_size=3):
        assert error < ERRORS["int8"]


def _restored(rank, world_size):
    plain, ours = _both("plain", world_size)
    with fusedcomm.attach(ours, "int4"):
        _once(ours, rank, 0)
    ours.zero_grad()
    with contextlib.suppress(StopIteration):
        for model in (plain, ours):
            _once(model, rank, 1)
    return _error(_local(ours), _local(plain))


def test_detach_restores_torchs_own(ranks):
    assert ranks.run(_restored, world_size=2) == [0, 0]


def _compiled(rank, world_size):
    plain, ours = _both("plain", world_size)
    with fusedcomm.attach(torch.compile(ours, backend="eager"), "fp32"):
        for model in (plain, ours):
            _once(model, rank, 0)
        return _error(_local(ours), _local(plain))


def test_a_compiled_model_is_unwrapped(ranks):
    assert ranks.run(_compiled, world_size=2) == [0, 0]
