"""DataParallel beside DistributedDataParallel: the same steps give the same bits on two ranks.

With more ranks gloo adds up in an order that depends on where an element lies in the message, so sums that are not
exact may differ in the last bit.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from models import Branches, Mlp, Normalised, Sparse, refusal, wrapped
from torch import nn

from fusedcomm.reducer.ddp_arguments import check_devices

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


CUDA_1 = torch.device("cuda", 1)


def test_device_ids_name_the_modules_device():
    for given in ([1], ["cuda:1"], [CUDA_1], ["cuda"]):
        assert check_devices(CUDA_1, given, None) == ([1], 1)
    assert check_devices(CUDA_1, [1], CUDA_1) == ([1], 1)
    for given in (None, []):
        assert check_devices(CUDA_1, given, None) == (None, None)
        assert check_devices(torch.device("cpu"), given, None) == (None, None)
    for given in (([0], None), (["cuda:2"], None), (["cpu"], None), ([1], 0), (None, 0)):
        assert "the module's device, cuda:1" in refusal(functools.partial(check_devices, CUDA_1, *given))
