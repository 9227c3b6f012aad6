"""GradScaler beside torch's on DDP without a hook: the same scales, skipped steps, gradients and parameters."""

import contextlib
import math

import pytest
import torch
from models import Gradients, Mlp, Sparse, integers, mean_of_integers, no_sync_of, reducer_of, synchronized
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Checks, Config

NUM_STEPS = 8
CLIP = 0.05


def loss_of(forward, rank, step, part):
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    x, y = torch.randn(8, 10, generator=generator), torch.randn(8, 5, generator=generator)
    return nn.functional.mse_loss(forward(x).float(), y)


def optimizers_of(model, kind):
    parameters = list(model.parameters())
    if kind == "two":
        return [torch.optim.SGD(parameters[:2], 0.1, momentum=0.9), torch.optim.SGD(parameters[2:], 0.1)]
    if kind == "fused":
        return [torch.optim.AdamW(parameters, 0.01, fused=True)]
    return [torch.optim.SGD(parameters, 0.1, momentum=0.9)]


def train(rank, world_size, front_end, kind, init_scale, clips, accumulate):
    """Steps of which one has an Inf on rank 1 and another a NaN. Returns what the ranks may compare."""
    torch.manual_seed(5)
    model = Mlp()
    options = {"init_scale": init_scale, "growth_interval": 3}
    if front_end == "torch":
        forward, comm = DistributedDataParallel(model, bucket_cap_mb=0.001), None
        scaler = torch.amp.GradScaler("cpu", **options)
    else:
        forward, comm = synchronized(front_end, model, "fp32", bucket_mib=0.001)
        scaler = fusedcomm.GradScaler(comm, "cpu", **options)
    optimizers = optimizers_of(model, kind)
    seen = []
    for step in range(NUM_STEPS):
        for part in range(accumulate):
            with contextlib.nullcontext() if part == accumulate - 1 else no_sync_of(forward, comm)():
                loss = loss_of(forward, rank, step, part)
                if step in (2, 5) and rank == 1:
                    # Only the first layer's gradient is not finite.
                    first = next(model.parameters())
                    bad = math.inf if step == 2 else math.nan
                    loss = loss + (first * torch.where(torch.arange(first.numel()).view_as(first) == 3, bad, 0.0)).sum()
                scaler.scale(loss).backward()
        if clips:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for optimizer in optimizers:
            scaler.step(optimizer)
        found = [None if p.grad is None else p.grad.to_dense().clone() for p in model.parameters()]
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        seen.append((scaler.get_scale(), found, [p.detach().clone() for p in model.parameters()]))
    if front_end != "torch":
        comm.detach()
    return seen


CASES = {
    "plain": ("one", 2.0**16, False, 1),
    "clipped": ("one", 2.0**16, True, 1),
    "accumulated": ("one", 2.0**10, True, 3),
    "two optimizers": ("two", 2.0**16, False, 1),
    "fused": ("fused", 2.0**16, False, 1),
    "fused and clipped": ("fused", 2.0**16, True, 2),
    "no power of two": ("one", 1000.0, False, 1),
}


def by_what_case_has(name: str, front_end: str) -> dict:
    has = zip(("optimizers", "scale", "clips", "accumulate"), CASES[name], strict=True)
    return {"front end": front_end, **dict(has)}


@pytest.mark.sampled(by=by_what_case_has)
@pytest.mark.parametrize("front_end", ["hook", "reducer"])
@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_torchs_scaler_bit_for_bit(ranks, front_end, name):
    theirs = ranks.run(train, "torch", *CASES[name], world_size=2)
    ours = ranks.run(train, front_end, *CASES[name], world_size=2)
    fused = CASES[name][0] == "fused" and not CASES[name][2]
    for mine, other in zip(ours, theirs, strict=True):
        assert len({scale for scale, _, _ in mine}) > 2  # it has grown and shrunk
        for step, ((a, found, parameters), (b, expected, others)) in enumerate(zip(mine, other, strict=True)):
            assert a == b, step
            same = [*zip(parameters, others, strict=True)]
            # Torch's fused optimizers leave the gradients scaled.
            same += [] if fused or step in (2, 5) else [*zip(found, expected, strict=True)]
            for x, y in same:
                if fused:
                    # One division within the step, in place of a multiplication before it.
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)
                else:
                    assert torch.equal(x, y), (step, x, y)
    assert [scale for scale, _, _ in ours[0]] == [scale for scale, _, _ in ours[1]]


# --- a gradient that is not finite, wherever it is, whoever finds it ------------------------------------------------

