"""Ctrl-C in every command that takes long: it says "interrupted", exits with 130, and leaves no process behind."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from patience import HANG_S
from processes import members
from test_probe_workload import SCRIPT

pytestmark = pytest.mark.alone

# Commands, and what they have written when they are interrupted: ranks are at work then.
COMMANDS = {
    "probe": (("probe", "--seconds", "900", "--params", "1e5"), "real steps with each wire"),
    "a script": (("probe", "--seconds", "900", "--script", "{script}"), "the script is here"),
}


def start(folder: Path, *command: str) -> subprocess.Popen:
    """Starts Python in a process group of its own, as a shell starts a command."""
    return subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
        # The tests may run where SIGINT is ignored, as in a shell's background. A child would ignore it, too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )


def read_until(process: subprocess.Popen, text: str) -> str:
    """What the process has written to stderr when `text` is there."""
    written = ""
    while text not in written:
        character = process.stderr.read(1)
        assert character, f"it ended: {written}{process.stdout.read()}"
        written += character
    return written


def all_end(group: int) -> bool:
    """Whether all processes of the group end. Python's resource tracker ends a moment after the others."""
    limit = time.monotonic() + HANG_S
    while members(group) and time.monotonic() < limit:
        time.sleep(0.05)
    return members(group) == []


@pytest.fixture
def script(tmp_path):
    waits = "import sys, time\nprint('the script is here', file=sys.stderr, flush=True)\ntime.sleep(900)\n"
    text = waits + textwrap.dedent(SCRIPT)
    (tmp_path / "model.py").write_text(text)
    return str(tmp_path / "model.py")


@pytest.mark.sampled
@pytest.mark.parametrize("to_all", [True, False], ids=["Ctrl-C", "to the command alone"])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupt_ends_the_command_and_its_ranks(tmp_path, script, name, to_all):
    arguments, sign = COMMANDS[name]
    process = start(tmp_path, "-m", "fusedcomm", *(word.replace("{script}", script) for word in arguments))
    read_until(process, sign)
    assert len(members(process.pid)) >= 3  # the command and its ranks
    (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
    _, rest = process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert rest.splitlines()[-1] == "interrupted" and "Traceback" not in rest
    assert all_end(process.pid)


def test_an_interrupt_before_the_work_begins_says_so_too(tmp_path):
    """While torch is imported, for example."""
    code = """
import signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from fusedcomm.tools import cli
sys.exit(cli.main())
"""
    for command in (("probe",), ("doctor",)):
        process = start(tmp_path, "-c", code, *command)
        _, errors = process.communicate(timeout=HANG_S)
        assert (process.returncode, errors) == (130, "interrupted\n"), command


@pytest.mark.full
def test_a_rank_of_torchrun_says_that_it_was_interrupted(tmp_path, monkeypatch):
    """Two ranks, each interrupted alone: none waits for the other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        ranks.append(start(tmp_path, "-m", "fusedcomm", "probe", "--seconds", "900", "--params", "1e5"))
    read_until(ranks[0], "real steps with each wire")
    for process in ranks:
        os.kill(process.pid, signal.SIGINT)
    for process in ranks:
        _, errors = process.communicate(timeout=HANG_S)
        assert process.returncode == 130, errors
        assert "interrupted" in errors.splitlines() and "Traceback" not in errors


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """As with: fusedcomm doctor | head -1"""
    process = start(tmp_path, "-m", "fusedcomm", "doctor")
    process.stdout.close()
    errors = process.stderr.read()
    process.wait(HANG_S)
    assert (process.returncode, errors) == (141, "")
