"""Gradients in separate tensors give the same bits as gradients in one buffer."""

import pytest
import torch
from models import Gradients, normal, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Chunks, Config, Feedback
from fusedcomm.native import _C

SHAPES = [(1 + 7 * i % 61,) if i % 3 else (3, 1 + i % 17) for i in range(300)]
CONFIGS = {
    "fp32": Config("fp32"),  # one buffer is summed in place; separate tensors are packed
    "bf16": Config("bf16", "two-shot", chunks=Chunks(4096)),
    "fp16 direct": Config("fp16", "direct"),
    "int8": Config("int8", "two-shot"),
    "int8 fed back": Config("int8", "two-shot", feedback=Feedback()),
    "small": Config("int8"),  # too small for int8: summed exactly
    "int4 one-shot": Config("int4", "one-shot", wires={"weights.1*": "bf16"}),
}


def shapes_of(config):
    """Where elements share a scale, tensors fill vectors of 16 bytes: there are no holes then, and blocks are the same
    in one buffer and in separate tensors."""
    return [(8 * first, *rest) for first, *rest in SHAPES] if _C.has_scales(config.wire) else SHAPES


def gradients_of(rank, step, shapes):
    """Signed integers, different on every rank."""
    return [normal(rank, 1000 * step + i, shape).mul(8).round() for i, shape in enumerate(shapes)]


def means(rank, world_size, config, apart):
    """Takes three steps. Returns the bits of their results, the bytes sent and the non-finite counts by parameter.

    `apart`: whether every gradient is a separate tensor; otherwise they are in DDP's buffer.
    """
    shapes = shapes_of(config)
    model = Gradients(*shapes)
    ddp = DistributedDataParallel(model)
    seen = []
    comm = fusedcomm.attach(ddp, config, quiet=True)
    for _ in range(2):  # from the second pass on, DDP's only bucket is in its final order
        synchronize(ddp, gradients_of(rank, 0, shapes))
    hook = comm.session.synchronizer
    hook.restore_residuals({})  # both runs start without residuals
    (record,) = hook.buckets()
    order = [int(name.rpartition(".")[2]) for name in record.parameters]
    weights = {name: model.weights[i] for name, i in zip(record.parameters, order, strict=True)}
    hook.choose_wires(lambda name, num_dims: config.wire_number(name, weights[name]))
    apart_sum = _C.FusedSum(hook)
    for step in range(1, 4):
        gradients = gradients_of(rank, step, shapes)
        if step == 3:
            gradients[5].view(-1)[-1] = float("inf")
        if not apart:
            seen.append(synchronize(ddp, gradients))
            continue
        # The memory is new in every step, and its addresses are in no order.
        lying = [gradient.clone() for gradient in gradients]
        apart_sum.run(names=record.parameters, tensors=[lying[i] for i in order], ends_step=True).wait()
        seen.append(lying)
    stats = comm.stats()
    comm.detach()
    bits = torch.cat([gradient.flatten() for step in seen for gradient in step]).view(torch.uint8)
    return bits, stats.sent_nbytes, stats.nonfinite_by_parameter


@pytest.mark.sampled(by=lambda name: {"sum": CONFIGS[name].sum})
@pytest.mark.parametrize("name", CONFIGS)
def test_300_tensors_give_the_bits_of_one_run(ranks, name):
    runs = [ranks.run(means, CONFIGS[name], apart, world_size=2) for apart in (False, True)]
    for (run, run_nbytes, run_nonfinite), (apart, apart_nbytes, apart_nonfinite) in zip(*runs, strict=True):
        assert torch.equal(run, apart)
        assert run_nonfinite == apart_nonfinite and sum(run_nonfinite.values()) == 1
        # Separate tensors have holes between them.
        assert run_nbytes <= apart_nbytes <= run_nbytes * (1.001 if shapes_of(CONFIGS[name]) != SHAPES else 1.5)
