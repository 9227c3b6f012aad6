"""Scripts and programs in processes of their own, for tests of what a process does as a whole: its allocations, its
end."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]


def let_threads_be_late() -> None:
    """To be called by a script. All threads go to one core, where the others run only while this one waits: the process
    comes to its end before they have let go of what they moved. Else about one of a hundred does, on a busy machine."""
    core = min(os.sched_getaffinity(0))
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {core})
        if thread != threading.get_native_id():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def printed_by_two_ranks(script: str, folder: Path, *args: str, **environment: str) -> list[str]:
    """What each prints. They have to end well.

    Args:
        script: finds its rank, the file of a store for the two, and `args` in sys.argv; it can import what tests can.
    """
    path = folder / "script.py"
    path.write_text(script)
    python_path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    processes = [
        subprocess.Popen(
            [sys.executable, str(path), str(rank), str(folder / "-".join(("store", *args))), *args],
            env={**os.environ, "PYTHONPATH": python_path, "FUSEDCOMM_QUIET": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = []
    for process in processes:
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, err
        printed.append(out)
    return printed


def cxx() -> str:
    """The C++ compiler. Skips the test without one."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        pytest.skip("needs a C++ compiler: there is no g++, and CXX is not set")
    return compiler


def compiled(folder: Path, *sources: str) -> Path:
    """A program of ours without torch, of `sources` from the checkout's root. Skips the test without a compiler."""
    binary = folder / "program"
    paths = [ROOT / source for source in sources]
    subprocess.run([cxx(), "-std=c++17", "-O1", "-I", ROOT / "csrc", *paths, "-o", binary, "-pthread"], check=True)
    return binary
