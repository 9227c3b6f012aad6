"""DataParallel beside DistributedDataParallel: the same steps give the same bits on two ranks.

With more ranks gloo adds up in an order that depends on where an element lies in the message, so sums that are not
exact may differ in the last bit.
"""

import contextlib
import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import Branches, Mlp, Normalised, Sparse, wrapped
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

import fusedcomm

NUM_STEPS = 4


class Ignoring(nn.Module):
    """A parameter and a buffer that differ from rank to rank, and a parameter of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(10, 5)
        self.own = nn.Linear(5, 5)
        self.own.register_buffer("mark", torch.zeros(1))
        self.shift = nn.Parameter(torch.zeros(5))
        self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.mark", "own.bias"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x)) + self.shift + self.own.mark


class Replacing(nn.Module):
    """Replaces its buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 5)
        self.register_buffer("offset", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.offset = self.offset + x.mean()
        return self.layer(x) + self.offset


@dataclasses.dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module] = Mlp
    kwargs: dict = dataclasses.field(default_factory=dict)
    accumulate: int = 1  # backward passes in a step; all except the last one in no_sync()
    reference: Callable[[], nn.Module] | None = None  # the model under DDP, if it must be another


CASES = {
    "plain": Case(kwargs={"bucket_cap_mb": 0.005}),
    "batch_norm": Case(Normalised),
    "batch_norm_of_each_rank": Case(Normalised, {"broadcast_buffers": False}),
    "batch_norm_accumulated": Case(Normalised, accumulate=3),
    "replaced_buffers": Case(Replacing),
    "unused": Case(Branches, {"find_unused_parameters": True, "bucket_cap_mb": 0.001}),
    "unused_accumulated": Case(Branches, {"find_unused_parameters": True}, accumulate=2),
    "ignored": Case(Ignoring),
    "static": Case(Mlp, {"static_graph": True}),
    "views": Case(Mlp, {"gradient_as_bucket_view": True}),
    "without_init_sync": Case(Mlp, {"init_sync": False}),
}
SPARSE = Case(Sparse, reference=lambda: Sparse(sparse=False))


def batch(rank: int, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10000 * step + 100 * part + rank)
    return torch.randn(8, 10, generator=generator), torch.randn(8, 5, generator=generator)