WIRES = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
SHAPES = ((40, 50), (300,), (7,))
# Parameter of rank 1 that is not finite, its value, and whether unscale_() is called before step().
STEPS = (
    (None, 0.0, False),
    (0, math.inf, False),
    (1, math.nan, True),
    (None, 0.0, True),
    (2, math.inf, True),
    (0, math.nan, True),
    (1, -math.inf, False),
    (2, math.nan, False),
    (None, 0.0, False),
)
# Ways in which the scaler finds it: in the sum of squares of unpack, or in gradients that it reads itself.
WAYS = ("plain", "two optimizers", "fused", "edited", "verified", "unused", "float64", "not synchronized")
OF_DDP = ("off", "thawed")
FINDINGS = [
    *((front_end, way, wire) for front_end in ("hook", "reducer", "DataParallel") for way in WAYS for wire in WIRES),
    *(("hook", way, wire) for way in OF_DDP for wire in WIRES if way != "off" or wire == "fp32"),
]


def front_end_of(model, front_end, way, wire, checks):
    """What runs the forward pass, and what the scaler takes. `way` decides which parameters are synchronized."""
    config = "off" if way == "off" else Config(wire, wires={"1d": wire}, checks=checks)
    if way == "not synchronized" and front_end == "reducer":
        comm = reducer_of([pair for pair in model.named_parameters() if pair[0] != "weights.1"], config)
        return model, comm, comm
    if way == "not synchronized":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["weights.1"])
    model.weights[1].requires_grad_(way != "thawed")
    forward, comm = synchronized(front_end, model, config, find_unused=way == "unused")
    model.weights[1].requires_grad_(True)
    return forward, forward if front_end == "DataParallel" else comm, comm


def findings(rank, world_size, front_end, way, wire):
    model = Gradients(*SHAPES, dtype=torch.float64 if way == "float64" else torch.float32)
    checks = Checks(verify_every=1 if way == "verified" else 0)
    forward, taken, comm = front_end_of(model, front_end, way, wire, checks)
    scaler = fusedcomm.GradScaler(taken, "cpu", init_scale=2.0**10, growth_interval=1000)
    parts = [model.weights[:2], model.weights[2:]] if way == "two optimizers" else [model.weights]
    optimizers = [torch.optim.SGD(part, 1.0, fused=way == "fused") for part in parts]
    own = 1 if way in ("not synchronized", "thawed") else None  # a parameter of which each rank has its own gradient
    for bad, value, unscales in STEPS:
        model.zero_grad()
        scale, before = scaler.get_scale(), [p.detach().clone() for p in model.weights]
        gradients = [integers(rank, shape, p.dtype) for shape, p in zip(SHAPES, model.weights, strict=True)]
        if bad is not None and (rank == 1 or bad == own):
            gradients[bad].view(-1)[-2] = value
        scaler.scale(forward(gradients)).backward()
        if way == "edited":
            with torch.no_grad():
                for p in model.weights:
                    p.grad.mul_(1.0)
        if unscales:
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            if bad is None or len(optimizers) == 1:  # a norm that is not finite makes all gradients NaN
                comm.clip_grad_norm_(1e6)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (scale if bad is None else scale / 2), (bad, value)
        for i, (p, old) in enumerate(zip(model.weights, before, strict=True)):
            if bad is not None:
                # Torch, too, lets an optimizer step whose own gradients are finite.
                is_skipped = len(optimizers) == 1 or (i < 2) == (bad < 2)
                assert torch.equal(p, old) if is_skipped else p.isfinite().all(), (bad, value, i)
                continue
            expected = integers(rank, SHAPES[i]) if i == own else mean_of_integers(world_size, SHAPES[i])
            # int4's step is a seventh of 8, and a mean is rounded twice.
            torch.testing.assert_close(old - p, expected.to(p.dtype), rtol=0, atol=2.5 if wire == "int4" else 0.6)
    comm.detach()


@pytest.mark.sampled(by=lambda found: dict(zip(("front end", "way", "wire"), found, strict=True)))
@pytest.mark.parametrize("found", FINDINGS, ids=", ".join)
def test_a_gradient_that_is_not_finite_skips_the_step_whoever_finds_it(ranks, found):
    ranks.run(findings, *found, world_size=2)


