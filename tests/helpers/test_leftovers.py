"""A run of tests says what they have left behind, and which took too long, and fails."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import socket, subprocess, sys, tempfile, time
import case_times, pytest

kept = []

def test_slow(): time.sleep(case_times.SLOWER * case_times.CASE_S + 1)

def test_process(): kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

def test_port(): kept.append(socket.create_server(("127.0.0.1", 0)))

def test_file(): tempfile.mkstemp(prefix="left-")

def test_rather_slow(): time.sleep(case_times.SLOWER * case_times.CASE_S - 2)

@pytest.mark.parametrize("number", range(6))
def test_that_is_good(number): subprocess.run([sys.executable, "-c", ""])
"""


@pytest.mark.check
def test_what_is_left_behind_is_named_with_its_test(tmp_path):
    (tmp_path / "test_these.py").write_text(TESTS)
    config = ["-c", str(ROOT / "pyproject.toml"), "-p", "conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *config, "--part", "test", "-n", "2", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED and "11 passed" in done.stdout, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    (process,) = [
        int(found[1]) for line in failed if (found := re.search("::test_process .*: process ([0-9]+), ", line))
    ]
    os.kill(process, signal.SIGKILL)
    for test, what in [("port", "the port "), ("file", "/left-"), ("slow", "on idle cores, twice")]:
        assert len([line for line in failed if f"::test_{test}" in line and what in line]) == 1, failed
    assert len(failed) == 4
    assert "::test_rather_slow took" in done.stdout
