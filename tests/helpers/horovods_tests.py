"""Horovod's own tests, run as they are against fusedcomm.horovod.install().

They are not part of this repository. FUSEDCOMM_HOROVODS_TESTS, or pytest --horovods-tests, names a checkout of Horovod;
pytest --fetch-horovods-tests downloads what is needed, once, into the cache folder.
"""

import ast
import contextlib
import functools
import importlib.util
import os
import sys
import types
import unittest
import urllib.request
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "FUSEDCOMM_HOROVODS_TESTS"
COMMIT = "2626dc87a3a8eb8fb7d2216198ce45bce0f9e65a"
URL = f"https://raw.githubusercontent.com/horovod/horovod/{COMMIT}/"
FILES = {
    "torch": "test/parallel/test_torch.py",
    "timeline": "test/parallel/test_timeline.py",
    "common": "test/parallel/test_common.py",
    "elastic": "test/single/test_torch_elastic.py",
}
UTILS = "test/utils/common.py"

CANNOT = {
    "No GPUs available": "needs a CUDA GPU for each rank",
    "Not enough GPUs available": "needs two CUDA GPUs for each rank",
    "No GPU available": "needs a CUDA GPU",
    "Only one worker available": "needs several ranks; it runs with 2, 3 and 4",
    "This test does not apply if there is only one worker.": "needs several ranks; it runs with 2, 3 and 4",
    "Adasum requires MPI": "is of Adasum, which is not here",
    "MPI not enabled": "asks for MPI, although it would not use it here",
    "Number of ranks is 1. Skipping test.": "needs several ranks; it runs with 2, 3 and 4",
    "https://github.com/horovod/horovod/issues/2496": "Horovod always skips it (test_timeline_api)",
    "": "Horovod always skips it (test_broadcast_state_gpu)",
}
"""What a test says when it skips itself, and why that is right here."""


CANNOT_ON_3 = {
    f"torch.test_horovod_{name}": "wants three times an fp16 number exactly in fp16, which has no bits for it"
    for name in ("allreduce_prescale", "reducescatter_prescale", "grouped_reducescatter_prescale")
}
"""Tests that fail on 3 ranks whatever the implementation, and why."""


CANNOT_ON = {
    **{(name, 3): why for name, why in CANNOT_ON_3.items()},
    **{
        ("elastic.test_elastic_sampler", size): "counts the samples of one process: it is one of Horovod's test/single"
        for size in (2, 3, 4)
    },
    ("torch.test_horovod_join_allreduce", 1): "wants the rank that joins last to be another than rank 0, the only one",
}
BY_CHANCE = {
    "torch.test_global_barrier_op": "rank 0 sleeps for 5 s, and the others must not begin to wait a moment later",
    "torch.test_process_set_barrier_op": "as test_global_barrier_op",
    **{
        f"torch.test_horovod_{kind}_async_fused": "one of 15 operations must not be done when it is polled at once"
        for kind in ("allreduce", "allgather", "reducescatter")
    },
}
"""Tests that may fail on a good implementation, and what it takes. They get NUM_TRIES."""
NUM_TRIES = 5


def folder() -> Path | None:
    """The checkout with Horovod's tests; None if there is none."""
    for place in (os.environ.get(VARIABLE), cache_folder()):
        if place and all((Path(place) / file).exists() for file in [*FILES.values(), UTILS]):
            return Path(place)
    return None


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "fusedcomm" / f"horovod-{COMMIT[:12]}"


def fetch() -> None:
    """Downloads the tests into the cache folder. Raises OSError if there is no way to the network."""
    for file in [*FILES.values(), UTILS]:
        target = cache_folder() / file
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(URL + file, timeout=30) as answer:
                text = answer.read()
            # A file that is there is whole.
            part = target.with_suffix(f".{os.getpid()}")
            part.write_bytes(text)
            part.replace(target)


@functools.cache
def names() -> list[str]:
    """Each test as "file.test", with a key of FILES for the file. Empty if there are none."""
    root = folder()
    if root is None:
        return []
    found = []
    for key, file in FILES.items():
        for node in ast.parse((root / file).read_text()).body:
            if isinstance(node, ast.ClassDef):
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                found += [f"{key}.{name}" for name in methods if name.startswith("test_")]
    return found


@functools.cache
def _module(key: str) -> types.ModuleType:
    root = folder()
    assert root is not None
    # Packages that the tests use little of; a machine need not have them.
    with contextlib.suppress(ImportError):
        import mock  # noqa: F401
    sys.modules.setdefault("mock", unittest.mock)
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        import pickle

        sys.modules["cloudpickle"] = pickle
    sys.modules["horovod.runner.util.threads"] = types.SimpleNamespace(in_thread=None)  # of helpers not called here
    import fusedcomm.horovod as hvd

    hvd.install()
    path = str(root / FILES[key])
    spec = importlib.util.spec_from_file_location(f"horovods_{key}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _case(key: str, name: str) -> unittest.TestCase:
    for value in vars(_module(key)).values():
        if isinstance(value, type) and issubclass(value, unittest.TestCase) and hasattr(value, name):
            return value(name)
    raise LookupError(f"{FILES[key]} has no {name}")


@contextlib.contextmanager
def _without_new_optimizers() -> Iterator[None]:
    """Some tests make every optimizer of torch with vectors as parameters. Muon is newer and takes matrices only."""
    import torch

    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        yield
        return
    before, muon.__module__ = muon.__module__, "newer"
    try:
        yield
    finally:
        muon.__module__ = before


@contextlib.contextmanager
def _with_sets(world_size: int) -> Iterator[None]:
    """Gives every init the sets of the even and of the odd ranks. Tests of sets add these two later."""
    import fusedcomm.horovod as hvd

    sets = [hvd.ProcessSet(range(first, world_size, 2)) for first in (0, 1)]
    init = hvd.init
    hvd.init = lambda: init(process_sets=sets)
    hvd.add_process_set = lambda ranks: next(each for each in sets if each.ranks == ranks)
    hvd.remove_process_set = lambda process_set: True
    try:
        yield
    finally:
        hvd.init = init
        del hvd.add_process_set, hvd.remove_process_set


def run(rank: int, world_size: int, full_name: str) -> str:
    """Runs one test on this rank. Returns "passed", or "skipped: " and the reason. Raises what the test raises."""
    key, _, name = full_name.partition(".")
    case = _case(key, name)
    before = dict(os.environ)
    # Horovod's launcher sets the first two, and some tests read them before they call init(). test_torch.py sets the
    # others when it is imported.
    os.environ.update(HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(world_size))
    os.environ.update(HOROVOD_TIMELINE="DYNAMIC")
    try:
        with _with_sets(world_size):
            return _outcome(case, name)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _outcome(case: unittest.TestCase, name: str) -> str:
    import fusedcomm.horovod as hvd

    for mark in getattr(getattr(case, name), "pytestmark", []):
        if mark.name == "skip":
            return f"skipped: {mark.kwargs.get('reason', '')}"
    result = unittest.TestResult()
    try:
        with _without_new_optimizers():
            case.run(result)
    finally:
        if hvd.is_initialized():  # files other than test_torch.py leave it so
            hvd.shutdown()
    for _, text in [*result.errors, *result.failures]:
        raise AssertionError(text)
    return f"skipped: {result.skipped[0][1]}" if result.skipped else "passed"
