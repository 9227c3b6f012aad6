"""The watch and the roll call on FSDP2: a rank that dies or is late is named, in reduce-scatters and all-gathers."""

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
from sampling import few
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fusedcomm
from fusedcomm.config import LocalOptions

pytestmark = pytest.mark.check

TIMEOUT_S = patient(6)


def _model(group: dist.ProcessGroup, gathers_again: bool = False) -> nn.Module:
    """gathers_again: if not, keeps whole parameters after the forward pass, so that a backward pass has reduce-scatters
    alone."""
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(2)])
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=gathers_again)
    return fully_shard(model, mesh=mesh, reshard_after_forward=gathers_again)


def _die(rank: int, world_size: int, victim: int) -> str:
    """In the backward pass of step 2 the victim is killed. Returns the other ranks' error."""
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=TIMEOUT_S))
    model = _model(group)
    comm = fusedcomm.attach(model, "int8")
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


@pytest.mark.parametrize("victim", few([0, 2], 2))
def test_a_rank_that_dies_is_named_on_every_other(ranks, victim):
    pid = ranks.processes[victim].pid
    outcomes = ranks.outcomes(_die, victim, world_size=3, lost=victim)
    for rank in {0, 1, 2} - {victim}:
        kind, error = outcomes[rank]
        assert kind == "value", error
        assert f"rank {victim} (process {pid} on " in error and "is missing: no answer within" in error, error
        assert re.search(r"in step \d for the all-(to-all|reduce) of chunk \d/\d of bucket \d", error), error


def _die_before_an_all_gather(rank: int, world_size: int, victim: int, is_backward: bool) -> str:
    """In step 2 the victim is killed before it gathers the parameters of the second layer, in the forward or backward
    pass. Returns the other ranks' error."""
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=TIMEOUT_S))
    model = _model(group, gathers_again=True)
    fusedcomm.attach(model, "int8")
    for _ in range(2):
        model(torch.ones(2, 300)).sum().backward()

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim and not is_backward:
        model[0].register_forward_hook(die)
    try:
        loss = model(torch.ones(2, 300)).sum()
        if rank == victim:
            loss.register_hook(die)
        loss.backward()
    except RuntimeError as caught:
        return str(caught)
    return ""


@pytest.mark.sampled(by=lambda victim, is_backward: {})  # make test runs one: a death takes patience
@pytest.mark.parametrize(("victim", "is_backward"), [(0, False), (2, True)], ids=["0 in forward", "2 in backward"])
def test_a_rank_that_dies_before_an_all_gather_is_named(ranks, victim, is_backward):
    pid = ranks.processes[victim].pid
    outcomes = ranks.outcomes(_die_before_an_all_gather, victim, is_backward, world_size=3, lost=victim)
    for rank in {0, 1, 2} - {victim}:
        kind, error = outcomes[rank]
        assert kind == "value", error
        assert f"rank {rank} of 3: the all-gather of the parameters of 1 failed" in error, error
        assert f"rank {victim} (process {pid} on " in error and "is missing: no answer within" in error, error
        assert "in step 2 for the others in the all-gather of the parameters of 1" in error, error


def _late_for_an_all_gather(rank: int, world_size: int, folder: Path) -> str:
    """Rank 1 begins step 1 only when the others have warned. Returns what this rank wrote to stderr."""
    model = _model(dist.group.WORLD, gathers_again=True)
    comm = fusedcomm.attach(model, "bf16", local=LocalOptions(stall_after=patient(2)))
    model(torch.ones(2, 300)).sum().backward()
    log = folder / f"{rank}.log"
    with stderr_to(log):
        if rank == 1:
            for other in {*range(world_size)} - {rank}:
                wait_for_words("is slow", folder / f"{other}.log")
        model(torch.ones(2, 300)).sum().backward()
    comm.detach()
    return log.read_text()


def test_a_rank_that_is_late_for_an_all_gather_is_named(ranks, tmp_path):
    for rank, warned in enumerate(ranks.run(_late_for_an_all_gather, tmp_path, world_size=3)):
        if rank == 1:
            assert warned == ""
            continue
        assert "rank 1 is slow: it has not called the all-gather of the parameters of 0, as every rank" in warned
        assert "ranks 0, 2 wait in step 1 for the others in the all-gather of the parameters of 0" in warned


def _late(rank: int, world_size: int, folder: Path) -> tuple[str, bool]:
    """Rank 1 begins the backward pass of step 2 only when the others have warned. Returns what this rank wrote to
    stderr, and whether its gradients are right."""
    model = _model(dist.group.WORLD)
    comm = fusedcomm.attach(model, "bf16", local=LocalOptions(stall_after=patient(2)))
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
