"""The watch and the roll call on FSDP2's all-gathers, which torch calls: a rank that dies or is late is named.
tests/watch has gradients."""

import datetime
import os
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
from fusedcomm.config import Config, LocalOptions

pytestmark = pytest.mark.check

TIMEOUT_S = patient(6)


def _model(group: dist.ProcessGroup) -> nn.Module:
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(2)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _die_before_an_all_gather(rank: int, world_size: int, victim: int, is_backward: bool, params: str) -> str:
    """In step 2 the victim is killed before it gathers the parameters of the second layer, in the forward or backward
    pass. Returns the other ranks' error."""
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=TIMEOUT_S))
    model = _model(group)
    fusedcomm.attach(model, Config("int8", params=params))
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


def _die_by_host(rank: int, world_size: int, victim: int, gathers: bool) -> str:
    """In step 2 the victim is killed before it gathers a model that is one layer, in codes, or before it reduces its
    gradients. Both go by host."""
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=TIMEOUT_S))
    model = fully_shard(nn.Linear(300, 300), mesh=DeviceMesh.from_group(group, "cpu"))
    fusedcomm.attach(model, Config("int8", hosts=2, params="int8" if gathers else "fp32"))
    for step in range(3):
        dies = rank == victim and step == 2
        try:
            if dies and gathers:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(torch.ones(2, 300)).sum()
            if dies:
                loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
        except RuntimeError as caught:
            return str(caught)
    return ""


@pytest.mark.parametrize("gathers", few([False, True], False), ids=["reduce-scatter", "all-gather"])
def test_a_rank_that_dies_before_a_collective_by_host_is_named(ranks, gathers):
    victim = 2
    pid = ranks.pid_of(victim)
    outcomes = ranks.outcomes(_die_by_host, victim, gathers, world_size=4, lost=victim)
    for rank in (0, 1, 3):
        kind, error = outcomes[rank]
        assert kind == "value" and f"rank {victim} (process {pid} on " in error, error
        assert "is missing: no answer within" in error, error


WAITS = {
    "fp32": "the others in the all-gather of the parameters of 1",
    "int8": "the all-gather of chunk 1/1 of bucket 3 (1.weight (value) … 1.bias (value); 2 parameters",
}


@pytest.mark.sampled(by=lambda victim, is_backward, params: {})  # make test runs one: a death takes patience
@pytest.mark.parametrize("params", WAITS)
@pytest.mark.parametrize(("victim", "is_backward"), [(0, False), (2, True)], ids=["0 in forward", "2 in backward"])
def test_a_rank_that_dies_before_an_all_gather_is_named(ranks, victim, is_backward, params):
    pid = ranks.pid_of(victim)
    outcomes = ranks.outcomes(_die_before_an_all_gather, victim, is_backward, params, world_size=3, lost=victim)
    for rank in {0, 1, 2} - {victim}:
        kind, error = outcomes[rank]
        assert kind == "value", error
        assert f"rank {rank} of 3: the all-gather of the parameters of 1 failed" in error or params != "fp32", error
        assert f"rank {victim} (process {pid} on " in error and "is missing: no answer within" in error, error
        assert f"in step 2 for {WAITS[params]}" in error, error


def _late_for_an_all_gather(rank: int, world_size: int, folder: Path) -> str:
    """Rank 1 begins step 1 only when the others have warned. Returns what this rank wrote to stderr."""
    model = _model(dist.group.WORLD)
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
