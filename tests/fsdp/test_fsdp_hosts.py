"""FSDP2 on several hosts: what they send to each other, and checks that some ranks alone fail."""

import warnings

import pytest
import torch
import torch.distributed as dist
from models import on_host, refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusedcomm
from fusedcomm.config import Config, TwoLevels
from fusedcomm.fsdp import mesh as mesh_sums


def _model(shape: tuple[int, ...]) -> nn.Module:
    names = ("replicas", "shards")[-len(shape) :]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))  # 1 MiB each
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _refused(rank, world_size, names, hosts):
    with on_host(names[rank]):
        text = refusal(fusedcomm.attach, _model((2, 2)), Config("int4", hosts=hosts))
    dist.barrier()
    fusedcomm.attach(_model((2, 2)), "bf16").detach()
    return text


@pytest.mark.parametrize(
    ("names", "hosts", "why"),
    [
        ("aaab", TwoLevels("auto"), "of ranks [2, 3] are on ['a', 'b']"),
        ("abab", TwoLevels("auto"), "of ranks [0, 1] are on ['a', 'b']"),
        ("aaaa", TwoLevels("auto"), "2 replicas are on ['a']"),
        ("aaaa", [[0, 2], [1, 3]], "does not fit the mesh"),
    ],
    ids=str,
)
def test_hosts_that_do_not_fit_are_refused_with_one_text_on_every_rank(ranks, names, hosts, why):
    (text,) = set(ranks.run(_refused, names, hosts, world_size=4))
    assert text.startswith("ValueError: fusedcomm: hosts=") and why in text


def _late(rank, world_size, shape):
    def fail(*_: object) -> None:
        raise RuntimeError("fusedcomm: no memory for replicas")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 3:  # once its sessions are made, as are those of the other ranks
            patch.setattr(mesh_sums, "check_hosts", fail)
        text = refusal(fusedcomm.attach, _model(shape), "bf16")
    dist.barrier()
    fusedcomm.attach(_model(shape), "bf16").detach()
    return text


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_late_problem_of_one_rank_is_told_to_all(ranks, shape):
    *others, own = ranks.run(_late, shape, world_size=4)
    why = "no memory for replicas"
    assert own == f"RuntimeError: fusedcomm: {why}"
    of_job = "" if len(shape) == 1 else " of the job"
    assert set(others) == {f"DisagreementError: fusedcomm: rank 3{of_job} cannot attach: {why}"}


def _sends(rank, world_size, hosts, shape, wire):
    with on_host(hosts[rank]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fusedcomm.attach(_model(shape), wire, quiet=True) as comm:
            text = str(comm.plan())
    return text, [str(each.message) for each in said if "shards of a copy" in str(each.message)]


@pytest.mark.parametrize(
    ("hosts", "shape", "wire", "gradients", "parameters"),
    [
        # All 2 MiB are scattered over 4 ranks; a ring of gathers leaves each host once. Parameters of [0] travel twice.
        ("aabb", (4,), "fp32", 2 * 2 * 2 / 4, 3 * 3 / 4),
        ("abab", (4,), "bf16", 2 * 2 * 1 / 4, 2 * 3 * 3 / 4),
        ("aaab", (4,), "fp32", 3 * 2 / 4, 3 * 3 / 4),
        ("aaaa", (4,), "fp32", 0, 0),
        # Half of the gradients of each rank go to the rank with the same shard, and come back.
        ("aabb", (2, 2), "bf16", 2 * 0.5, 0),
        ("abab", (2, 2), "bf16", 2 * 0.5, 2 * 3 / 2),
    ],
    ids=str,
)
def test_the_plan_says_what_a_host_sends_and_the_wrong_way_round_is_warned_of_once(
    ranks, hosts, shape, wire, gradients, parameters
):
    found = ranks.run(_sends, hosts, shape, wire, world_size=4)
    line = f"to other hosts a host sends {gradients:.2f} MiB of gradients and {parameters:.2f} MiB of parameters"
    assert all(line in text for text, _ in found), found[0]
    said = [text for _, mine in found for text in mine]
    if (hosts, shape) == ("abab", (2, 2)):
        (text,) = said
        assert f"sends {gradients + parameters:.2f} MiB to others in a step, and 1.00 MiB if the last dimension" in text
    else:
        assert not said
