"""Threads that the system does not start."""

import subprocess
import sys

import pytest
from scripts import compiled


@pytest.mark.check
@pytest.mark.skipif(sys.platform != "linux", reason="sets glibc's default size of stacks")
def test_the_error_says_which_thread_and_how_much_was_asked_for(tmp_path):
    binary = compiled(tmp_path, "tests/native/threads_scene.cpp")
    error, name = subprocess.run([binary], capture_output=True, text=True, check=True).stdout.splitlines()
    assert error == (
        "fusedcomm: the system did not start the thread fc-test, which takes 268435456 MiB of address space for its "
        "stack. This process has 1 thread(s). Raise the limit of processes (ulimit -u, pids.max) or of memory (ulimit "
        "-v): Resource temporarily unavailable"
    )
    assert name == "fc-test"
