"""attach() beside torch's own parts of training: ZeroRedundancyOptimizer, and torch.compile in every order."""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config

NUM_STEPS = 20
# int8 rounds a gradient to 1 / 127 of its block's largest. Training adds these errors up.
TOLERANCE = 0.01


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))


def trained(rank: int, step, optimizer, parameters) -> list[torch.Tensor]:
    """Trains for NUM_STEPS with clipping, each step on two accumulated batches. Returns the parameters. `step`: the
    module that is called."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            inputs, labels = torch.randn(8, 32, generator=generator), torch.randint(8, (8,), generator=generator)
            torch.nn.functional.cross_entropy(step(inputs), labels).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def beside_plain_ddp(rank: int, world_size: int, way: str, wire: str) -> list[list[torch.Tensor]]:
    """The parameters after training without and with fusedcomm."""
    results = []
    for attached in (False, True):
        torch._dynamo.reset()
        ddp = step = DistributedDataParallel(model())
        comm = fusedcomm.attach(ddp, wire) if attached and way.startswith("attach") else None
        if "compile(ddp)" in way:
            step = torch.compile(ddp, backend="aot_eager")
        elif "ddp.compile()" in way:
            ddp.compile(backend="aot_eager")
        if attached and comm is None:
            comm = fusedcomm.attach(step, wire)
        parameters = list(ddp.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        if "Zero" in way:
            optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
        results.append(trained(rank, step, optimizer, parameters))
        if comm is not None:
            assert comm.stats().steps == 2 * NUM_STEPS
            comm.detach()
    return results


WAYS = ["attach, ZeroRedundancyOptimizer", "compile(ddp), attach", "attach, ddp.compile()", "ddp.compile(), attach"]
WAYS += ["attach, compile(ddp)"]


def by_way(way: str, wire: str) -> dict:
    """Of the orders with torch.compile, which takes seconds, `make test` runs one."""
    return {"wire": wire, "compiled": "compile" in way}


@pytest.mark.sampled(by=by_way)
@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_ddp_alone_does(ranks, way, wire):
    results = ranks.run(beside_plain_ddp, way, wire, world_size=2)
    (_, ours), (_, theirs) = results
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)  # the ranks
    for plain, attached in results:
        pairs = list(zip(plain, attached, strict=True))
        assert all(torch.equal(a, b) for a, b in pairs) == (wire == "fp32")
        assert max((a - b).abs().max() for a, b in pairs) < TOLERANCE


def compiled_gradients(rank, world_size, wire):
    """Parameters after two steps of a module under DDP: [without compilation, with compilation]."""
    seen = []
    for compiled in (False, True):
        torch.manual_seed(0)
        # Dynamo splits the graph between the three buckets, so that the hook runs during the backward pass.
        layers = [torch.nn.Linear(400, 400) for _ in range(5)]
        model = torch.nn.Sequential(torch.nn.Linear(10, 400), *layers, torch.nn.LayerNorm(400))
        ddp = DistributedDataParallel(model, bucket_cap_mb=1.2)
        comm = fusedcomm.attach(ddp, Config(wire, sum="two-shot"))
        step = torch.compile(ddp, backend="aot_eager") if compiled else ddp
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(2):
            optimizer.zero_grad()
            step(torch.randn(8, 10, generator=generator)).square().mean().backward()
            optimizer.step()
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
        assert comm.stats().steps == 2
        assert len(comm.plan().buckets) == 3
        comm.detach()
    return seen


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_compiled_module_trains_as_it_does_uncompiled(ranks, wire):
    results = ranks.run(compiled_gradients, wire, world_size=2)
    for eager, compiled in results:
        for a, b in zip(eager, compiled, strict=True):
            assert torch.equal(a, b)
