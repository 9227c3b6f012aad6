"""`fusedcomm run --members`: lost workers are started again and join, and launchers do not depend on each other."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import HANG_S
from processes import is_running
from test_arguments import refusal

from fusedcomm.tools import cli, run_members
from fusedcomm.tools.run_members import pause_before

JOB = Path(__file__).resolve().parent / "member_job.py"
# One write for a line, because workers share the pipe, and `fusedcomm run` asks for unbuffered output.
PRINTED = "import os; print(' '.join(os.environ.get(name, '-') for name in {names}) + '\\n', end='')"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "FUSEDCOMM_JOIN")
REFUSED = "import os, sys; print(os.environ['FUSEDCOMM_JOIN'], 'MASTER_ADDR' in os.environ); sys.exit(3)"


def test_founders_get_their_places_and_one_file(capfd, monkeypatch):
    monkeypatch.delenv("FUSEDCOMM_MEMBERS", raising=False)
    program = PRINTED.format(names=(*NAMES, "FUSEDCOMM_MEMBERS"))
    assert cli.main(["run", "--members", "-np", "2", sys.executable, "-c", program]) == 0
    first, second = sorted(line.split() for line in capfd.readouterr().out.splitlines())
    assert first[:5] == ["0", "2", "0", "2", "0"] and second[:5] == ["1", "2", "1", "2", "0"]
    assert first[5] == second[5] and not Path(first[5]).exists()


def test_founders_on_other_hosts_get_the_same_store_and_their_places(ssh, capfd, monkeypatch, tmp_path):
    ssh()
    monkeypatch.setenv("FUSEDCOMM_MEMBERS", str(tmp_path / "members"))
    program = PRINTED.format(names=(*NAMES, "FUSEDCOMM_MEMBERS", "MASTER_ADDR", "MASTER_PORT"))
    command = ["run", "--members", "-np", "2", "-H", "localhost,elsewhere", sys.executable, "-c", program]
    assert cli.main(command) == 0
    first, second = sorted(line.split() for line in capfd.readouterr().out.splitlines())
    assert first[:5] == ["0", "2", "0", "1", "0"] and second[:5] == ["1", "2", "0", "1", "0"]
    assert first[5:] == second[5:] and first[5] == str(tmp_path / "members") and Path(first[5]).exists()


def test_ranks_that_join_get_the_addresses_and_no_store(capfd, tmp_path):
    program = "import os; print(open(os.environ['FUSEDCOMM_MEMBERS']).read(), os.environ.get('MASTER_ADDR'))"
    command = ["-np", "1", sys.executable, "-c", program]
    assert cli.main(["run", "--members", "--join", "10.0.0.7:1,10.0.0.8:2", *command]) == 0
    assert capfd.readouterr().out.split() == ["10.0.0.7:1", "-", "10.0.0.8:2", "-", "None"]
    (tmp_path / "members").write_text("10.0.0.9:1 -\n")
    assert cli.main(["run", "--members", "--join", str(tmp_path / "members"), *command]) == 0
    assert capfd.readouterr().out.split() == ["10.0.0.9:1", "-", "None"]
    assert (tmp_path / "members").exists()


def test_a_worker_that_fails_again_and_again_is_started_so_many_times(capfd, monkeypatch):
    monkeypatch.setattr(run_members, "FIRST_PAUSE_S", 0.01)
    command = ["-np", "1", "--max-restarts", "3", sys.executable, "-c", REFUSED]
    assert cli.main(["run", "--members", "--join", "127.0.0.1:1", *command]) == 3
    said = capfd.readouterr()
    assert said.out.splitlines() == ["1 False"] * 4
    assert "it is started again in 0.02 s, and joins" in said.err
    assert "it is not started again, since --max-restarts 3 are used up" in said.err


def test_pauses_double_up_to_the_longest():
    assert [pause_before(restart) for restart in range(1, 10)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]


def test_a_founder_lost_before_all_have_met_ends_the_others(capfd):
    program = "import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(600)"
    command = ["run", "--members", "-np", "2", "--max-restarts", "5", sys.executable, "-c", program]
    assert cli.main(command) == 7
    assert "before all workers had met" in capfd.readouterr().err


def test_addresses_in_the_variable_are_refused_with_the_option_that_takes_them(capsys, monkeypatch):
    monkeypatch.setenv("FUSEDCOMM_MEMBERS", "10.0.0.7:2")
    assert "write --join 10.0.0.7:2, or unset it" in refusal(capsys, "run", "-np", "2", "--members", "true")


class Jobs:
    """Launchers whose workers train in one folder (member_job.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launchers = folder, []
        (folder / "trains").mkdir()

    def start(self, *arguments: str, launcher: str = "fusedcomm", **variables: str) -> subprocess.Popen:
        """Starts a launcher; arguments: those before the script."""
        path = os.pathsep.join(filter(None, sys.path))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FUSEDCOMM_MEMBERS")}
        environment |= {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
        program = [str(JOB), str(self.folder / "trains")]
        if launcher == "fusedcomm":
            program = [sys.executable, *program]
        launched = subprocess.Popen([sys.executable, "-m", launcher, *arguments, *program], env=environment)
        self.launchers.append(launched)
        return launched

    def now(self) -> dict[int, dict]:
        """What the living workers have written last, by process."""
        found = {}
        for path in (self.folder / "trains").glob("*.now"):
            if is_running(int(path.stem)):
                found[int(path.stem)] = json.loads(path.read_text())
        return found

    def of(self, size: int, without: set[int] = frozenset()) -> dict[int, dict]:
        """Waits until so many workers, none of `without`, train together."""
        until = time.monotonic() + HANG_S
        while True:
            now = self.now()
            if len(now) == size and all(each["size"] == size for each in now.values()) and not without & now.keys():
                return now
            assert time.monotonic() < until, now
            time.sleep(0.05)

    def stop(self) -> list[int]:
        """Ends training; the launchers' statuses."""
        (self.folder / "trains" / "stop").touch()
        return [launcher.wait(HANG_S) for launcher in self.launchers]

    def ends(self) -> set[tuple]:
        """Step and digest of the last step of each worker that has written most."""
        told = [json.loads(path.read_text()) for path in (self.folder / "trains").glob("*.now")]
        last = max(each["step"] for each in told)
        return {(each["step"], each["digest"]) for each in told if each["step"] == last}


@pytest.fixture
def jobs(tmp_path):
    made = Jobs(tmp_path)
    yield made
    (tmp_path / "trains" / "stop").touch()
    for launcher in made.launchers:
        launcher.terminate()
        launcher.wait()


@pytest.mark.full
def test_a_killed_worker_is_started_again_and_joins(jobs):
    """Rank 0 is killed, on whose store the others do not depend."""
    jobs.start("run", "--members", "-np", "2", "--max-restarts", "1")
    before = jobs.of(2)
    victim = next(process for process, told in before.items() if told["slot"] == "0")
    os.kill(victim, signal.SIGKILL)
    after = jobs.of(2, without={victim})
    assert set(before) & set(after) == set(before) - {victim}
    joined = next(told for process, told in after.items() if process not in before)
    assert joined["join"] is not None and joined["slot"] == "0"
    assert jobs.stop() == [0] and len(jobs.ends()) == 1


@pytest.mark.full
def test_a_second_launcher_adds_ranks_and_goes_on_when_the_first_is_lost(jobs, tmp_path):
    first = jobs.start("run", "--members", "-np", "2", FUSEDCOMM_MEMBERS=str(tmp_path / "members"))
    before = jobs.of(2)
    address = (tmp_path / "members").read_text().split()[0]
    jobs.start("run", "--members", "--join", address, "-np", "2", "--max-restarts", "1")
    joined = set(jobs.of(4)) - set(before)
    first.terminate()  # ends its workers
    assert first.wait(HANG_S) == 128 + signal.SIGTERM
    assert set(jobs.of(2)) == joined
    victim = joined.pop()
    os.kill(victim, signal.SIGKILL)
    assert joined < set(jobs.of(2, without={victim}))
    assert jobs.stop()[1] == 0 and len(jobs.ends()) == 1


@pytest.mark.full
def test_workers_train_on_without_their_launcher(jobs):
    launcher = jobs.start("run", "--members", "-np", "2")
    before = jobs.of(2)
    launcher.kill()
    launcher.wait()
    step = max(told["step"] for told in before.values())
    while min(told["step"] for told in jobs.of(2).values()) < step + 10:
        time.sleep(0.01)
    assert set(jobs.now()) == set(before)
    os.kill(min(before), signal.SIGKILL)  # and lose each other as before
    assert set(jobs.of(1)) == {max(before)}


@pytest.mark.full
def test_torchrun_of_a_host_joins_again_when_it_has_started_its_workers_again(jobs, tmp_path):
    file = {"FUSEDCOMM_MEMBERS": str(tmp_path / "members")}
    usual = ("--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
    jobs.start(*usual, launcher="torch.distributed.run", **file)
    before = jobs.of(2)
    jobs.start(*usual, "--max-restarts=2", launcher="torch.distributed.run", **file, FUSEDCOMM_JOIN="1")
    joined = set(jobs.of(4)) - set(before)
    os.kill(joined.pop(), signal.SIGKILL)
    after = jobs.of(4, without=joined)
    assert set(before) < set(after)
    assert jobs.stop() == [0, 0] and len(jobs.ends()) == 1
