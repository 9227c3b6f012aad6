"""Fixtures shared by all tests."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from patience import measure_slowness
from ranks import Ranks
from sampling import sampled

if not torch.cuda.is_available():
    # Triton asks when a kernel is defined: without a GPU it is interpreted, on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # there is a worker for each core; threads of several would wait for each other

measure_slowness()

NUM_NOT_SAMPLED = pytest.StashKey[int]()


def pytest_addoption(parser):
    group = parser.getgroup("fusedcomm")
    group.addoption("--side-by-side", action="store_true", help="only tests beside which others may run (for -n)")
    group.addoption("--alone", action="store_true", help="only the others, marked alone")
    group.addoption("--all", action="store_true", help="every case of the matrices that are marked sampled")
    group.addoption("--rest", action="store_true", help="only the cases that are left out without --all")
    group.addoption("--every-kernel", action="store_true", help="look for wrong constants in all kernels: half an hour")
    group.addoption("--oldest-triton", metavar="FOLDER", help="where pip has installed the oldest supported Triton")


@pytest.hookimpl(trylast=True)  # chooses among what -k and -m have left
def pytest_collection_modifyitems(config, items):
    """Leaves out what the options above do."""
    left_out = []
    wanted = {True: config.getoption("--alone"), False: config.getoption("--side-by-side")}
    if any(wanted.values()):
        left_out = [item for item in items if not wanted[item.get_closest_marker("alone") is not None]]
        items[:] = [item for item in items if wanted[item.get_closest_marker("alone") is not None]]
    if config.getoption("--rest"):
        chosen, items[:] = sampled(items)
        left_out += chosen
    elif not (config.getoption("--all") or config.getoption("--every-kernel")):
        items[:], not_sampled = sampled(items)
        left_out += not_sampled
        config.stash[NUM_NOT_SAMPLED] = len(not_sampled)
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session):
    """One of pytest-xdist's workers tells the process that prints the summary; all have collected the same."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_not_sampled"] = session.config.stash.get(NUM_NOT_SAMPLED, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    if output := getattr(node, "workeroutput", None):
        node.config.stash[NUM_NOT_SAMPLED] = output["num_not_sampled"]


def pytest_terminal_summary(terminalreporter, config):
    if num_not_sampled := config.stash.get(NUM_NOT_SAMPLED, 0):
        terminalreporter.write_sep("-", f"{num_not_sampled} cases are left to pytest --all, or make test-all")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """made_once(name, make): a folder of that name after make(folder), which one process calls for all that run tests
    side by side; the others wait for it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def made_once(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = root / name, root / f"{name}.done"
        with FileLock(root / f"{name}.lock"):
            if not done.exists():
                folder.mkdir(exist_ok=True)
                make(folder)
                done.touch()
        return folder

    return made_once


@pytest.fixture
def bench_modules(monkeypatch):
    """Lets a test import what lies in bench/."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "bench"))


@pytest.fixture(scope="session")
def ranks():
    """Four long-lived ranks; pass world_size= to use the first few."""
    pool = Ranks(4)
    yield pool
    pool.close()
