"""Error feedback from end to end: the bits of each step. What is saved and loaded: tests/session."""

import contextlib

import pytest
import torch
from models import Gradients, attach_to, normal, synchronize
from torch.utils._python_dispatch import TorchDispatchMode

import fusedcomm
from fusedcomm.config import Chunks, Config, Feedback, TwoLevels

SHAPE = (20011,)
FED_BACK = {"feedback": Feedback()}


def bits(rank, world_size, num_steps, wire, kwargs):
    ddp, _ = attach_to(Gradients(SHAPE), wire, **kwargs)
    return [synchronize(ddp, [normal(rank, step, SHAPE)])[0] for step in range(num_steps)]


WAYS = [
    ("bf16", FED_BACK),
    ("fp16", FED_BACK),
    ("int8", FED_BACK),
    ("fp8", {}),
    ("fp8", FED_BACK),
    ("int4", FED_BACK),
]
ON_TWO_LEVELS = [
    ("int8", {**FED_BACK, "hosts": TwoLevels([[0, 1], [2, 3]], "fp32")}),
    ("int4", {**FED_BACK, "hosts": [[0, 2], [1, 3]]}),
    ("bf16", {**FED_BACK, "hosts": TwoLevels([[3, 1], [0, 2]], "fp16")}),
]
CASES = [(*way, size, sum) for way in WAYS for size in (2, 3) for sum in ("one-shot", "two-shot")]
CASES += [(*way, 4, "two-shot") for way in ON_TWO_LEVELS]


@pytest.mark.sampled(by=lambda wire, kwargs, world_size, sum: {"way": (wire, kwargs), "sum": (world_size, sum)})
@pytest.mark.parametrize(("wire", "kwargs", "world_size", "sum"), CASES, ids=str)
def test_every_step_gives_the_bits_of_simulate(ranks, world_size, sum, wire, kwargs):
    outcome = ranks.run(bits, 4, wire, {**kwargs, "sum": sum, "chunks": Chunks(4096)}, world_size=world_size)
    config = Config(wire, sum, **kwargs)
    residuals = None if config.feedback is None else fusedcomm.Residuals()
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
        ("int8", {"sum": "two-shot", "feedback": Feedback()}, 3),
        ("int4", {"sum": "two-shot", "feedback": Feedback()}, 3),
        ("int4", {"sum": "one-shot", "feedback": Feedback()}, 3),
        ("fp16", {"sum": "two-shot", "feedback": Feedback()}, 3),
    ],
    ids=str,
)
def test_states_have_the_same_bits_with_cudas_arithmetic(ranks, wire, kwargs, world_size):
    x = torch.linspace(0.5, 200, 10_000)
    with CudaArithmetic():
        assert not torch.equal(x / 127.0, torch.div(x, torch.full_like(x, 127.0)))
    on_cpu, on_cuda = (
        ranks.run(loaded_and_saved, wire, kwargs, as_cuda, world_size=world_size) for as_cuda in (False, True)
    )
    for (delivered, left_out), (delivered_cuda, left_out_cuda) in zip(on_cpu, on_cuda, strict=True):
        assert torch.equal(delivered, delivered_cuda)
        assert torch.equal(left_out, left_out_cuda)
