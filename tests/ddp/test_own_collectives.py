"""DDP's own collectives on its process group, beside the hook: after 50 steps every rank has the same bits. docs/ddp.md
lists these collectives and says why each is right."""

import hashlib
import time

import pytest
import torch
import torch.distributed as dist
from models import Branches, Mlp, Normalised, Synchronized
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config

STEPS = 50


def digest(module: nn.Module) -> str:
    """A digest of the bits of all parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return hashlib.sha256(b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def train(ddp: DistributedDataParallel, rank: int, steps: int = STEPS, accumulate: int = 1) -> list[str]:
    """Trains for some steps. Returns a digest of the gradients that this rank's optimizer read in each step. Ranks are
    skewed in time and have different data."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    width = next(ddp.parameters()).shape[1]
    read = []
    for step in range(steps):
        if (step + rank) % 10 == 0:
            time.sleep(0.003)
        optimizer.zero_grad(set_to_none=True)
        for micro in range(accumulate):
            context = ddp.no_sync() if micro + 1 < accumulate else torch.enable_grad()
            with context:
                ddp(torch.randn(8, width, generator=generator)).square().mean().backward()
        gradients = [p.grad for p in ddp.parameters() if p.grad is not None]
        read.append(hashlib.sha256(b"".join(g.clone().numpy().tobytes() for g in gradients)).hexdigest())
        optimizer.step()
    return read


CASES = {
    "buffers broadcast before the forward pass": lambda: (Normalised(), {}),
    "buffers broadcast after the forward pass": lambda: (Normalised(), {}),
    "collectives of the model": lambda: (Synchronized(), {}),
    "bitmap of unused parameters": lambda: (Branches(), {"find_unused_parameters": True}),
    "static graph": lambda: (Mlp(), {"static_graph": True}),
    "buckets rebuilt": lambda: (Mlp(), {"bucket_cap_mb": 0.005}),
    "buffers broadcast beside no_sync": lambda: (Normalised(), {}),
    "Join": lambda: (Normalised(), {}),
    "Join and unused parameters": lambda: (Branches(), {"find_unused_parameters": True}),
}


def in_lockstep(rank: int, world_size: int, case: str, wire: str) -> tuple[str, list[str]]:
    """(digest of this rank's model after 50 steps, digests of the gradients of every step). Under Join ranks run out of
    data at different times, and the first one takes 50 steps."""
    model, kwargs = CASES[case]()
    for buffer in model.buffers():
        buffer.add_(rank)  # DDP broadcasts rank 0's
    ddp = DistributedDataParallel(model, **kwargs)
    fusedcomm.attach(ddp, Config(wire, wires={"1d": wire}), quiet=True)
    if case.startswith("Join"):
        with Join([ddp]):
            train(ddp, rank, steps=STEPS - 7 * rank)
        return digest(ddp.module), []
    if "after" in case:
        ddp._register_buffer_comm_hook(None, broadcast_buffers)
    read = train(ddp, rank, accumulate=2 if "no_sync" in case else 1)
    if "after" not in case:  # DDP broadcasts buffers when the next forward pass begins
        with torch.no_grad():
            ddp(torch.zeros(8, next(ddp.parameters()).shape[1]))
    return digest(ddp.module), read


def broadcast_buffers(state: object, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future]:
    """A buffer hook, as users write them: asynchronous, on DDP's group."""
    return [dist.broadcast(buffer, 0, async_op=True).get_future() for buffer in buffers.values()]


@pytest.mark.sampled
@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_same_bits_after_fifty_steps_beside(ranks, case, wire):
    results = ranks.run(in_lockstep, case, wire, world_size=3)
    differing = [
        step for step, read in enumerate(zip(*(read for _, read in results), strict=True)) if len(set(read)) > 1
    ]
    assert not differing, f"gradients differed between ranks in {len(differing)} of {STEPS} steps: {differing}"
    assert len({digest for digest, _ in results}) == 1
