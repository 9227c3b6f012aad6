"""GradReducer beside DistributedDataParallel without a hook: the same steps give the same gradients.

DDP multiplies each gradient by 1 / world_size when it copies it into a bucket, and then adds up. GradReducer does the
same when it packs. With two ranks the sums are the same bits. With more, gloo adds up in an order that depends on where
an element lies in the message, so sums that are not exact may differ in the last bit.
"""

import contextlib
import dataclasses
from collections.abc import Callable

import fake_cuda
import pytest
import torch
from models import Branches, Complex, Conv, Gradients, Mixed, Mlp, Sparse, Synchronized, integers, mean_of_integers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedcomm
from fusedcomm.config import Config

NUM_STEPS = 4


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(10, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3))
        self.head = nn.Linear(32, 5)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Tied(nn.Module):
    """One parameter under two names, and one module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(10, 10)
        self.twice = nn.Linear(10, 10)
        self.write = nn.Linear(10, 10)
        self.write.weight = self.read.weight
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.read(x))))
        return self.head(self.write(torch.tanh(x)))


class Odd(nn.Module):
    """Parameters without dimensions and without elements, and one whose gradient autograd leaves expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.shift = nn.Parameter(torch.randn(8, 5))
        self.layer = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale + self.shift.sum() + self.none.sum()


@dataclasses.dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module] = Mlp
    bucket_mib: float = 25
    find_unused: bool = False
    accumulate: int = 1  # backward passes in a step; all except the last one in no_sync()
    set_to_none: bool = True
    zeroed: bool = True  # whether gradients are zeroed between steps
    image: bool = False
    compiled: bool = False
    reference: Callable[[], nn.Module] | None = None  # the model under DDP, if it must be another


CASES = {
    "plain": Case(),
    "small_buckets": Case(bucket_mib=0.005),
    "zeroed_in_place": Case(set_to_none=False, bucket_mib=0.005),
    "never_zeroed": Case(zeroed=False, bucket_mib=0.005),
    "accumulated": Case(accumulate=3, bucket_mib=0.005),
    "accumulated_in_place": Case(accumulate=2, set_to_none=False),
    "channels_last": Case(Conv, image=True),
    "complex": Case(Complex),
    "float64": Case(lambda: Mlp(torch.float64)),
    "bf16_parameters": Case(lambda: Mlp(torch.bfloat16)),
    "mixed_dtypes": Case(Mixed, bucket_mib=0.001),
    # gloo's sparse all-reduce, which DDP would use, sometimes corrupts the heap.
    "sparse": Case(Sparse, reference=lambda: Sparse(sparse=False)),
    "unused": Case(Branches, find_unused=True, bucket_mib=0.001),
    "unused_in_place": Case(Branches, find_unused=True, set_to_none=False),
    "unused_accumulated": Case(Branches, find_unused=True, accumulate=3),
    "tied_and_shared": Case(Tied, bucket_mib=0.0005),
    "no_dimensions_no_elements": Case(Odd, bucket_mib=0.0001),
    "checkpointed": Case(lambda: Checkpointed(use_reentrant=False), bucket_mib=0.005),
    "checkpointed_reentrant": Case(lambda: Checkpointed(use_reentrant=True), bucket_mib=0.005),
    "compiled": Case(compiled=True, bucket_mib=0.005),
    "collectives_in_backward": Case(Synchronized, bucket_mib=0.005),
}


def batch(case: Case, rank: int, step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10000 * step + 100 * part + rank)
    shape = (8, 3, 8, 8) if case.image else (8, 10)
    return torch.randn(shape, generator=generator), torch.randn(8, 5, generator=generator)


def train(rank, world_size, name, ours, wire="fp32"):
    """Returns the gradients after each step's last backward pass, dense; None where there is none."""
    case = CASES[name]
    torch.manual_seed(5)
    model = (case.model if ours else case.reference or case.model)()
    if ours:
        options = {"bucket_mib": case.bucket_mib, "find_unused_parameters": case.find_unused, "quiet": True}
        synchronized = reducer = fusedcomm.GradReducer(model, wire, **options)
        forward = torch.compile(model, backend="aot_eager") if case.compiled else model
    else:
        options = {"bucket_cap_mb": case.bucket_mib, "find_unused_parameters": case.find_unused}
        forward = synchronized = DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for step in range(NUM_STEPS):
        for part in range(case.accumulate):
            is_last = part == case.accumulate - 1
            with contextlib.nullcontext() if is_last else synchronized.no_sync():
                x, y = batch(case, rank, step, part)
                dtype = next(model.parameters()).dtype
                x = x.to(dtype) if dtype in (torch.float64, torch.bfloat16) else x
                nn.functional.mse_loss(forward(x).float(), y).backward()
        seen.append([None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()])
        optimizer.step()
        if case.zeroed:
            optimizer.zero_grad(set_to_none=case.set_to_none)
    if ours:
        reducer.detach()
    return seen


def compare(ours, theirs, is_equal):
    assert len(ours) == len(theirs) == NUM_STEPS
    num_compared = 0
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for index, (mine, other) in enumerate(zip(a, b, strict=True)):
            assert (mine is None) == (other is None), (step, index)
            if mine is not None:
                assert is_equal(mine, other), (step, index, mine, other)
                num_compared += 1
    assert num_compared >= NUM_STEPS


