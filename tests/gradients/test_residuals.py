"""Error feedback from end to end: real ranks over gloo, with everything that DDP does to buckets."""

import contextlib

import pytest
import torch
from models import Gradients, attach_to, normal, synchronize
from torch.distributed.algorithms.join import Join
from torch.utils._python_dispatch import TorchDispatchMode

import fusedcomm
from fusedcomm.config import Blocks, Chunks, Config, Feedback, TwoLevels

SHAPE = (20011,)
IN_BF16 = {"feedback": Feedback("bf16")}


# ---- the bits


def bits(rank, world_size, num_steps, wire, kwargs):
    ddp, _ = attach_to(Gradients(SHAPE), wire, **kwargs)
    return [synchronize(ddp, [normal(rank, step, SHAPE)])[0] for step in range(num_steps)]


@pytest.mark.sampled(by=lambda wire, kwargs: {"rotate": "blocks" in kwargs})
@pytest.mark.parametrize(
    ("wire", "kwargs"),
    [
        ("int8", {"feedback": Feedback(), "hosts": TwoLevels([[0, 1], [2, 3]], "fp32")}),
        ("int4", {"blocks": Blocks(rotate=True), **IN_BF16, "hosts": [[0, 2], [1, 3]]}),
        ("bf16", {**IN_BF16, "hosts": TwoLevels([[3, 1], [0, 2]], "fp16")}),
    ],
    ids=str,
)
def test_sums_on_two_levels_give_the_bits_of_simulate(ranks, wire, kwargs):
    outcome = ranks.run(bits, 3, wire, {**kwargs, "chunks": Chunks(8192)})
    residuals = fusedcomm.Residuals(kwargs["feedback"].format)
    config = Config(wire, sum="two-shot", **kwargs)
    for step in range(3):
        gradients = [normal(rank, step, SHAPE) for rank in range(4)]
        expected = fusedcomm.simulate(gradients, config, residuals=residuals)
        for on_rank in outcome:
            assert torch.equal(on_rank[step], expected), step


@pytest.mark.sampled
@pytest.mark.parametrize(("world_size", "sum"), [(2, "one-shot"), (3, "one-shot"), (2, "two-shot"), (3, "two-shot")])
@pytest.mark.parametrize(
    ("wire", "kwargs"),
    [
        ("bf16", {"feedback": Feedback()}),
        ("fp16", IN_BF16),
        ("int8", {"feedback": Feedback("bf16")}),
        ("fp8", {}),
        ("fp8", {"feedback": Feedback()}),
        ("int4", {"blocks": Blocks(rotate=True), "feedback": Feedback()}),
        ("int4", {"blocks": Blocks(rotate=True), **IN_BF16}),
    ],
    ids=str,
)
def test_every_step_gives_the_bits_of_simulate(ranks, world_size, sum, wire, kwargs):
    outcome = ranks.run(bits, 4, wire, {**kwargs, "sum": sum, "chunks": Chunks(4096)}, world_size=world_size)
    config = Config(wire, sum, **kwargs)
    residuals = None if config.feedback is None else fusedcomm.Residuals(config.feedback.format)
    for step in range(4):
        gradients = [normal(rank, step, SHAPE) for rank in range(world_size)]
        expected = fusedcomm.simulate(gradients, config, residuals=residuals)
        for on_rank in outcome:
            assert torch.equal(on_rank[step], expected), step


