"""Scripts in processes of their own, for tests of what a process does as a whole: its allocations, its end."""

import os
import subprocess
import sys
import threading
from pathlib import Path


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
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        printed.append(out)
    return printed
