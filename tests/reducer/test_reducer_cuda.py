"""GradReducer on a GPU, over NCCL: means, counts, accumulation and training are those of a CPU over gloo."""

import pytest
import torch
from models import Gradients, Mlp, reducer_of, synchronize

from fusedcomm.config import Blocks, Config, Feedback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that this torch can use"),
]

BACKEND = "cpu:gloo,cuda:nccl"
SHAPES = ((300, 51), (7,), (4000,), (64, 64), (1,), (129, 3))

CONFIGS = {
    "fp32": Config("fp32"),
    "bf16": Config("bf16"),
    "int8 feedback": Config("int8", feedback=Feedback()),
    "int4 rotated": Config("int4", blocks=Blocks(rotate=True)),
    "fp8 counted": Config("fp8", measure_every=2),
}


def on_both_devices(rank, world_size, config):
    """The gradients' bits and the non-finite counts on a CPU and on a GPU after several passes, one accumulated."""
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients[2][17 * rank] = torch.inf
    found = []
    for device in ("cpu", "cuda"):
        model = Gradients(*SHAPES).to(device)
        reducer = reducer_of(model, config, bucket_mib=0.05)
        inputs = [gradient.to(device) for gradient in gradients]
        synchronize(model, inputs, steps=3)
        with reducer.no_sync():
            model(inputs).backward()
        model(inputs).backward()
        values = torch.cat([weight.grad.flatten() for weight in model.weights]).cpu()
        bits = torch.where(values.isnan(), torch.tensor(torch.nan), values).view(torch.uint8)
        found.append((bits, reducer.stats().nonfinite_by_parameter))
        reducer.detach()
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_and_counts_are_those_of_the_cpu(ranks, name):
    for cpu, gpu in ranks.run(on_both_devices, CONFIGS[name], world_size=2, backend=BACKEND):
        assert torch.equal(cpu[0], gpu[0])
        assert cpu[1] == gpu[1] and cpu[1]["weights.2"] > 0


def trained(rank, world_size, wire):
    """Parameters after five steps with gradients computed late: the optimizer must wait for the mean."""
    torch.manual_seed(0)
    model = Mlp().cuda()
    reducer = reducer_of(model, wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 10, generator=generator).cuda()).square().mean()
        torch.cuda._sleep(20_000_000)
        loss.backward()
        optimizer.step()
    steps = reducer.stats().steps
    reducer.detach()
    return [parameter.detach().cpu() for parameter in model.parameters()], steps


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_ranks_stay_identical(ranks, wire):
    (first, steps), (second, _) = ranks.run(trained, wire, world_size=2, backend=BACKEND)
    assert steps == 5
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()