class CudaArithmetic(TorchDispatchMode):
    """Makes the CPU compute as torch does on CUDA. There, x + alpha·y is rounded once, and division by a number, or by
    a CPU tensor without dimensions, is multiplication by the reciprocal. Here every tensor without dimensions counts as
    a number, because one that would be on the device cannot be recognized."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten, kwargs = torch.ops.aten, kwargs or {}
        is_division = function in (aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar)
        if is_division and args[0].is_floating_point() and (not torch.is_tensor(args[1]) or args[1].dim() == 0):
            reciprocal = torch.ones(1, dtype=args[0].dtype) / torch.full((1,), float(args[1]), dtype=args[0].dtype)
            product = args[0] * reciprocal.squeeze()
            return args[0].copy_(product) if function in (aten.div_.Tensor, aten.div_.Scalar) else product
        alpha = kwargs.get("alpha", 1)
        if function is aten.add_.Tensor and alpha != 1:
            return args[0].copy_(args[0].double() + float(torch.tensor(alpha, dtype=torch.float32)) * args[1].double())
        return function(*args, **kwargs)


def test_the_stand_in_for_cudas_arithmetic_is_none_of_the_cpus():
    x = torch.linspace(0.5, 200, 10_000)
    with CudaArithmetic():
        as_cuda = x / 127.0
    assert 0.03 < (as_cuda != x / 127.0).float().mean() < 0.07
    with CudaArithmetic():
        assert torch.equal(x / torch.full((1,), 127.0), torch.div(x, torch.full_like(x, 127.0)))


def loaded_and_saved(rank, world_size, wire, kwargs, as_cuda):
    """Loads residuals and takes a step with zero gradients, with the arithmetic of the CPU or, if `as_cuda`, of CUDA.
    Returns the result and the new residuals."""
    ddp, comm = attach_to(Gradients(SHAPE), wire, **kwargs)
    state = {**comm.state_dict(), "residuals": {"weights.0": normal(rank, 0, SHAPE)}}
    comm.load_state_dict(state)
    with CudaArithmetic() if as_cuda else contextlib.nullcontext():
        (delivered,) = synchronize(ddp, [torch.zeros(SHAPE)])
        return delivered, comm.state_dict()["residuals"]["weights.0"]


@pytest.mark.sampled(by=lambda wire, kwargs, world_size: {"sum": kwargs["sum"]})
@pytest.mark.parametrize(
    ("wire", "kwargs", "world_size"),
    [
        ("int8", {"sum": "two-shot", "feedback": Feedback("bf16")}, 3),
        ("int4", {"sum": "two-shot", "blocks": Blocks(rotate=True), "feedback": Feedback("bf16")}, 3),
        ("int4", {"sum": "one-shot", "feedback": Feedback()}, 3),
        ("fp16", {"sum": "two-shot", "predivide": 3, "feedback": Feedback()}, 3),
        ("fp16", {"sum": "one-shot", "predivide": 0.7, "feedback": Feedback()}, 2),
    ],
    ids=str,
)
def test_states_have_the_same_bits_with_cudas_arithmetic(ranks, wire, kwargs, world_size):
    on_cpu, on_cuda = (
        ranks.run(loaded_and_saved, wire, kwargs, as_cuda, world_size=world_size) for as_cuda in (False, True)
    )
    for (delivered, left_out), (delivered_cuda, left_out_cuda) in zip(on_cpu, on_cuda, strict=True):
        assert torch.equal(delivered, delivered_cuda)
        assert torch.equal(left_out, left_out_cuda)


# ---- nothing is lost

SHAPES = ((64, 33), (128,), (40, 50), (3, 1000), (7,))
SMALL_BUCKETS = {"bucket_cap_mb": 0.012}


def what_was_delivered(rank, world_size, scenario, kwargs):
    """Trains. Returns two lists, with one entry for each parameter: Σ results + the consolidated residual, and Σ this
    rank's gradients. Returns also the number of buckets and the number of non-finite elements."""
    ddp, comm = attach_to(Gradients(*SHAPES), ddp_kwargs=SMALL_BUCKETS, **kwargs)
    delivered = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    handed_in = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]

    def step(number, contribute=True):
        ddp.zero_grad(set_to_none=True)
        gradients = [normal(rank, 10 * number + index, shape) for index, shape in enumerate(SHAPES)]
        if scenario == "no_sync" and number % 2:
            with ddp.no_sync():
                ddp(gradients).backward()
            for total, g in zip(handed_in, gradients, strict=True):
                total += g
        ddp(gradients).backward()
        for total, g in zip(handed_in, gradients, strict=True):
            total += g
        for total, weight in zip(delivered, ddp.module.weights, strict=True):
            total += weight.grad

    num_steps = 6
    if scenario == "join":
        # A rank that has finished takes part with zero gradients and sends its residuals.
        num_steps = 6 if rank == 0 else 3
        with Join([ddp]):
            for number in range(num_steps):
                step(number)
    else:
        for number in range(num_steps):
            step(number)
    state = comm.state_dict(consolidated=True)
    buckets = len(comm.plan().buckets)
    for index, total in enumerate(delivered):
        residual = state["residuals"].get(f"weights.{index}")
        if residual is not None:
            total += residual.view(SHAPES[index])
    return delivered, handed_in, buckets, comm.stats().nonfinite