def searched(rank, world_size, front_end):
    """The scale doubles in every step, so that a gradient that an earlier scale was taken out of is seen."""
    model = Gradients(*SHAPES)
    feedback = fusedcomm.Feedback()
    auto = fusedcomm.Auto((Config("bf16", feedback=feedback), Config("int8", feedback=feedback)))
    forward, comm = synchronized(front_end, model, auto)
    scaler = fusedcomm.GradScaler(comm, "cpu", init_scale=2.0**-60, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    gradients, num_after = [integers(rank, shape) for shape in SHAPES], 0
    for step in range(300):
        model.zero_grad()
        before, scale = [p.detach().clone() for p in model.weights], scaler.get_scale()
        is_bad = step % 5 == 3
        used = [g.clone() for g in gradients]
        if is_bad and rank == 1:
            used[0][-1, -1] = math.inf
        scaler.scale(forward(used)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (scale / 2 if is_bad else scale * 2), step
        if scale > 2.0**60:
            scaler.update(2.0**-60)
        for p, old, shape in zip(model.weights, before, SHAPES, strict=True):
            mean = mean_of_integers(world_size, shape) if not is_bad else torch.zeros(shape)
            torch.testing.assert_close(old - p, mean, rtol=0, atol=1.5)  # with the residual of the step before
        num_after += comm.tuning().finished
        if num_after == 12:
            break
    assert num_after == 12
    comm.detach()


@pytest.mark.parametrize("front_end", ["hook", "reducer"])
def test_a_search_takes_each_scale_out_of_the_gradients_that_have_it(ranks, front_end):
    ranks.run(searched, front_end, world_size=2)


def test_sparse_gradients(ranks):
    ranks.run(sparse_steps, world_size=2)


def test_gradients_in_bf16_are_rounded_twice_as_torch_does(ranks):
    ranks.run(bf16_steps, world_size=2)


def sparse_steps(rank, world_size):
    torch.manual_seed(5)
    model = Sparse()
    comm = reducer_of(model, "fp32")
    scaler = fusedcomm.GradScaler(comm, "cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = []
    for scaled in (False, True, True):
        optimizer.zero_grad()
        loss = loss_of(model, rank, 0, 0)
        if not scaled:
            loss.backward()
            plain = [p.grad.to_dense().clone() for p in model.parameters()]
            continue
        scaler.scale(loss).backward()
        for p, expected in zip(model.parameters(), plain, strict=True):
            torch.testing.assert_close(p.grad.to_dense(), expected)
        scaler.unscale_(optimizer)
        scaler.update()
    comm.detach()


def bf16_steps(rank, world_size):
    """The mean is rounded to bf16, and then the unscaled gradient."""
    torch.manual_seed(5)
    model = Mlp(torch.bfloat16)
    comm = reducer_of(model, "bf16")
    scaler = fusedcomm.GradScaler(comm, "cpu", init_scale=1000.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch_scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
    for scales in (False, True):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(rank)
        loss = model(torch.randn(8, 10, generator=generator).bfloat16()).float().square().sum()
        if not scales:
            torch_scaler.scale(loss).backward()
            torch_scaler.unscale_(optimizer)
            plain = [p.grad.clone() for p in model.parameters()]
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            for p, expected in zip(model.parameters(), plain, strict=True):
                assert torch.equal(p.grad, expected)
    comm.detach()


def refusals(rank, world_size):
    model = Mlp()
    comm = reducer_of(model, "fp32")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TypeError, match=r"fusedcomm.attach\(ddp\), .*, not Linear\. .*torch.amp.GradScaler"):
        fusedcomm.GradScaler([comm, nn.Linear(2, 2)], "cpu")
    scaler = fusedcomm.GradScaler(comm, "cpu")
    scaler.scale(loss_of(model, rank, 0, 0)).backward()
    with pytest.raises(RuntimeError, match=r"unscaled already, and no step has used them"):
        scaler.scale(loss_of(model, rank, 0, 1))
    model.zero_grad()
    scaler.scale(loss_of(model, rank, 1, 0)).backward()  # the gradients were dropped
    scaler.step(optimizer)
    scaler.update()
    # Only gradients of this rank, which are still scaled.
    model.zero_grad()
    with comm.no_sync():
        scaler.scale(loss_of(model, rank, 2, 0)).backward()
    scaled = [p.grad.clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    for p, before in zip(model.parameters(), scaled, strict=True):
        assert torch.equal(p.grad, before / scaler.get_scale())
    scaler.update()
    scaler.release()
    model.zero_grad()
    loss_of(model, rank, 3, 0).backward()
    comm.detach()


def test_gradients_are_never_a_mixture(ranks):
    ranks.run(refusals, world_size=2)


def unscaled_pass(rank, world_size):
    model = Mlp()
    comm = reducer_of(model, "fp32")
    scaler = fusedcomm.GradScaler(comm, "cpu")
    loss = scaler.scale(loss_of(model, rank, 0, 0))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has not scaled since the last pass"):
        loss.backward()


def test_a_pass_without_a_scaled_loss_fails_on_every_rank(ranks):
    ranks.run(unscaled_pass, world_size=2)


def test_a_disabled_scaler_does_nothing(ranks):
    ranks.run(disabled, world_size=2)


def disabled(rank, world_size):
    model = Mlp()
    comm = reducer_of(model, "fp32")
    scaler = fusedcomm.GradScaler(comm, "cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_of(model, rank, 0, 0).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    scaler.scale(loss_of(model, rank, 0, 0)).backward()
    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))
    scaler.step(optimizer)
    scaler.update()
    comm.detach()
