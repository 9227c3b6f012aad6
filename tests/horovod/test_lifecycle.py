"""Init, ranks and shutdown, however the processes were launched."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import clean_environment, job
from patience import HANG_S
from scripts import torchrun

import fusedcomm.horovod as hvd
from fusedcomm.horovod import launch


def check_ranks(rank, size):
    for _ in range(5):
        assert not hvd.is_initialized()
        with job():
            hvd.init()  # without effect
            assert hvd.is_initialized()
            assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
            assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1) and hvd.is_homogeneous()
            assert hvd.global_process_set.ranks == list(range(size)) and hvd.global_process_set.size() == size
        hvd.shutdown()  # without effect
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.ccl_built() or hvd.ddl_built())
    assert hvd.nccl_built() == 0 or torch.cuda.is_available()


@pytest.mark.parametrize("size", [1, 4])
def test_a_job_can_be_started_and_ended_again_and_again(ranks, size):
    ranks.run(check_ranks, world_size=size)


def check_hosts(rank, size):
    with job(HOROVOD_HOSTNAME=("north", "south", "north")[rank]):
        assert not hvd.is_homogeneous()
        places = hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
    return places


def test_local_and_cross_ranks_follow_the_hosts(ranks):
    assert ranks.run(check_hosts, world_size=3) == [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 1)]


@pytest.mark.parametrize(
    ("kept", "local_ranks"),
    [
        ([1, None, 0, None], [1, 0, 0, 2]),  # a rank that joins fills the hole, or gets the next number
        ([1, 2, None, None], [1, 2, 0, 0]),
        ([None, None, None, None], [0, 1, 0, 2]),
    ],
)
def test_ranks_that_stay_keep_their_local_rank(kept, local_ranks):
    hosts = ["north", "north", "south", "north"]
    places = [launch.places(rank, hosts, kept) for rank in range(4)]
    assert [each["local_rank"] for each in places] == local_ranks
    assert [each["local_size"] for each in places] == [3, 3, 1, 3]
    assert [each["cross_size"] for each in places] == [local_ranks.count(each) for each in local_ranks]


# ---- processes of their own


def by_variables(script: str, size: int, folder: Path, **more: str) -> list[tuple[int, str]]:
    """What each rank returns, and what it prints. Variables say where the ranks meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    meet = dict(WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=clean_environment(RANK=str(rank), **meet, **more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank in range(size)
    ]
    outputs = [process.communicate(timeout=HANG_S)[0] for process in processes]
    return [(process.returncode, output.strip()) for process, output in zip(processes, outputs, strict=True)]


SCRIPT = """
import torch, torch.distributed as dist
import fusedcomm.horovod as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()

def total(wire):  # whose engine needs no process group, and does not mind one
    weight = torch.nn.Parameter(torch.zeros(200, 200))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 1.0), op=hvd.Sum, compression=wire)
    (weight * (rank + 1)).sum().backward()
    optimizer.step()
    return hvd.allreduce(-weight.detach()).unique().tolist()

totals = [total(hvd.Compression.int8)]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
totals += [total(hvd.Compression.int8), total(hvd.Compression.bf16)]
dist.destroy_process_group()
totals += [total(hvd.Compression.bf16)]
text = f"rank {rank} of {size}, local {hvd.local_rank()} of {hvd.local_size()}, sums {totals}"
print(text + "\\n", end="")  # one write, because ranks share the pipe
hvd.shutdown()
hvd.init()
hvd.barrier()
"""


def by_torchrun(script: str, size: int, folder: Path) -> list[tuple[int, str]]:
    (path := folder / "script.py").write_text(script)
    return [(0, line) for line in sorted(torchrun(path, cwd=folder).stdout.splitlines())]


@pytest.mark.check
@pytest.mark.parametrize("launched", [by_variables, pytest.param(by_torchrun, marks=pytest.mark.full)])
def test_variables_of_a_launcher_start_a_job(launched, tmp_path):
    expected = [(0, f"rank {rank} of 2, local {rank} of 2, sums {[[3.0]] * 4}") for rank in range(2)]
    assert launched(SCRIPT, 2, tmp_path) == expected


FORKS = """
import json, os, signal, sys, torch
import fusedcomm.horovod as hvd
hvd.init()
rank = hvd.rank()
model = torch.nn.Linear(64, 64)
compression = getattr(hvd.Compression, os.environ["WIRE"])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters(), compression)

def steps(count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        hvd.allreduce(torch.ones(1), name="loss")

def refusal(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)

steps(8)
for code in (0, 7):
    child = os.fork()
    if child == 0:
        assert (hvd.rank(), hvd.size()) == (rank, 2), "for workers that load data"
        assert "was forked from rank" in refusal(lambda: hvd.allreduce(torch.ones(1)))
        assert "hvd.shutdown() first" in refusal(hvd.init)
        assert "was forked from rank" in refusal(lambda: model(torch.ones(1, 64)).sum().backward())
        sys.exit(code)
    steps(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    steps(3)
hvd.shutdown()
child = os.fork()
if child == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
if rank == 0:
    with open(os.environ["HOROVOD_TIMELINE"]) as file:
        assert json.load(file)

# Rank 1 is lost although its child lives.
hvd.init()
child = 0
if rank == 1 and (child := os.fork()) == 0:
    os.closerange(0, 3)
    signal.pause()
    os._exit(0)
child = int(hvd.allreduce(torch.tensor([child]), op=hvd.Sum))
if rank == 1:
    os._exit(5)
print(refusal(lambda: hvd.allreduce(torch.ones(1))), flush=True)
os.kill(child, signal.SIGKILL)
os._exit(0)
"""


@pytest.mark.check
@pytest.mark.parametrize("wire", ["int8", pytest.param("none", marks=pytest.mark.full)])
def test_a_forked_child_ends_with_its_status_and_is_no_rank(wire, tmp_path):
    (status, said), lost = by_variables(FORKS, 2, tmp_path, WIRE=wire, HOROVOD_TIMELINE=str(tmp_path / "timeline.json"))
    assert status == 0 and "rank 1 ended its connection" in said, said
    assert lost == (5, "")
