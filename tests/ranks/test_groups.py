"""The channels that fusedcomm makes beside the user's process group."""

import sys

import pytest
import torch
import torch.distributed as dist
from on_hosts import needs_hosts, printed_by
from patience import slowness
from scripts import printed_by_two_ranks

import fusedcomm
from fusedcomm.config import Chunks, Config
from fusedcomm.ranks.bounded_store import private_store
from fusedcomm.ranks.channels import MIN_S_PER_BYTE, make_channels, time_link


def timed(rank, world_size):
    group, cpu = dist.group.WORLD, torch.device("cpu")
    channels = make_channels(group, cpu, private_store(group).native)
    return time_link(channels.scatter)


@pytest.mark.alone
def test_all_ranks_time_the_link_alike(ranks):
    for world_size in (2, 3):
        first, *others = ranks.run(timed, world_size=world_size)
        assert all(other == first for other in others)
        assert MIN_S_PER_BYTE <= first < 1e-6 * slowness()  # loopback has more than 1 MB/s
    assert ranks.run(timed, world_size=1) == [None]


def plan_of(rank, world_size):
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(600, 600))
    comm = fusedcomm.attach(ddp, "int8", quiet=True)
    given = fusedcomm.attach(
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(6, 6)), Config(chunks=Chunks(8192)), quiet=True
    )
    return comm.plan().config.chunks.nbytes, given.plan().config.chunks.nbytes


def test_ranks_have_chunks_of_one_size(ranks):
    found = ranks.run(plan_of, world_size=3)
    assert found[0] == found[1] == found[2] and found[0][1] == 8192


ENDING_SCRIPT = """
import sys
import torch, torch.distributed as dist
from fusedcomm.ranks.channels import MIN_S_PER_BYTE, make_channels, time_link
from fusedcomm.ranks.bounded_store import private_store
from scripts import let_threads_be_late

dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=int(sys.argv[1]), world_size=2)
group, cpu = dist.group.WORLD, torch.device("cpu")
channels = make_channels(group, cpu, private_store(group).native)
let_threads_be_late()
print(time_link(channels.scatter))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="delays threads as Linux does")
@pytest.mark.check
def test_a_process_may_end_once_its_link_was_timed(tmp_path):
    first, second = printed_by_two_ranks(ENDING_SCRIPT, tmp_path)
    assert first == second and float(first) > 0


TIME_LINK = """
import torch, torch.distributed as dist
from fusedcomm.ranks.channels import MIN_S_PER_BYTE, make_channels, time_link
from fusedcomm.ranks.bounded_store import private_store
dist.init_process_group("gloo")
group, cpu = dist.group.WORLD, torch.device("cpu")
channels = make_channels(group, cpu, private_store(group).native)
print(f"s_per_byte={time_link(channels.scatter)}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.alone
@needs_hosts
def test_a_slow_link_is_timed(tmp_path, capsys):
    printed = printed_by(TIME_LINK, tmp_path, capsys)
    found = [float(line.split("=")[1]) for line in printed.splitlines() if "s_per_byte=" in line]
    assert len(found) == 2 and found[0] == found[1]
    # The link has 100 Mbit/s. The range is wide, because TCP is still speeding up and other processes may interfere.
    assert 0.6 < found[0] / 8e-8 < 6
