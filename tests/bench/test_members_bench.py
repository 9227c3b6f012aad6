"""bench/members.py measures every part, with right results; a job says what its processes did wrong."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S

BENCH = Path(__file__).resolve().parents[2] / "bench"
TELLS = "import sys; sys.path.insert(0, sys.argv[1]); from lib.job import Teller; say = Teller(sys.argv[2]).say\n"
TRAINS = TELLS + "for step in range(int(sys.argv[3])): say(step=step, size=2, digest=sys.argv[4])\nsys.stdin.read()"


@pytest.fixture
def job(bench_modules, tmp_path):
    from lib.job import Job

    job = Job(tmp_path, HANG_S, random.Random(0))
    yield job
    job.end()


def start(job, script: str, *arguments: str) -> int:
    return job.start(["-c", script, str(BENCH), job.pipe, *arguments]).pid


def test_a_job_kills_one_of_those_that_train(job):
    pids = {start(job, TRAINS, "3", "same") for _ in range(2)}
    job.wait_for("all steps", lambda: sum(map(len, job.steps.values())) == 6)
    assert job.alive == pids == set(job.steps)
    victim, _ = job.kill_one(within_s=0.0)
    assert job.alive == pids - {victim}
    assert next(process for process in job.processes if process.pid == victim).wait(HANG_S) == -9


def test_ranks_with_other_parameters_are_an_error(job):
    from lib.job import JobError

    for digest in ("one", "another"):
        start(job, TRAINS, "1", digest)
    with pytest.raises(JobError, match="after step 0 process .* has other parameters than another rank"):
        job.wait_for("both", lambda: len(job.steps) == 2)


def test_a_process_that_fails_is_an_error_with_what_it_printed(job):
    from lib.job import JobError

    start(job, "raise SystemExit('no such model')")
    with pytest.raises(JobError, match="(?s)a process ended with 1, waiting for steps.*no such model"):
        job.wait_for("steps", lambda: bool(job.steps))


def run(tmp_path: Path, *options: str) -> dict:
    path = tmp_path / "members.json"
    command = [sys.executable, str(BENCH / "members.py"), "--quick", *options, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["not_measured"] == [] and all(row["checked"] for row in found["rows"])
    return found


@pytest.mark.full
def test_the_cost_of_members_is_measured_beside_reducers_without(tmp_path):
    found = run(tmp_path, "--parts", "cost", "--ranks", "3")
    without, again, members = (row["figures"] for row in found["rows"])
    assert without["sent_nbytes"] == again["sent_nbytes"] == members["sent_nbytes"]
    assert without["kept_nbytes"] == 0 < members["kept_nbytes"]


@pytest.mark.full
def test_a_host_that_joins_gets_the_state_at_the_speed_of_its_line(tmp_path, bench_modules):
    from lib import namespaces

    if problem := namespaces.problem():
        pytest.skip(problem)
    (row,) = run(tmp_path, "--parts", "join")["rows"]
    assert row["checked"] and 0.3 < row["figures"]["share_of_line"] < 1
    assert row["figures"]["nbytes"] > 3 * 4 * 1e6  # parameters, and two moments of each


@pytest.mark.full
def test_losses_are_timed_and_training_goes_on(tmp_path):
    ways = ["--ways", "members", "horovod elastic"]
    found = run(tmp_path, "--parts", "kill", "loss", *ways, "--kills", "2")
    assert [row["impl"] for row in found["rows"]] == ["members", "horovod elastic"]
    members, elastic = (row["figures"] for row in found["rows"])
    assert members["passes_thrown_away"] == 0 and members["kills"] == elastic["kills"] == 2
    undisturbed, lost, fewer = found["loss_runs"]
    assert (undisturbed["losses"], lost["losses"], fewer["ranks"]) == (0, 1, 3)
    assert all(run["checked"] for run in found["loss_runs"])


@pytest.mark.full
def test_local_steps_go_on_without_a_rank_that_is_killed_and_take_one_that_was_stopped_back(tmp_path):
    options = ["--parts", "loss", "--every", "10", "--steps", "100", "--ranks", "3", "--wire", "int4"]
    runs = run(tmp_path, *options)["local_steps_runs"]
    assert [each["event"] for each in runs] == ["undisturbed", "killed", "stopped", "undisturbed"]
    assert [each["steps_with_fewer_ranks"] > 0 for each in runs] == [False, True, True, False]
    assert all(each["checked"] for each in runs)
