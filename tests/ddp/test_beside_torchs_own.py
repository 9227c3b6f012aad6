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


def with_zero(rank, world_size, wire):
    results = []
    for attached in (False, True):
        ddp = DistributedDataParallel(model())
        comm = fusedcomm.attach(ddp, wire) if attached else None
        parameters = list(ddp.parameters())
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1, momentum=0.9)
        results.append(trained(rank, ddp, optimizer, parameters))
        if attached:
            assert comm.stats().steps == 2 * NUM_STEPS
            comm.detach()
    return results


def with_compile(rank, world_size, wire, order):
    results = []
    for attached in (False, True):
        torch._dynamo.reset()
        ddp = DistributedDataParallel(model())
        step, comm = ddp, None
        if order == "compile(ddp), attach":
            step = torch.compile(ddp, backend="aot_eager")
            comm = fusedcomm.attach(step, wire) if attached else None
        elif order == "ddp.compile(), attach":
            ddp.compile(backend="aot_eager")
            comm = fusedcomm.attach(ddp, wire) if attached else None
        elif order == "attach, compile(ddp)":
            comm = fusedcomm.attach(ddp, wire) if attached else None
            step = torch.compile(ddp, backend="aot_eager")
        else:
            comm = fusedcomm.attach(ddp, wire) if attached else None
            ddp.compile(backend="aot_eager")
        parameters = list(ddp.parameters())
        results.append(trained(rank, step, torch.optim.SGD(parameters, lr=0.1), parameters))
        if attached:
            assert comm.stats().steps == 2 * NUM_STEPS
            comm.detach()
    return results


def with_scaler(rank, world_size, wire):
    results = []
    for attached in (False, True):
        ddp = DistributedDataParallel(model())
        comm = fusedcomm.attach(ddp, wire) if attached else None
        parameters = list(ddp.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        results.append(trained(rank, ddp, optimizer, parameters, scaler, overflow_at=5))
        # It grows after steps 4, 10, 14 and 18, and step 6 halves it.
        assert scaler.get_scale() == 1024.0 * 2**3
        if attached:
            comm.detach()
    return results


ORDERS = ["compile(ddp), attach", "ddp.compile(), attach", "attach, compile(ddp)", "attach, ddp.compile()"]


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("job", "args"),
    [(with_zero, ()), (with_scaler, ()), *((with_compile, (order,)) for order in ORDERS)],
    ids=["ZeroRedundancyOptimizer", "GradScaler", *ORDERS],
)
def test_it_trains_as_ddp_alone_does(ranks, job, args, wire):
    results = ranks.run(job, wire, *args, world_size=2)
    (_, ours), (_, theirs) = results
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)  # the ranks
    for plain, attached in results:
        pairs = list(zip(plain, attached, strict=True))
        assert all(torch.equal(a, b) for a, b in pairs) == (wire == "fp32")
        assert max((a - b).abs().max() for a, b in pairs) < TOLERANCE