def is_close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n == "compiled" else n for n in CASES])
def test_two_ranks_get_ddps_bits(ranks, name):
    theirs = ranks.run(train, name, False, world_size=2)
    ours = ranks.run(train, name, True, world_size=2)
    for mine, other in zip(ours, theirs, strict=True):
        # A rank adds up the entries of one row of a sparse gradient in another order than those of a dense one.
        compare(mine, other, is_close if name == "sparse" else torch.equal)
    compare(ours[0], ours[1], torch.equal)


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("name", ["plain", "small_buckets", "unused", "complex", "sparse", "float64", "accumulated"])
def test_more_ranks_get_ddps_gradients_up_to_the_order_of_sums(ranks, name, world_size):
    theirs = ranks.run(train, name, False, world_size=world_size)
    ours = ranks.run(train, name, True, world_size=world_size)
    for mine, other in zip(ours, theirs, strict=True):
        compare(mine, other, is_close)
    for others in ours[1:]:
        compare(ours[0], others, torch.equal)


SHAPES = [(40, 50), (7,), (), (0, 4), (3, 5, 7), (2000,)]


def exact_sums(rank, world_size, bucket_mib):
    model = Gradients(*SHAPES)
    reducer = fusedcomm.GradReducer(model, "fp32", bucket_mib=bucket_mib, quiet=True)
    gradients = [integers(rank, shape) for shape in SHAPES]
    seen = []
    for _ in range(3):
        model.zero_grad()
        model(gradients).backward()
        seen.append([weight.grad.clone() for weight in model.weights])
    return seen, len(reducer.plan().buckets), reducer.native.num_copied


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("bucket_mib", "num_buckets"), [(25, 1), (0.004, 2)])
def test_exact_sums_have_the_bits_of_the_mean(ranks, world_size, bucket_mib, num_buckets):
    means = [mean_of_integers(world_size, shape) for shape in SHAPES]
    for steps, found, _ in ranks.run(exact_sums, bucket_mib, world_size=world_size):
        assert found == num_buckets
        for seen in steps:
            assert all(torch.equal(a, b) for a, b in zip(seen, means, strict=True))


# ---- the hook's results


WIRES = {
    "fp32": Config("fp32"),
    "bf16": Config("bf16", "two-shot"),
    "fp16": Config("fp16", "direct"),
    "int8": Config("int8", "two-shot", wires={"1d": "int8"}),
    "int8_one_shot": Config("int8", "one-shot"),
    "int4": Config("int4", "two-shot"),
}
# Multiples of a vector: there are no holes, neither in DDP's buffer nor between tensors, and blocks are the same.
LARGE = [(120, 64), (300,), (64, 90), (64, 64), (5000,), (32, 65)]


def with_wire(rank, world_size, name, ours):
    model = Gradients(*LARGE)
    if ours:
        handle = fusedcomm.GradReducer(model, WIRES[name], bucket_mib=0.02, quiet=True)
        forward = model
    else:
        forward = DistributedDataParallel(model, bucket_cap_mb=0.02)
        handle = fusedcomm.attach(forward, WIRES[name], quiet=True)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for _ in range(4):  # DDP has its buckets from the second pass on
        gradients = [torch.randn(shape, generator=generator) for shape in LARGE]
        model.zero_grad()
        forward(gradients).backward()
        seen.append([weight.grad.clone() for weight in model.weights])
    buckets = [row.parameters for row in handle.plan().buckets]
    sent = handle.stats().sent_nbytes
    handle.detach()
    return seen[2:], buckets, sent


# With more than two ranks the hook adds up fp32 in DDP's buffer, whose elements lie elsewhere in the message.
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "world_size"), [(name, n) for name in WIRES for n in (2, 3, 4) if name != "fp32" or n == 2]
)
def test_where_buckets_are_ddps_the_results_are_the_hooks(ranks, name, world_size):
    theirs = ranks.run(with_wire, name, False, world_size=world_size)
    ours = ranks.run(with_wire, name, True, world_size=world_size)
    for (mine, own_buckets, _), (others, buckets, _) in zip(ours, theirs, strict=True):
        assert own_buckets == buckets and len(buckets) > 2
        for a, b in zip(mine, others, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---- the CUDA path


FEW = [(30, 9), (7,), (300,), (3, 4, 5), (64,), (11,)]


def on_path(rank, world_size, library, name):
    model = Gradients(*FEW)
    config = WIRES[name]
    generator = torch.Generator().manual_seed(rank)
    seen = []
    with fake_cuda.path(library, config):
        reducer = fusedcomm.GradReducer(model, config, bucket_mib=0.001, find_unused_parameters=True, quiet=True)
        for step in range(3):
            gradients = [torch.randn(shape, generator=generator) for shape in FEW]
            model.zero_grad()
            used = [i for i in range(len(FEW)) if i not in (rank + step, 5)]
            sum((model.weights[i] * gradients[i]).sum() for i in used).backward()
            seen.append([None if weight.grad is None else weight.grad.clone() for weight in model.weights])
        reducer.detach()
    return seen


def test_the_cuda_path_gives_the_cpus_bits(ranks, library):
    cpu, cuda = (ranks.run(on_path, driver, "int8", world_size=2) for driver in (None, library))
    for mine, others in zip(cpu, cuda, strict=True):
        for a, b in zip(mine, others, strict=True):
            assert a[5] is None and b[5] is None
            assert all(torch.equal(x, y) for x, y in zip(a[:5], b[:5], strict=True))
