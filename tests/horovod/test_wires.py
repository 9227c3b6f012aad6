"""Compressions: what operations make of them, and that an optimizer's gradients are summed in their wires."""

import pytest
import torch
from jobs import job
from models import Gradients, integers, normal

import fusedcomm
import fusedcomm.horovod as hvd
from fusedcomm.config import Chunks, Config, Feedback


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16), ("none", None)])
def test_a_script_that_compresses_by_itself_gets_the_dtype_and_its_own_back(name, dtype):
    compression = getattr(hvd.Compression, name)
    for given in (torch.float32, torch.float64, torch.float16, torch.int64):
        tensor = integers(0, (5, 6), given)
        sent, context = compression.compress(tensor)
        assert sent.dtype == (dtype if dtype and given.is_floating_point else given)
        assert torch.equal(compression.decompress(sent, context), tensor)
        assert compression.decompress(sent, context).dtype == given


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64]


def check_operations(rank, size):
    """Each name comes with another dtype every time."""
    with job():
        for compression in (hvd.Compression.bf16, hvd.Compression.fp16):
            how = dict(name="x", op=hvd.Sum, compression=compression)
            for dtype in DTYPES:
                every = [integers(other, (3, 5, 7), dtype) for other in range(size)]
                total = torch.stack([each.double() for each in every]).sum(0).to(dtype)
                given = every[rank].clone().requires_grad_(dtype.is_floating_point)
                found = [hvd.allreduce(given, **how), *hvd.grouped_allreduce([given, given[0].clone()], **how)]
                for result, wanted in zip(found, (total, total, total[0]), strict=True):
                    assert result.dtype == dtype and torch.equal(result, wanted), (compression, dtype)
                own = torch.arange(3).tensor_split(size)[rank]
                assert torch.equal(hvd.reducescatter(given, **how), total[own])
                if given.requires_grad:
                    found[0].backward(torch.ones_like(given))
                    assert torch.equal(given.grad, torch.full_like(given, size))


def test_operations_sum_what_was_cast(ranks):
    ranks.run(check_operations, world_size=3)


CONFIG = Config("int4", feedback=Feedback(), wires={"half.*": "bf16", "exact.*": "fp32"}, chunks=Chunks(4096))
WIRES = {"x": "int4", "half.x": "bf16", "exact.x": "fp32"}
SHAPE, NUM_STEPS = (71, 281), 4


def gradients_in_wires(rank, size):
    """The gradients by name, in each step."""
    found, model = [], Gradients(*[SHAPE] * len(WIRES))
    named = list(zip(WIRES, model.weights, strict=True))
    with job():
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1),
            named,
            compression=hvd.Compression.of(CONFIG),
            groups=[[each] for each in model.weights],
        )
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model([normal(rank, step, SHAPE)] * len(WIRES)).backward()
            optimizer.synchronize()
            found.append({name: each.grad for name, each in named})
    return found


def test_an_optimizers_gradients_have_the_bits_of_simulate_in_the_wire_of_each_name(ranks):
    outcome = ranks.run(gradients_in_wires, world_size=3)
    for name, wire in WIRES.items():
        residuals = fusedcomm.Residuals()
        for step in range(NUM_STEPS):
            gradients = [normal(rank, step, SHAPE) for rank in range(3)]
            is_exact = wire == "fp32"
            config = Config(wire, feedback=None if is_exact else Feedback(), chunks=Chunks(4096))
            mean = fusedcomm.simulate(gradients, config, residuals=None if is_exact else residuals)
            for found in outcome:
                torch.testing.assert_close(found[step][name], mean, rtol=0, atol=1e-6 if is_exact else 0)