@pytest.mark.sampled
@pytest.mark.parametrize("scenario", ["plain", "no_sync", "join"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"feedback": Feedback()},
        {"blocks": Blocks(rotate=True), "feedback": Feedback()},
        {"wires": {"weights.2": "int8", "weights.3": "bf16"}, "feedback": Feedback()},
    ],
    ids=str,
)
def test_what_was_not_delivered_is_in_the_residuals(ranks, scenario, kwargs):
    """This includes the step after which DDP rebuilds the buckets, which moves residuals between buckets."""
    world_size = 3
    outcome = ranks.run(what_was_delivered, scenario, kwargs, world_size=world_size)
    assert outcome[0][2] > 1
    for index in range(len(SHAPES)):
        wanted = sum(on_rank[1][index] for on_rank in outcome) / world_size
        delivered = outcome[0][0][index]  # rank 0 takes part to the end
        assert torch.allclose(delivered, wanted, rtol=0, atol=2e-5 * wanted.abs().max().item() + 1e-5), index


# ---- non-finite gradients


def after_an_overflow(rank, world_size, format):
    ddp, comm = attach_to(Gradients(SHAPE), feedback=Feedback(format))
    broken = normal(rank, 0, SHAPE)
    if rank == 1:
        broken[777] = torch.inf
        broken[7777] = torch.nan
    (first,) = synchronize(ddp, [broken])
    (second,) = synchronize(ddp, [normal(rank, 1, SHAPE)])
    return bool(first.isfinite().all()), bool(second.isfinite().all()), comm.state_dict()["residuals"]["weights.0"]


@pytest.mark.sampled(by=lambda format: {})
@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_an_overflow_does_not_live_on(ranks, format):
    for first_finite, second_finite, residual in ranks.run(after_an_overflow, format, world_size=2):
        assert not first_finite and second_finite and residual.isfinite().all()


# ---- autocast and default dtype


def under_autocast(rank, world_size):
    """Trains under autocast with gradients as large as a GradScaler makes them: residuals exceed the largest fp16.
    Returns for each parameter Σ results + the consolidated residual."""
    ddp, comm = attach_to(Gradients(*SHAPES), ddp_kwargs=SMALL_BUCKETS, feedback=Feedback(), blocks=Blocks(rotate=True))
    gradients = [65536 * normal(rank, index, shape) for index, shape in enumerate(SHAPES)]
    delivered = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for _ in range(3):
        with torch.autocast("cpu", torch.float16):
            seen = synchronize(ddp, gradients)
        delivered = [total + grad for total, grad in zip(delivered, seen, strict=True)]
    with torch.autocast("cpu", torch.float16):
        residuals = comm.state_dict(consolidated=True)["residuals"]
    zero = torch.zeros(())  # parameters in buckets that are summed exactly have no residual
    left_out = [residuals.get(f"weights.{index}", zero).view(-1) for index in range(len(SHAPES))]
    return [total.view(-1) + values for total, values in zip(delivered, left_out, strict=True)]


def test_autocast_does_not_touch_residuals(ranks):
    for totals in ranks.run(under_autocast, world_size=2):
        for index, total in enumerate(totals):
            wanted = 3 * 65536 * sum(normal(rank, index, SHAPES[index]).double().view(-1) for rank in range(2)) / 2
            assert torch.allclose(total, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())


def under_another_default_dtype(rank, world_size):
    torch.set_default_dtype(torch.bfloat16)
    try:
        ddp, comm = attach_to(
            Gradients(*SHAPES), ddp_kwargs=SMALL_BUCKETS, feedback=Feedback(), blocks=Blocks(rotate=True)
        )
        synchronize(ddp, [normal(rank, 0, shape).float() for shape in SHAPES], steps=3)
        state = comm.state_dict()
        if rank == 1:  # a rank without residuals takes part with zeros
            comm.load_state_dict({**state, "residuals": {}})
        consolidated = comm.state_dict(consolidated=True)["residuals"]
        dtypes = {values.dtype for residuals in (state["residuals"], consolidated) for values in residuals.values()}
        return dtypes, state["residuals"], consolidated
    finally:
        torch.set_default_dtype(torch.float32)


def test_residuals_are_fp32_whatever_the_default_dtype(ranks):
    outcome = ranks.run(under_another_default_dtype, world_size=2)
    for dtypes, _, consolidated in outcome:
        assert dtypes == {torch.float32}
        assert consolidated.keys() == outcome[0][1].keys()
        assert all(torch.equal(values, outcome[0][1][name] / 2) for name, values in consolidated.items())
