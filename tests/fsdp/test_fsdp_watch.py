"""The watch and the roll call on FSDP2: a rank that dies or is late in a backward pass is named."""

import contextlib
import datetime
import os
import re
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import stderr_to
from patience import patient, wait_for_words
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fusedcomm
from fusedcomm.config import LocalOptions

TIMEOUT_S = patient(6)


def _model(group: dist.ProcessGroup) -> nn.Module:
    """Keeps whole parameters after the forward pass, so that a backward pass has reduce-scatters alone."""
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(2)])
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _die(rank: int, world_size: int, victim: int) -> str:
    """In the backward pass of step 2 the victim is killed. Returns the other ranks' error."""
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=TIMEOUT_S))
    model = _model(group)
    comm = fusedcomm.attach(model, wire="int8")
    for _ in range(2):
        model(torch.ones(2, 300)).sum().backward()
    output = model(torch.ones(2, 300))
    if rank == victim:
        output.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
    error = ""
    try:
        output.sum().backward()
    except RuntimeError as caught:
        error = str(caught)
    with contextlib.suppress(RuntimeError):
        comm.detach()
    return error


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_is_named_on_every_other(ranks, victim):
    pid = ranks.processes[victim].pid
    outcomes = ranks.outcomes(_die, victim, world_size=3, lost=victim)
    for rank in {0, 1, 2} - {victim}:
        kind, error = outcomes[rank]
        assert kind == "value", error
        assert f"rank {victim} (process {pid} on " in error and "is missing: no answer within" in error, error
        assert re.search(r"in step \d for the all-to-all of chunk \d/\d of bucket \d", error), error


def _late(rank: int, world_size: int, folder: Path) -> tuple[str, bool]:
    """Rank 1 begins the backward pass of step 2 only when the others have warned. Returns what this rank wrote to
    stderr, and whether its gradients are right."""
    model = _model(dist.group.WORLD)
    comm = fusedcomm.attach(model, wire="bf16", local=LocalOptions(stall_after=patient(2)))
    model(torch.ones(2, 300)).sum().backward()
    first = [parameter.grad.to_local().clone() for parameter in model.parameters()]
    model.zero_grad()
    log = folder / f"{rank}.log"
    with stderr_to(log):
        loss = model(torch.ones(2, 300)).sum()
        if rank == 1:
            for other in {*range(world_size)} - {rank}:
                wait_for_words("is slow", folder / f"{other}.log")
        loss.backward()
    is_right = all(map(torch.equal, first, (parameter.grad.to_local() for parameter in model.parameters())))
    comm.detach()
    return log.read_text(), is_right


def test_a_rank_that_is_late_is_named_once_and_training_goes_on(ranks, tmp_path):
    for rank, (warned, is_right) in enumerate(ranks.run(_late, tmp_path, world_size=3)):
        assert is_right
        if rank == 1:
            assert warned == ""
            continue
        assert "rank 1 is slow: it has not handed over bucket " in warned and "missing" not in warned
        assert "ranks 0, 2 wait in step " in warned
