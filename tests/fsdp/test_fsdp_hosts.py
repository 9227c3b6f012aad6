"""FSDP2 on several hosts: what they send to each other, and checks that some ranks alone fail."""

import warnings

import pytest
import torch
import torch.distributed as dist
from models import on_host, refusal
from on_hosts import needs_hosts, printed_by
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fusedcomm
from fusedcomm.config import Config, TwoLevels
from fusedcomm.fsdp import mesh as mesh_sums


def _model(shape: tuple[int, ...], **options: object) -> nn.Module:
    names = ("replicas", "shards")[-len(shape) :]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 512, bias=False))  # 1 MiB each
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _refused(rank, world_size, names, hosts, shape):
    with on_host(names[rank]):
        text = refusal(fusedcomm.attach, _model(shape), Config("int4", hosts=hosts))
    dist.barrier()
    fusedcomm.attach(_model((2, 2)), "bf16").detach()
    return text


@pytest.mark.parametrize(
    ("names", "hosts", "shape", "why"),
    [
        ("aaab", TwoLevels("auto"), (2, 2), "of ranks [2, 3] are on ['a', 'b']"),
        ("abab", TwoLevels("auto"), (2, 2), "of ranks [0, 1] are on ['a', 'b']"),
        ("aaaa", TwoLevels("auto"), (2, 2), "2 replicas are on ['a']"),
        ("aaaa", [[0, 2], [1, 3]], (2, 2), "does not fit the mesh"),
        ("aaaa", [[0, 2], [1, 3]], (4,), "does not fit the shards"),
    ],
    ids=str,
)
def test_hosts_that_do_not_fit_are_refused_with_one_text_on_every_rank(ranks, names, hosts, shape, why):
    (text,) = set(ranks.run(_refused, names, hosts, shape, world_size=4))
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


LEVELS = {
    ("aabb", (4,)): "reduce-scatters in fp32 over 2 hosts × 2 ranks, fp32 inside a host",
    ("abab", (4,)): "one level, not two: shards must lie host by host, and ranks [0, 2] share one",
    ("aaab", (4,)): "one level, not two: host a has 3 ranks, host b 1, and two need as many on every host",
}


def _sends(rank, world_size, hosts, shape, wire):
    with on_host(hosts[rank]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fusedcomm.attach(_model(shape), wire, quiet=True) as comm:
            text = str(comm.plan())
    return text, [str(each.message) for each in said if "shards of a copy" in str(each.message)]


@pytest.mark.parametrize(
    ("hosts", "shape", "wire", "gradients", "parameters"),
    [
        # A host adds its 2 MiB, and sends the other host's half; a ring of gathers leaves each host once. Parameters of
        # [0] travel twice. Where the ranks of a host are not consecutive, all 2 MiB are scattered over 4 ranks.
        ("aabb", (4,), "fp32", 1, 3 * 3 / 4),
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
    assert all(LEVELS.get((hosts, shape), "") in text for text, _ in found), found[0]
    line = f"to other hosts a host sends {gradients:.2f} MiB of gradients and {parameters:.2f} MiB of parameters"
    assert all(line in text for text, _ in found), found[0]
    said = [text for _, mine in found for text in mine]
    if (hosts, shape) == ("abab", (2, 2)):
        (text,) = said
        assert f"sends {gradients + parameters:.2f} MiB to others in a step, and 1.00 MiB if the last dimension" in text
    else:
        assert not said


def _warnings_of(rank, world_size, hosts):
    """Of a model whose reduce-scatter torch itself would send in bf16."""
    model = _model((4,), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    with on_host("aabb"[rank]), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fusedcomm.attach(model, Config("fp32", hosts=hosts), quiet=True).detach()
    return [str(each.message) for each in said if "torch's own reduce-scatter" in str(each.message)]


@pytest.mark.parametrize("hosts", ["auto", None], ids=str)
def test_one_level_that_sends_more_to_other_hosts_than_torch_is_warned_of_once(ranks, hosts):
    said = [text for of_rank in ranks.run(_warnings_of, hosts, world_size=4) for text in of_rank]
    if hosts is None:
        (text,) = said
        assert "sends 2.00 MiB to others" in text and "1.50 MiB" in text and "hosts=None" in text
    else:
        assert not said


SENDS = """
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fusedcomm
from fusedcomm.ranks import groups

dist.init_process_group("gloo")
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
NUMEL = 4 * 512 * 512


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(4)])


def sent_by(call):
    dist.barrier()
    time.sleep(0.2)
    before = int(SENT.read_text())
    dist.barrier()  # no other rank of the host begins before it is read
    call()
    dist.barrier()
    time.sleep(0.2)  # the last acknowledgements
    return int(SENT.read_text()) - before


def say(what, sent, planned):
    if os.environ["LOCAL_RANK"] == "0":
        print(f"SENT {what.replace(', ', '-')} {sent / planned:.4f} {sent / 4 / NUMEL:.4f}", flush=True)


model = fully_shard(layers())
comm = fusedcomm.attach(model, "int8", quiet=True)
for step in range(3):
    loss = model(torch.randn(2, 512)).square().mean()
    sent = sent_by(loss.backward)  # the model itself is not gathered again
say("gradients", sent, comm.plan().traffic.gradients_nbytes)
comm.detach()

for kept in ("", ", kept"):
    model = fully_shard(layers(), reshard_after_forward=True)
    comm = fusedcomm.attach(model, fusedcomm.Config("int8", params="int8", params_kept=bool(kept)), quiet=True)
    losses = []
    for step in range(2):
        forward = sent_by(lambda: losses.append(model(torch.randn(2, 512)).square().mean()))
        backward = sent_by(losses[-1].backward)
    traffic = comm.plan().traffic
    again = 0 if kept else traffic.parameters_nbytes / 2
    say("forward" + kept, forward, traffic.parameters_nbytes - again)
    say("backward" + kept, backward, traffic.gradients_nbytes + again)
    comm.detach()

model = fusedcomm.DataParallel(layers(), config="int8", quiet=True)
optimizer = fusedcomm.ShardedOptimizer(model, torch.optim.SGD, lr=0.01, update="int8", quiet=True)


def step():
    model(torch.randn(2, 512)).square().mean().backward()
    optimizer.step()


for _ in range(3):
    sent = sent_by(step)
say("owner", sent, 2 * optimizer.plan().sent_between_hosts_nbytes)
model.comm.detach()
groups.end_together()
"""


MOST = {"gradients": 0.135, "forward": 0.135, "backward": 0.27, "forward-kept": 0.135, "backward-kept": 0.135}
MOST["owner"] = 0.27
"""Bytes that a host may send, of 4 for each element."""


@needs_hosts
@pytest.mark.check
def test_a_host_sends_what_the_plan_says_a_quarter_of_one_byte_each_way(tmp_path, capsys):
    printed = printed_by(SENDS, tmp_path, capsys, ranks_per_host=2)
    lines = [line.split()[-4:] for line in printed.splitlines() if " SENT " in line]
    assert sorted(what for _, what, *_ in lines) == sorted([*MOST] * 2), printed
    for _, what, of_plan, of_fp32 in lines:
        assert 1 <= float(of_plan) < 1.03, printed
        assert float(of_fp32) < MOST[what], printed
