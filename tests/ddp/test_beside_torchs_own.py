"""attach() beside torch's own parts of training: ZeroRedundancyOptimizer, and torch.compile in every order."""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config

NUM_STEPS = 3


def trained(rank: int, way: str, wire: str) -> list[torch.Tensor]:
    """The parameters after some steps with clipping, each on two accumulated batches."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    # Dynamo splits the graph between the three buckets, so that the hook runs during the backward pass.
    layers = [torch.nn.Linear(400, 400) for _ in range(5)]
    model = torch.nn.Sequential(torch.nn.Linear(10, 400), *layers, torch.nn.LayerNorm(400))
    ddp = step = DistributedDataParallel(model, bucket_cap_mb=1.2)
    config = Config(wire, sum="exact" if wire == "fp32" else "two-shot")
    comm = fusedcomm.attach(ddp, config, quiet=True) if way.startswith("attach") else None
    if "compile(ddp)" in way:
        step = torch.compile(ddp, backend="aot_eager")
    elif "ddp.compile()" in way:
        ddp.compile(backend="aot_eager")
    comm = comm or fusedcomm.attach(step, config, quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if "Zero" in way:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            step(torch.randn(8, 10, generator=generator)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert comm.stats().steps == 2 * NUM_STEPS and len(comm.plan().buckets) == 3
    comm.detach()
    return [parameter.detach().clone() for parameter in model.parameters()]


WAYS = ["attach, ZeroRedundancyOptimizer", "compile(ddp), attach", "attach, ddp.compile()", "ddp.compile(), attach"]
WAYS += ["attach, compile(ddp)"]


def as_attached_alone(rank: int, world_size: int, way: str, wire: str) -> bool:
    return all(map(torch.equal, trained(rank, "attach", wire), trained(rank, way, wire)))


def by_way(way: str, wire: str) -> dict:
    """Of the orders with torch.compile, which takes seconds, `make test` runs one."""
    return {"wire": wire, "compiled": "compile" in way}


@pytest.mark.sampled(by=by_way)
@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_it_does_without(ranks, way, wire):
    assert ranks.run(as_attached_alone, way, wire, world_size=2) == [True, True]