def trained(rank, world_size, name, ours):
    """The state after some steps, and the gradients of the last one; an evaluation comes in between."""
    case = CASES.get(name, SPARSE)
    torch.manual_seed(5 if case.kwargs.get("init_sync") is False else 5 + rank)
    model = wrapped(ours, (case.model if ours else case.reference or case.model)(), **case.kwargs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(NUM_STEPS):
        for part in range(case.accumulate):
            is_last = part == case.accumulate - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                x, y = batch(rank, step, part)
                nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        gradients = [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(batch(rank, step, 99)[0])
        model.train()
    return {name: value.clone() for name, value in model.state_dict().items()}, gradients


def differences(ours, theirs) -> list[str]:
    (state, gradients), (expected, expected_gradients) = ours, theirs
    assert list(state) == list(expected)
    found = [name for name in state if not torch.equal(state[name], expected[name])]
    for i, (gradient, other) in enumerate(zip(gradients, expected_gradients, strict=True)):
        if (gradient is None) != (other is None) or (gradient is not None and not torch.equal(gradient, other)):
            found.append(f"gradient {i}")
    return found


OWN_STATE = ("batch_norm_of_each_rank", "ignored", "replaced_buffers", "batch_norm", "batch_norm_accumulated")
"""The cases in which ranks end with different buffers, as in DDP: the last forward pass has changed them."""


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_ddps_bits(ranks, name):
    ours, theirs = (ranks.run(trained, name, ours, world_size=2) for ours in (True, False))
    assert [differences(*pair) for pair in zip(ours, theirs, strict=True)] == [[], []]
    assert name in OWN_STATE or differences(ours[0], ours[1]) == []


def are_close(state, expected):
    assert list(state) == list(expected)
    for key in state:
        torch.testing.assert_close(state[key], expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["batch_norm", "unused_accumulated", "ignored"])
def test_three_ranks_are_close_to_ddp(ranks, name):
    ours, theirs = (ranks.run(trained, name, ours, world_size=3) for ours in (True, False))
    for (state, _), (expected, _) in zip(ours, theirs, strict=True):
        are_close(state, expected)


def test_sparse_gradients_are_close_to_dense_ones_in_ddp(ranks):
    """A rank adds up the entries of one row in another order than those of a dense gradient. (gloo's sparse all-reduce,
    which DDP would use, sometimes corrupts the heap.)"""
    ours, theirs = (ranks.run(trained, "sparse", ours, world_size=2) for ours in (True, False))
    for (state, _), (expected, _) in zip(ours, theirs, strict=True):
        are_close(state, expected)
    assert differences(ours[0], ours[1]) == []


# ---- uneven inputs


def joined(rank, world_size, ours, nums, kwargs, divide, joins_optimizer):
    """Trains with nums[rank] inputs. Returns the state at the end, and the gradients of the steps.

    No gradient counts as zeros: for DDP a rank without inputs has used what it used in its last pass, so parameters
    that no rank has used may get zeros.
    """
    torch.manual_seed(rank)
    module = Normalised() if not kwargs else Branches()
    model = wrapped(ours, module, bucket_cap_mb=0.001, **kwargs)
    if joins_optimizer:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
        context = Join([model, optimizer], divide_by_initial_world_size=divide)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        context = model.join(divide_by_initial_world_size=divide)
    gradients = []
    with context:
        for step in range(nums[rank]):
            x, y = batch(rank, step, 0)
            # Each forward pass is an iteration for Join, in which the optimizer must step, too.
            if step % 3 == 1 and not joins_optimizer:
                with model.no_sync():
                    nn.functional.mse_loss(model(x), y).backward()
            nn.functional.mse_loss(model(x), y).backward()
            gradients += [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}, gradients


@pytest.mark.parametrize("joins_optimizer", [False, True])
@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize("kwargs", [{}, {"find_unused_parameters": True}])
@pytest.mark.parametrize("nums", [(2, 5), (5, 2), (0, 3)])
@pytest.mark.sampled
def test_uneven_inputs_end_with_ddps_bits(ranks, nums, kwargs, divide, joins_optimizer):
    arguments = (nums, kwargs, divide, joins_optimizer)
    ours, theirs = (ranks.run(joined, ours, *arguments, world_size=2) for ours in (True, False))
    assert [differences(*pair) for pair in zip(ours, theirs, strict=True)] == [[], []]
    assert differences((ours[0][0], []), (ours[1][0], [])) == []


def test_three_ranks_with_uneven_inputs_are_close_to_ddp(ranks):
    for divide in (True, False):
        ours, theirs = (ranks.run(joined, o, (4, 1, 2), {}, divide, False, world_size=3) for o in (True, False))
        for (state, gradients), (expected, expected_gradients) in zip(ours, theirs, strict=True):
            are_close(state, expected)
            for gradient, other in zip(gradients, expected_gradients, strict=True):
                torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
        assert differences((ours[0][0], []), (ours[2][0], [])) == []


def shadowed(rank, world_size):
    module = nn.Linear(2, 1, bias=False)
    reducer = fusedcomm.GradReducer(module, "fp32", quiet=True)
    if rank == 0:
        module.weight.grad = torch.full((1, 2), 5.0)
        reducer.shadow_pass()
        return module.weight.grad.tolist()
    module(torch.tensor([[2.0, -6.0]])).sum().backward()
    return module.weight.grad.tolist()


def test_a_reducer_can_send_zeros_in_the_others_pass(ranks):
    assert ranks.run(shadowed, world_size=2) == [[[5.0, 5.0]], [[1.0, -3.0]]]


def ended_early(rank, world_size):
    model = wrapped(True, nn.Linear(10, 5))
    try:
        with model.join(throw_on_early_termination=True):
            for step in range(1 + rank):
                model(batch(rank, step, 0)[0]).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_early_termination_raises_on_every_rank(ranks):
    first, second = ranks.run(ended_early, world_size=2)
    assert "exhausted all inputs" in first and "at least one rank that exhausted inputs" in second


# ---- checkpoints


def checkpoints(rank, world_size, path):
    for from_ours in (True, False):
        torch.manual_seed(rank)
        model = wrapped(from_ours, Normalised())
        model(batch(rank, 0, 0)[0]).sum().backward()
        if rank == 0:
            torch.save(model.state_dict(), path)
        dist.barrier()
        torch.manual_seed(7 + rank)
        other = wrapped(not from_ours, Normalised())
        state = torch.load(path, weights_only=True)
        other.load_state_dict(state)
        assert list(other.state_dict()) == list(state)
        assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
        dist.barrier()
    return list(state)


def test_checkpoints_load_both_ways(ranks, tmp_path):
    for names in ranks.run(checkpoints, str(tmp_path / "state.pt"), world_size=2):
        assert len(names) == 9 and all(name.startswith("module.layers.") for name in names)
