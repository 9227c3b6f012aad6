"""Runs scripts and programs in separate processes, for tests of a whole process: its allocations, its end."""

import functools
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import HANG_S

from fusedcomm.native import _C

ROOT = Path(__file__).resolve().parents[2]


def let_threads_be_late() -> None:
    """Makes the end of a process come before its other threads have released their memory. A script calls it. All
    threads move to one core, where the others run only while this one waits. Without it, about one process in a hundred
    ends this way, on a busy machine."""
    core = min(os.sched_getaffinity(0))
    for thread in map(int, os.listdir("/proc/self/task")):
        os.sched_setaffinity(thread, {core})
        if thread != threading.get_native_id():
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def printed_by_two_ranks(script: str, folder: Path, *args: str, **environment: str) -> list[str]:
    """Runs a script in two processes and returns what each prints. Fails if one exits with an error.

    Args:
        script: Python source. Its sys.argv holds the rank, the path of a FileStore for both ranks, and `args`. It can
            import the modules that tests can import.
        environment: further environment variables.
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


def python(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python, which can import what tests can. `environment`: further variables."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=HANG_S)


def torchrun(
    script: Path, *args: object, options: tuple[str, ...] = (), cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Runs a script on two ranks under torchrun. Fails if one fails. `options`: torchrun's own, besides the usual."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ours = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run(
        [*command, *options, *map(str, (script, *args))],
        cwd=cwd,
        env={**os.environ, **ours, **environment},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run


def compiler_name() -> str | None:
    """The C++ compiler; None if there is none."""
    return os.environ.get("CXX") or shutil.which("g++")


def cxx() -> str:
    """The C++ compiler. Skips the test if there is none."""
    compiler = compiler_name()
    if not compiler:
        pytest.skip("needs a C++ compiler: there is no g++, and CXX is not set")
    return compiler


def built(source: str) -> Path:
    """The object file that the build has made of a source of the extension, if the extension is newer than everything
    in csrc/; else the source itself. A test program links it instead of compiling the source again. `source` is
    relative to the repository's root, and includes nothing of torch."""
    made = (ROOT / "build" / "objects" / source).with_suffix(".o")
    return made if made.exists() and is_built() and not in_a_unit(source) else ROOT / source


def in_a_unit(source: str) -> bool:
    """Whether the build compiles the source with others, as setup.py lists them; an object of its own is then old."""
    name = f'"{source.removeprefix("csrc/")}"'
    return any(name in unit.read_text() for unit in (ROOT / "build" / "units").glob("*.cpp"))


@functools.cache
def is_built() -> bool:
    """Whether the extension is newer than everything in csrc/."""
    newest = max(path.stat().st_mtime for path in (ROOT / "csrc").rglob("*") if path.is_file())
    return Path(_C.__file__).stat().st_mtime > newest


def compiled(folder: Path, *sources: str) -> Path:
    """Compiles a program without torch and returns its path. `sources` are relative to the repository's root. Skips the
    test if there is no compiler."""
    binary = folder / "program"
    paths = [built(source) for source in sources]
    subprocess.run([cxx(), "-std=c++17", "-O1", "-I", ROOT / "csrc", *paths, "-o", binary, "-pthread"], check=True)
    return binary
