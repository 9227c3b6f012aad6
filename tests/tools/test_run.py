"""`fusedcomm run` gives each rank its place, and ends all when one fails."""

import os
import signal
import subprocess
import sys
import time

import pytest
from patience import HANG_S
from processes import is_running

from fusedcomm.tools import cli
from fusedcomm.tools.run import places

# One write for a line, because ranks share the pipe, and `fusedcomm run` asks for unbuffered output.
PRINTED = "import os; print(' '.join(os.environ['HOROVOD_' + name] for name in {names}) + '\\n', end='')"
SLEEPS = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def test_each_rank_gets_its_place(capfd):
    program = PRINTED.format(names=NAMES)
    assert cli.main(["run", "-np", "3", "-H", "localhost:2,127.0.0.1:1", sys.executable, "-c", program]) == 0
    lines = sorted(capfd.readouterr().out.splitlines())
    assert lines == ["0 3 0 2 0 2", "1 3 1 2 0 1", "2 3 0 1 1 2"]


def test_a_rank_that_fails_ends_all_and_gives_its_status(capfd):
    program = "import os, sys, time; sys.exit(7) if os.environ['HOROVOD_RANK'] == '1' else time.sleep(600)"
    assert cli.main(["run", "-np", "2", sys.executable, "-c", program]) == 7
    assert "rank 1 on localhost has failed with exit status 7" in capfd.readouterr().err


def test_hosts_are_filled_in_their_order():
    assert places("one:2,two", 3) == ["one", "one", "two"]
    assert places(None, 2) == ["localhost"] * 2


def test_another_host_is_asked_whether_it_lives(ssh, capfd):
    """By ssh itself: a host that is cut off would otherwise count as running for as long as TCP likes."""
    ssh('echo "$@" | head -1; for last; do :; done; exec sh -c "$last"')
    assert cli.main(["run", "-np", "1", "-H", "elsewhere:1", "true"]) == 0
    assert "-o BatchMode=yes -o ServerAliveInterval=10 elsewhere exec sh " in capfd.readouterr().out


@pytest.mark.check
def test_a_rank_elsewhere_ends_when_the_launcher_is_killed(ssh, tmp_path):
    ssh()
    command = [sys.executable, "-m", "fusedcomm", "run", "-np", "1", "-H", "elsewhere", sys.executable, "-c", SLEEPS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    launcher = subprocess.Popen([*command, str(tmp_path / "pid")], env=environment)
    until = time.monotonic() + HANG_S
    try:
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert time.monotonic() < until and launcher.poll() is None
            time.sleep(0.02)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    rank = int((tmp_path / "pid").read_text())
    while is_running(rank):
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("hosts", "script", "command", "status", "said"),
    [
        ("localhost:2", None, "nosuchcommand", 127, "nosuchcommand was not found: no folder in PATH has it"),
        ("localhost:2", None, "./none/such", 127, "./none/such was not found: there is no such file"),
        ("localhost:2", None, "{folder}/file", 126, "/file cannot be executed: Permission denied"),
        (
            "elsewhere:2",
            "exit 255",
            "true",
            255,
            "ssh reached no host elsewhere, or lost it: check that `ssh elsewhere",
        ),
        ("elsewhere:2", "", "nosuchcommand", 127, "the command was not found there"),
        ("elsewhere:2", "", "{folder}/file", 126, "the command cannot be executed there"),
    ],
)
def test_what_cannot_be_started_is_said_in_a_sentence(ssh, tmp_path, capfd, hosts, script, command, status, said):
    (tmp_path / "file").touch()
    if script is not None:
        ssh(*filter(None, [script]))
    assert cli.main(["run", "-np", "2", "-H", hosts, command.format(folder=tmp_path)]) == status
    written = capfd.readouterr().err
    assert said in written and "fusedcomm run: " in written and "Traceback" not in written


def test_a_missing_ssh_is_said(other_hosts, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["run", "-np", "1", "-H", "elsewhere", "true"]) == 127
    assert "fusedcomm run: ssh was not found: no folder in PATH has it" in capfd.readouterr().err
