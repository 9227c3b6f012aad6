"""grad_norm() and clip_grad_norm_() of a handle and of a reducer, beside torch's on the same gradients."""

import contextlib
import copy
import math

import pytest
import torch
import torch.distributed as dist
from models import Gradients, Mixed, Mlp, Sparse, no_sync_of, reducer_of, synchronized
from torch import nn

from fusedcomm.config import Checks, Config

FRONT_ENDS = ("hook", "hook with views", "reducer")
WIRES = ("fp32", "bf16", "int8", "int4")


def fp64_norm(parameters, norm_type=2.0):
    flat = [p.grad.to_dense().double().flatten() for p in parameters if p.grad is not None]
    return torch.linalg.vector_norm(torch.cat(flat), norm_type).item()


def backward(forward, rank, step, scale=1.0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(forward.parameters()).dtype
    x = torch.randn(8, 10, generator=generator).to(dtype if dtype == torch.float64 else torch.float32)
    y = torch.randn(8, 5, generator=generator)
    (scale * nn.functional.mse_loss(forward(x).float(), y)).backward()


def num_read(comm):
    """Parameters whose gradients a norm would read now."""
    return len(comm.synchronizer_now().epilogue.squares(comm.parameters_now())[1])


def norms(rank, world_size, front_end, wire):
    torch.manual_seed(3)
    model = Mlp()
    forward, comm = synchronized(front_end, model, wire, bucket_mib=0.005)
    seen = []
    for step in range(4):
        for part in range(2):
            with no_sync_of(forward, comm)() if part == 0 else contextlib.nullcontext():
                backward(forward, rank, step + 10 * part)
        read = num_read(comm)
        expected = fp64_norm(model.parameters())
        norm = comm.grad_norm()
        assert norm.dtype == torch.float32
        before = [p.grad.clone() for p in model.parameters()]
        assert comm.clip_grad_norm_(2 * expected) == norm  # does not clip
        assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
        theirs = [copy.deepcopy(p) for p in model.parameters()]
        for p, gradient in zip(theirs, before, strict=True):
            p.grad = gradient
        torch_norm = torch.nn.utils.clip_grad_norm_(theirs, 0.3 * expected)
        assert comm.clip_grad_norm_(0.3 * expected) == norm
        for p, other in zip(model.parameters(), theirs, strict=True):
            torch.testing.assert_close(p.grad, other.grad, rtol=1e-6, atol=0)
        seen.append((read, norm.item(), expected, torch_norm.item()))
        # Clipping has changed the gradients: their norm is read.
        assert num_read(comm) == len(theirs)
        assert comm.grad_norm().item() == pytest.approx(0.3 * expected, rel=1e-5)
        forward.zero_grad(set_to_none=step % 2 == 0)
    comm.detach()
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_the_norm_is_torchs_and_the_same_on_every_rank_and_reads_no_gradient(ranks, front_end, wire, world_size):
    of_ranks = ranks.run(norms, front_end, wire, world_size=world_size)
    for seen in of_ranks:
        assert [norm for _, norm, _, _ in seen] == [norm for _, norm, _, _ in of_ranks[0]]
        assert seen[0][0] > 0  # nobody had asked for it
        assert [read for read, _, _, _ in seen[1:]] == [0, 0, 0]
        for _, norm, expected, theirs in seen:
            assert norm == pytest.approx(expected, rel=1e-6)
            assert norm == pytest.approx(theirs, rel=1e-5)


def odd_models(rank, world_size, front_end, make, config):
    torch.manual_seed(3)
    model = make()
    forward, comm = synchronized(front_end, model, config, bucket_mib=0.005, find_unused=front_end == "hook")
    for step in range(3):
        backward(forward, rank, step)
        assert comm.grad_norm().item() == pytest.approx(fp64_norm(model.parameters()), rel=1e-6)
        for norm_type in (1.0, math.inf):
            expected = fp64_norm(model.parameters(), norm_type)
            assert comm.grad_norm(norm_type).item() == pytest.approx(expected, rel=1e-6)
        forward.zero_grad()
    comm.detach()


@pytest.mark.filterwarnings("ignore:fusedcomm adds up squares")
def mlp64():
    return Mlp(torch.float64)


@pytest.mark.sampled
@pytest.mark.parametrize("make", [Mixed, Sparse, mlp64])
@pytest.mark.parametrize("front_end", ["hook", "reducer"])
def test_gradients_that_the_codec_does_not_carry(ranks, front_end, make):
    ranks.run(odd_models, front_end, make, Config("bf16"), world_size=2)


@pytest.mark.sampled
@pytest.mark.parametrize("checks", [Checks(verify_every=1), Checks(measure_every=1)], ids=["verified", "measured"])
@pytest.mark.parametrize("front_end", ["hook", "reducer"])
def test_buckets_that_are_checked(ranks, front_end, checks):
    ranks.run(odd_models, front_end, Mlp, Config("int8", checks=checks), world_size=2)


def changed_gradients(rank, world_size):
    model = Mlp()
    comm = reducer_of(model, "bf16", bucket_mib=0.0001)
    backward(model, rank, 0)
    comm.grad_norm()
    model.zero_grad()
    backward(model, rank, 1)
    first, *_, last = model.parameters()
    assert num_read(comm) == 0
    with torch.no_grad():
        first.grad.mul_(3)
    last.grad = last.grad.clone()
    assert 2 <= num_read(comm) < len(list(model.parameters()))
    assert comm.grad_norm().item() == pytest.approx(fp64_norm(model.parameters()), rel=1e-6)
    model.zero_grad(set_to_none=False)
    assert comm.grad_norm() == 0
    more = nn.Parameter(torch.ones(4))
    more.grad = torch.full((4,), 2.0)
    assert comm.grad_norm(also=[more, more, first]) == 4
    comm.detach()


def test_gradients_that_changed_or_are_not_synchronized_are_read(ranks):
    ranks.run(changed_gradients, world_size=2)


def sharded(rank, world_size):
    """Ranks 0 and 1 train one replica, 2 and 3 the other; ranks 0 and 2 hold the first shard."""
    data = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][rank % 2]
    tensor = [dist.new_group(pair) for pair in ([0, 1], [2, 3])][rank // 2]
    model = Gradients((6, 7), (5,))  # a shard, and a parameter that all ranks hold
    shard, whole = model.weights
    comm = reducer_of(model, "fp32", process_group=data)
    for step in range(2):
        model.zero_grad()
        model([torch.full((6, 7), float(rank % 2 + 1)), torch.full((5,), 3.0)]).backward()
        expected = math.sqrt(42 * 1 + 42 * 4 + 5 * 9)
        norm = comm.grad_norm(tensor_parallel_group=tensor, replicated=[whole])
        assert norm.item() == pytest.approx(expected, rel=1e-6), step
        assert comm.grad_norm(math.inf, tensor_parallel_group=tensor, replicated=[whole]) == 3
        comm.clip_grad_norm_(1.0, tensor_parallel_group=tensor, replicated=[whole])
        assert shard.grad[0, 0].item() == pytest.approx((rank % 2 + 1) / expected, rel=1e-5)
    comm.detach()


@pytest.mark.filterwarnings("ignore:fusedcomm adds up squares")
def test_a_tensor_parallel_group(ranks):
    ranks.run(sharded, world_size=4)


def nonfinite(rank, world_size):
    model = Gradients((300,))
    comm = reducer_of(model, "bf16")
    for step in range(2):
        gradient = torch.ones(300)
        if rank == 1 and step == 1:
            gradient[7] = math.inf
        model.zero_grad()
        model([gradient]).backward()
        norm = comm.grad_norm()
        assert math.isfinite(norm) == (step == 0)
    with pytest.raises(RuntimeError, match=r"the norm of the gradients is inf"):
        comm.clip_grad_norm_(1.0, error_if_nonfinite=True)
    comm.clip_grad_norm_(1.0)
    assert not model.weights[0].grad.isfinite().all() or (model.weights[0].grad == 0).any()
    comm.detach()


def test_norms_that_are_not_finite(ranks):
    ranks.run(nonfinite, world_size=2)


def refusals(rank, world_size):
    model = Mlp()
    comm = reducer_of(model, "bf16")
    with pytest.raises(RuntimeError, match="none of the 8 parameters has a gradient"):
        comm.clip_grad_norm_(1.0)
    backward(model, rank, 0)
    with pytest.raises(ValueError, match="norm_type=-1.0"):
        comm.grad_norm(-1)
    with pytest.raises(ValueError, match="give the group"):
        comm.grad_norm(replicated=list(model.parameters()))
    strange = nn.Parameter(torch.ones(3))
    strange.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"also holds 1 parameters .* of shape \(3,\)"):
        comm.clip_grad_norm_(1.0, optimizer=torch.optim.SGD([*model.parameters(), strange], 0.1))
    with pytest.raises(ValueError, match="6 parameters of this norm are not in the optimizer"):
        comm.clip_grad_norm_(1.0, optimizer=torch.optim.SGD(list(model.parameters())[:2], 0.1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    comm.clip_grad_norm_(1e-3, optimizer=optimizer)
    backward(model, rank, 1)
    with pytest.raises(RuntimeError, match="a backward pass came between"):
        optimizer.step()
    comm.detach()
    with pytest.raises(RuntimeError, match="is detached, so no gradients are synchronized"):
        comm.grad_norm()


def test_bad_input(ranks):
    ranks.run(refusals, world_size=2)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_optimizer_clips_while_it_steps(ranks, make):
    ranks.run(handed_over, make, world_size=2)


def handed_over(rank, world_size, make):
    torch.manual_seed(3)
    model = Mlp()
    other = copy.deepcopy(model)
    comm = reducer_of(model, "fp32")
    ours, theirs = make(model.parameters(), lr=0.1, fused=True), make(other.parameters(), lr=0.1, fused=True)
    calls = []
    for step in range(4):
        if step == 1:  # the user's hooks, after ours
            ours.register_step_pre_hook(lambda *_: calls.append("before"))
            ours.register_step_post_hook(lambda *_: calls.append("after"))
        if step == 2:  # a norm whose step is left out
            backward(model, rank, 7)
            comm.clip_grad_norm_(1e-3, optimizer=ours)
            model.zero_grad()
        backward(model, rank, step)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            q.grad = p.grad.clone()
        max_norm = 0.3 * fp64_norm(other.parameters()) if step != 2 else 1e6
        versions = [p.grad._version for p in model.parameters()]
        comm.clip_grad_norm_(max_norm, optimizer=ours)
        if getattr(ours, "_step_supports_amp_scaling", False):  # torch 2.11's Adagrad does not take a factor
            assert versions == [p.grad._version for p in model.parameters()]
        torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm)
        ours.step()
        theirs.step()
        assert not hasattr(ours, "grad_scale")
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
        model.zero_grad()
    assert calls == 3 * ["before", "after"]
    comm.detach()
