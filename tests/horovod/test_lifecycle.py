"""Init, ranks and shutdown, however the processes were launched."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import job, raised
from patience import HANG_S

import fusedcomm
import fusedcomm.horovod as hvd

pytestmark = pytest.mark.check

ROOT = Path(fusedcomm.__file__).absolute().parents[1]
SCRIPT = """
import torch
import fusedcomm
import fusedcomm.horovod as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).item()
text = f"rank {hvd.rank()} of {hvd.size()}, local {hvd.local_rank()} of {hvd.local_size()}, sum {total:.0f}"
print(text + "\\n", end="")  # one write, because ranks share the pipe
hvd.shutdown()
hvd.init()
hvd.barrier()
"""
LAUNCHERS = ("HOROVOD_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "FUSEDCOMM_HOROVOD")


def clean_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def expected_lines(size: int) -> list[str]:
    total = size * (size + 1) // 2
    return [f"rank {rank} of {size}, local {rank} of {size}, sum {total}" for rank in range(size)]


def check_ranks(rank, size):
    assert not hvd.is_initialized()
    for _ in range(5):
        with job():
            assert hvd.is_initialized()
            assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
            assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1) and hvd.is_homogeneous()
            assert (os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"]) == (str(rank), str(size))
            assert hvd.global_process_set.ranks == list(range(size)) and hvd.global_process_set.size() == size
        assert not hvd.is_initialized()


@pytest.mark.parametrize("size", [1, 4])
def test_a_job_can_be_started_and_ended_again_and_again(ranks, size):
    ranks.run(check_ranks, world_size=size)


def check_hosts(rank, size):
    with job(HOROVOD_HOSTNAME=("north", "south", "north")[rank]):
        assert not hvd.is_homogeneous()
        return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()


def test_local_and_cross_ranks_follow_the_hosts(ranks):
    assert ranks.run(check_hosts, world_size=3) == [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 1)]


def check_variable(rank, size):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("HOROVOD_FUSION_THRESHOLD", "64M")
        return raised(hvd.init)


def test_a_variable_that_is_not_possible_on_one_rank_is_told_to_all(ranks):
    ((kind, said),) = set(ranks.run(check_variable, world_size=3))
    assert kind == "ValueError"
    assert said.startswith(
        "hvd.init(): rank 1 cannot start: HOROVOD_FUSION_THRESHOLD='64M' is not possible: use a whole"
    )


def check_twice(rank, size):
    hvd.init()
    hvd.init()
    kind, said = raised(hvd.init, process_sets=[[0]])
    assert kind == "ValueError" and "before" in said and "[[0]]" in said
    hvd.barrier()
    hvd.shutdown()
    hvd.shutdown()


def test_a_second_init_is_without_effect_and_an_error_with_other_arguments(ranks):
    ranks.run(check_twice, world_size=2)


def check_some_ranks(rank, size):
    if rank == 1:
        kind, said = raised(hvd.init, [2, 0])
        assert kind == "ValueError" and "rank 1" in said
        return None
    hvd.init([2, 0])
    result = hvd.rank(), hvd.size(), hvd.allgather(torch.tensor([rank])).tolist()
    hvd.barrier()
    hvd.shutdown()
    return result


def test_a_job_may_consist_of_some_ranks_in_any_order(ranks):
    assert ranks.run(check_some_ranks, world_size=3) == [(1, 2, [2, 0]), None, (0, 2, [2, 0])]


def test_what_is_built_in():
    assert hvd.gloo_built() and hvd.gloo_enabled()
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.ccl_built() or hvd.ddl_built())
    assert hvd.nccl_built() == 0 or torch.cuda.is_available()
    assert not hvd.is_initialized()


def test_a_process_without_a_launcher_is_a_job_of_one_rank(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == expected_lines(1)


def run_with_horovods_variables(script: str, size: int, folder: Path, **more: str) -> list[tuple[int, str]]:
    """What each rank returns, and what it prints."""
    port = free_port()
    processes = []
    for rank in range(size):
        variables = dict(HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(size), HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1",
                         HOROVOD_GLOO_RENDEZVOUS_PORT=port)  # fmt: skip
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", script],
                env=clean_environment(**variables, **more),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=folder,
            )
        )
    outputs = [process.communicate(timeout=HANG_S)[0] for process in processes]
    return [(process.returncode, output.strip()) for process, output in zip(processes, outputs, strict=True)]


def test_horovods_variables_start_a_job(tmp_path):
    size = 3
    assert run_with_horovods_variables(SCRIPT, size, tmp_path) == [(0, line) for line in expected_lines(size)]


FORKS = """
import os, sys, torch
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
print("through", flush=True)
hvd.shutdown()
child = os.fork()
if child == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
"""


@pytest.mark.parametrize("wire", ["int8", pytest.param("none", marks=pytest.mark.full)])
def test_a_forked_child_ends_with_its_status_and_the_job_goes_on(wire, tmp_path):
    timeline = tmp_path / "timeline.json"
    ended = run_with_horovods_variables(FORKS, 2, tmp_path, WIRE=wire, HOROVOD_TIMELINE=str(timeline))
    assert ended == [(0, "through")] * 2
    assert json.loads(timeline.read_text())


OUTLIVED = """
import os, signal, torch
import fusedcomm.horovod as hvd
hvd.init()
hvd.barrier()
child = 0
if hvd.rank() == 1 and (child := os.fork()) == 0:
    os.closerange(0, 3)
    signal.pause()
    os._exit(0)
child = int(hvd.allreduce(torch.tensor([child]), op=hvd.Sum))
if hvd.rank() == 1:
    os._exit(5)
try:
    hvd.allreduce(torch.ones(1))
except hvd.HorovodInternalError as error:
    print(error, flush=True)
finally:
    os.kill(child, signal.SIGKILL)
os._exit(0)
"""


def test_a_rank_is_lost_although_its_child_lives(tmp_path):
    (status, said), lost = run_with_horovods_variables(OUTLIVED, 2, tmp_path)
    assert status == 0 and "rank 1 ended its connection" in said, said
    assert lost == (5, "")


@pytest.mark.full
def test_torchrun_starts_a_job(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == expected_lines(2)


def without_a_meeting_place(rank, size):
    import torch.distributed as dist

    from fusedcomm.horovod import environment, launch

    own = dist.distributed_c10d._world.pg_map.copy()
    dist.destroy_process_group()
    try:
        os.environ.update(HOROVOD_RANK="0", HOROVOD_SIZE="2")
        os.environ.pop(launch.SET_BY, None)
        for name in ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "MASTER_ADDR"):
            os.environ.pop(name, None)
        return raised(launch.find, environment.settings())
    finally:
        for name in ("HOROVOD_RANK", "HOROVOD_SIZE"):
            os.environ.pop(name)
        del own
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_horovods_variables_without_an_address_say_what_to_set(ranks):
    ((kind, said),) = ranks.run(without_a_meeting_place, world_size=1)
    assert kind == "ValueError" and "HOROVOD_GLOO_RENDEZVOUS_ADDR" in said and "torchrun" in said
