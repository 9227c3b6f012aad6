"""GradReducer: what is sent when, and which gradients are copied."""

import contextlib
import ctypes
import warnings

import pytest
import torch
from models import Gradients, integers, mean_of_integers, reducer_of, synchronize
from ranks import Ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.config import Config

SHAPES = ((300,), (20, 30))


def given(rank, number):
    """A pass's gradients: signed integers, so sums and halves are exact in fp32."""
    return [(number + 1) * integers(rank, shape) for shape in SHAPES]


def own_sum(rank, numbers):
    return [sum(parts) for parts in zip(*(given(rank, n) for n in numbers), strict=True)]


def after_an_error(rank, world_size):
    """A pass within no_sync() fails on every rank, and is made again. Returns each pass's gradients, and the steps."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model)

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise LookupError("a user's error")

    # The failing node is the last one, so a gradient has arrived before.
    loss = (model.weights[1] * given(rank, 0)[1]).sum() + Failing.apply(model.weights[0]).sum()
    with reducer.no_sync(), pytest.raises(LookupError, match="a user's error"):
        loss.backward()
    outcome = []
    for number in range(4):
        if number % 2 == 0:
            model.zero_grad()
        with reducer.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            model(given(rank, number)).backward()
        outcome.append([weight.grad.clone() for weight in model.weights])
    return outcome, reducer.stats().steps


def test_a_pass_that_fails_before_anything_is_sent_is_made_again(ranks):
    for rank, (seen, steps) in enumerate(ranks.run(after_an_error, world_size=2)):
        assert steps == 2
        for number, found in enumerate(seen):
            of_ranks = [own_sum(other, [number - 1, number]) for other in range(2)]
            means = [sum(parts) / 2 for parts in zip(*of_ranks, strict=True)]
            wanted = means if number % 2 else own_sum(rank, [number])
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), number


# ---- what is sent when


class Ordered(nn.Module):
    """Uses its layers in a given order, which is not the order of its parameters."""

    def __init__(self, order):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))
        self.order = order

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x.sum()


def plans(rank, world_size, orders):
    """The buckets after each pass, in which the layers are used in the order that `orders` has for this rank."""
    model = Ordered(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reducer = reducer_of(model, bucket_mib=0.007)  # two layers are in a bucket
        seen = []
        for order in orders[rank]:
            model.order = order
            model.zero_grad()
            model(torch.ones(2, 32)).backward()
            seen.append([[int(name.split(".")[1]) for name in row.parameters] for row in reducer.plan().buckets])
    return seen, [str(w.message) for w in caught if "another order" in str(w.message)]


def test_after_the_first_pass_buckets_have_the_order_of_arrival_on_rank_0(ranks):
    orders = [[(2, 0, 3, 1)] * 3, [(0, 1, 2, 3)] * 3, [(3, 2, 1, 0)] * 3]
    for seen, notices in ranks.run(plans, orders, world_size=3):
        assert seen == [[[3, 2], [1, 0]], [[1, 3], [0, 2]], [[1, 3], [0, 2]]] and notices == []


def test_when_rank_0s_order_changes_buckets_are_cut_again_which_is_reported_once(ranks):
    first, second = (0, 1, 2, 3), (1, 3, 0, 2)
    changes = [first] * 2 + [second] * 6 + [first] * 8
    (seen, notices), (others, no_notices) = ranks.run(plans, [changes, [first] * 16], world_size=2)
    assert seen == others and no_notices == [] and len(notices) == 1
    assert seen[1] == [[3, 2], [1, 0]] and seen[7] == [[2, 0], [3, 1]] and seen[15] == [[3, 2], [1, 0]]


def test_an_order_that_alternates_does_not_cut_buckets_again(ranks):
    alternating = [(0, 1, 2, 3), (1, 3, 0, 2)] * 5
    for seen, notices in ranks.run(plans, [alternating] * 2, world_size=2):
        assert seen[1:] == [[[3, 2], [1, 0]]] * 9 and notices == []


def handed_over_early(rank, world_size):
    """In each pass, the buckets that have ended when the last parameter's gradient is computed. It waits for one."""
    model = Ordered((0, 1, 2, 3))
    reducer = reducer_of(model, "bf16", bucket_mib=0.003)
    ended = []

    def wait_for_a_bucket(gradient):
        before = 4 * len(ended)
        while reducer.session.synchronizer.stats().counts["buckets"] <= before:
            pass
        ended.append(1)
        return gradient

    model.layers[0].weight.register_hook(wait_for_a_bucket)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 32)).backward()
    assert len(reducer.plan().buckets) == 4
    reducer.detach()  # the hook above keeps it alive
    return ended


def test_buckets_are_handed_over_while_the_backward_pass_runs(ranks):
    for names in ranks.run(handed_over_early, world_size=2):
        assert names == [1, 1, 1]


# ---- where gradients lie


