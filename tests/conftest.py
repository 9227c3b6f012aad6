"""Fixtures shared by all tests."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import horovods_tests
import pytest
import torch
from case_times import CaseTimes
from filelock import FileLock
from leftovers import Leftovers, is_worker
from patience import measure_slowness
from ranks import Ranks, nothing
from sampling import sampled

if not torch.cuda.is_available():
    # Without a GPU, Triton interprets kernels on CPU tensors. It reads this variable when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"

measure_slowness()

NUM_NOT_SAMPLED = pytest.StashKey[int]()

COMPILED = {"on_streams_library", "library", "bindings_folder", "compilers", "allocation_counter"}
"""Fixtures that compile something: what uses one of them belongs to `make check`."""


def pytest_addoption(parser):
    group = parser.getgroup("fusedcomm")
    group.addoption("--part", choices=("test", "check"), help="run only what `make test` or `make check` runs")
    group.addoption("--all", action="store_true", help="run every case of the tests marked sampled or full")
    group.addoption("--horovods-tests", metavar="FOLDER", help="checkout of Horovod, to run its own tests against ours")
    group.addoption("--fetch-horovods-tests", action="store_true", help="download Horovod's own tests to run them")
    group.addoption("--oldest-triton", metavar="FOLDER", help="folder with the oldest supported Triton")


def pytest_configure(config):
    if is_worker(config):
        torch.set_num_threads(1)  # every core has a worker already; more threads would only wait for each other
    # Tests are collected, and ranks started, by what these say.
    if config.getoption("--horovods-tests"):
        os.environ[horovods_tests.VARIABLE] = os.path.abspath(config.getoption("--horovods-tests"))
    if config.getoption("--fetch-horovods-tests") and horovods_tests.folder() is None:
        horovods_tests.fetch()
    config.pluginmanager.register(Leftovers(config))
    if config.getoption("--part") == "test":
        config.pluginmanager.register(CaseTimes())


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before a test's timeout begins
def pytest_runtest_protocol(item):
    """Lets no test of another worker run beside one that is marked alone."""
    if not is_worker(item.config):
        return (yield)
    with open(Path(tempfile.gettempdir()).parent / "alone.lock", "w") as lock:  # in the folder of the whole run
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a process that the test has forked, and left, has the file open, too


def part_of(item: pytest.Item) -> str:
    """What runs it: "test" or "check"."""
    is_marked = any(item.get_closest_marker(name) for name in ("check", "alone"))
    return "check" if is_marked or not COMPILED.isdisjoint(item.fixturenames) else "test"


@pytest.hookimpl(trylast=True)  # after -k and -m have made their selection
def pytest_collection_modifyitems(config, items):
    """Deselects the tests that the options above exclude, and puts those marked alone last: then the workers wait only
    at the end."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
    left_out = []
    if part := config.getoption("--part"):
        left_out += [item for item in items if part_of(item) != part]
        items[:] = [item for item in items if part_of(item) == part]
    if not config.getoption("--all"):
        items[:], not_sampled = sampled(items)
        left_out += not_sampled
        config.stash[NUM_NOT_SAMPLED] = len(not_sampled)
    config.hook.pytest_deselected(items=left_out)


def pytest_sessionfinish(session):
    """A pytest-xdist worker sends its count to the process that prints the summary. All workers collect the same
    tests, so any worker's count is right."""
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
def made_once(tmp_path_factory, pytestconfig):
    """A function made_once(name, make) that returns a folder of that name, which make(folder) has filled. One process
    calls `make`; the other processes of the test run wait for it and use the same folder."""
    root = tmp_path_factory.getbasetemp()
    if is_worker(pytestconfig):
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
    """Lets a test import the modules in bench/."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "bench"))


@pytest.fixture(scope="session")
def ranks():
    """Four long-lived ranks; pass world_size= to use the first few. The fourth is started where it is needed."""
    pool = Ranks(4)
    pool.run(nothing, world_size=3)  # a test then does not wait for what they import
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def torchs_ranks():
    """Two ranks for torch's own tests alone: their helpers change the process that imports them."""
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def on_streams_library(made_once):
    """The folder of the library with the simulated accelerator: see tests/helpers/cuda_stress.py."""
    import cuda_stress

    return made_once("cuda-streams", cuda_stress.build)


@pytest.fixture(scope="session")
def bindings_folder(made_once):
    """The folder of the module in tests/native/bindings.cpp: see tests/helpers/native_bindings.py."""
    import native_bindings

    return made_once("bindings", native_bindings.build)


@pytest.fixture(scope="module")
def ranks_on_streams(on_streams_library):
    """Up to four ranks with a simulated accelerator, two without world_size=: see tests/helpers/on_streams.py."""
    from on_streams import RanksOnStreams

    pool = RanksOnStreams(on_streams_library, 4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def library(made_once):
    """The path of the driver of tests/helpers/fake_cuda.py."""
    import fake_cuda

    if shutil.which("g++") is None:
        pytest.skip("the driver of the test needs g++")
    return str(made_once("fake_cuda", fake_cuda.build) / fake_cuda.LIBRARY)


@pytest.fixture(scope="session")
def kernels_library(library):
    """`library`, for tests that compare the GPU's kernels, as Triton interprets them, with the CPU path. The simulated
    streams have the CPU's codec in their place, so they cannot tell how a kernel reads a launch's arguments."""
    import torch

    pytest.importorskip("triton", reason="the kernels are Triton's")
    if torch.cuda.is_available():
        pytest.skip("the driver of the test stands in for a GPU")
    return library


@pytest.fixture(scope="session")
def compilers(request):
    """See ptx_kernels.Compilers."""
    from ptx_kernels import Compilers

    compilers = Compilers(request.config)
    yield compilers
    compilers.close()
