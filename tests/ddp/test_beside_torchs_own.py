"""attach() beside torch's own parts of training: ZeroRedundancyOptimizer, torch.compile in every order, GradScaler."""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

NUM_STEPS = 20
# int8 rounds a gradient to 1 / 127 of its block's largest. Training adds these errors up.
TOLERANCE = 0.01


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))


def trained(rank: int, step, optimizer, parameters, scaler=None, overflow_at: int | None = None) -> list[torch.Tensor]:
    """Trains for NUM_STEPS with clipping, each step on two accumulated batches. Returns the parameters.

    Args:
        step: the module that is called.
        overflow_at: the step in which rank 1 alone has an Inf.
    """
    generator = torch.Generator().manual_seed(rank)
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            inputs, labels = torch.randn(8, 32, generator=generator), torch.randint(8, (8,), generator=generator)
            loss = torch.nn.functional.cross_entropy(step(inputs), labels)
            if index == overflow_at and rank == 1:
                loss = loss * float("inf")
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return [parameter.detach().clone() for parameter in parameters]


def beside_plain_ddp(rank: int, world_size: int, way: str, wire: str) -> list[list[torch.Tensor]]:
    """The parameters after training without and with fusedcomm."""
    attaches_first, compiled, kind = WAYS[way]
    results = []
    for attached in (False, True):
        torch._dynamo.reset()
        ddp = step = DistributedDataParallel(model())
        comm = fusedcomm.attach(ddp, wire) if attached and attaches_first else None
        if compiled == "compile(ddp)":
            step = torch.compile(ddp, backend="aot_eager")
        elif compiled == "ddp.compile()":
            ddp.compile(backend="aot_eager")
        if attached and not attaches_first:
            comm = fusedcomm.attach(step, wire)
        parameters, scaler, overflow_at = list(ddp.parameters()), None, None
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        if kind == "ZeroRedundancyOptimizer":
            optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
        if kind == "GradScaler":
            scaler, overflow_at = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4), 5
        results.append(trained(rank, step, optimizer, parameters, scaler, overflow_at))
        # It grows after steps 4, 10, 14 and 18, and step 6 halves it.
        assert scaler is None or scaler.get_scale() == 1024.0 * 2**3
        if comm is not None:
            assert comm.stats().steps == 2 * NUM_STEPS
            comm.detach()
    return results


WAYS = {  # whether it attaches first, what is compiled, and what else of torch's is there
    "ZeroRedundancyOptimizer": (True, "", "ZeroRedundancyOptimizer"),
    "GradScaler": (True, "", "GradScaler"),
    "compile(ddp), attach": (False, "compile(ddp)", ""),
    "attach, ddp.compile()": (True, "ddp.compile()", ""),
    "ddp.compile(), attach": (False, "ddp.compile()", ""),
    "attach, compile(ddp)": (True, "compile(ddp)", ""),
}


def by_way(way: str, wire: str) -> dict:
    """Of the orders with torch.compile, which takes seconds, `make test` runs one."""
    _, compiled, kind = WAYS[way]
    return {"wire": wire, "beside": kind or bool(compiled)}


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