def strange_gradients(rank, world_size, wire):
    """Gradients that are a view with gaps, in another order of memory, and views of each other."""
    model = Gradients((6, 5), (8, 4), (3, 4, 5))
    model.complex = nn.Parameter(torch.zeros(4, 4, dtype=torch.complex64))
    model.halves = nn.ParameterList(torch.zeros(shape) for shape in ((16,), (4, 4)))
    reducer = reducer_of(model, wire)
    base = torch.zeros(6, 9)
    shapes = [(6, 5), (8, 4), (3, 4, 5)]
    gradients = [integers(rank, shape) for shape in shapes]
    complex_ = torch.complex(integers(rank, (4, 4)), integers(rank + 10, (4, 4)))
    shared = integers(rank + 20, (8, 2))
    copied = []
    for _ in range(3):
        base.fill_(3.0)
        model.zero_grad()
        gaps = base[:, 2:7].zero_()
        turned = torch.zeros(4, 8).t()
        model.weights[0].grad, model.weights[1].grad = gaps, turned
        before = reducer.native.num_copied
        # The gradients of both halves are views of one tensor.
        sum_of_views = ((model.halves[0].view(8, 2) + model.halves[1].view(8, 2)) * shared).sum()
        (model(gradients) + (model.complex.conj() * complex_).real.sum() + sum_of_views).backward()
        assert model.weights[0].grad is gaps and model.weights[1].grad is turned
        copied.append(reducer.native.num_copied - before)
        mean = [weight.grad.clone() for weight in model.weights]
        rest = torch.cat([base[:, :2], base[:, 7:]], 1).unique().tolist()
        found = (mean, rest, model.complex.grad.clone(), [half.grad.clone() for half in model.halves])
    return found, copied


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_gradients_that_do_not_lie_as_their_parameter_are_copied_and_written_back(ranks, wire):
    for (mean, rest, complex_, halves), copied in ranks.run(strange_gradients, wire, world_size=2):
        assert all(torch.equal(gradient, mean_of_integers(2, gradient.shape)) for gradient in mean)
        assert rest == [3.0], "memory beside the gradient was written"
        expected = sum(torch.complex(integers(r, (4, 4)), integers(r + 10, (4, 4))) for r in range(2)) / 2
        assert torch.equal(complex_.resolve_conj(), expected)
        shared = sum(integers(r + 20, (8, 2)) for r in range(2)) / 2
        assert all(torch.equal(half.reshape(8, 2), shared) for half in halves)
        assert all(2 <= number <= 5 for number in copied)


def ordinary(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 32),
        nn.LayerNorm(32),
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        nn.Linear(32, 5),
    )
    reducer = reducer_of(model, "bf16")
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        with reducer.no_sync():
            model(torch.randn(8, 3, 8, 8)).sum().backward()
        addresses = [p.grad.data_ptr() for p in model.parameters()]
        model(torch.randn(8, 3, 8, 8)).sum().backward()
        assert [p.grad.data_ptr() for p in model.parameters()] == addresses
    return reducer.native.num_copied


def test_no_gradient_of_an_ordinary_model_is_copied(ranks):
    assert ranks.run(ordinary, world_size=2) == [0, 0]


def linear_layers(rank, world_size, keep):
    """Returns (buckets, copies in two passes). Each weight completes a bucket. Its gradient arrives as a view of its
    transpose. `keep`: what hooks keep of it until the pass has ended."""
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    reducer, kept = reducer_of(model, bucket_mib=0.01), []
    for weight in model.parameters():
        weight.register_hook(lambda gradient: kept.append(keep(gradient)))
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(8, 64)).sum().backward()
    return len(reducer.plan().buckets), reducer.native.num_copied


def nothing(gradient):
    return None


@pytest.mark.parametrize(("keep", "expected"), [(nothing, 0), (torch.Tensor.detach, 8), (torch.t, 8)])
def test_a_gradient_that_arrives_as_a_view_is_copied_only_if_a_hook_keeps_it(ranks, keep, expected):
    assert ranks.run(linear_layers, keep, world_size=2) == [(4, expected)] * 2


M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def peak_of_memory(rank, world_size, kind):
    """By how many MiB the process's peak of memory grows when 64 MiB of gradients are synchronized, too."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)  # what is freed goes back to the system at once
    model = Gradients(*[(2048, 2048)] * 4)
    gradients = [torch.ones(2048, 2048) for _ in range(4)]

    def peak_mib():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024

    def synchronized(model):
        if kind == "ddp":
            return DistributedDataParallel(model), None
        return model, reducer_of(model, Config(kind))

    small, *kept = synchronized(Gradients((64, 64)))  # loads the code, and starts threads
    small([torch.ones(64, 64)]).backward()
    model(gradients).backward()
    before = peak_mib()
    forward, *kept = synchronized(model)
    for _ in range(2):
        forward(gradients).backward()
    return peak_mib() - before


@pytest.mark.check
def test_no_copy_of_the_gradients_is_kept():
    grown = {}
    for kind in ("ddp", "bf16"):
        fresh = Ranks(2)
        grown[kind] = max(fresh.run(peak_of_memory, kind))
        fresh.close()
    assert grown["ddp"] > 48, "DDP keeps its buckets, so the measurement sees nothing"
    assert grown["bf16"] < 30, grown


def users_hook(rank, world_size):
    model = Gradients((40,))
    reducer_of(model)
    seen = []
    model.weights[0].register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    synchronize(model, [torch.full((40,), float(rank))])
    return seen[0].unique().tolist(), model.weights[0].grad.unique().tolist()


def test_a_hook_after_accumulation_sees_this_ranks_gradient(ranks):
    assert ranks.run(users_hook, world_size=2) == [([0.0], [0.5]), ([1.0], [0.5])]
