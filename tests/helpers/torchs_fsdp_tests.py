"""torch's own tests of FSDP2, on CPUs over gloo: as they come, and with fusedcomm attached to every model.

What a test needs that is not here, a GPU or another version of torch, is seen where it runs as it comes: if it fails
so, it is skipped with that error as the reason.

They are not part of this repository, nor of torch's wheel. FUSEDCOMM_TORCHS_FSDP_TESTS names a checkout of PyTorch. The
tests want a GPU for each rank, but few compute what only a GPU can: their text is changed before it runs.
"""

import ast
import contextlib
import functools
import os
import re
import sys
import types
import unittest
import unittest.mock
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torchs_ddp_tests import stand_in_for_expecttest

VARIABLE = "FUSEDCOMM_TORCHS_FSDP_TESTS"
FOLDER = "test/distributed/_composable/fsdp"

NOT_ABOUT_GRADIENTS = {
    "test_fully_shard_compile": "compiles with inductor for GPUs",
    "test_fully_shard_memory": "measures the memory of a GPU",
    "test_fully_shard_logging": "starts a program that needs a GPU",
}
"""Files that are left out, and why."""

LOST = {
    "test_manual_reshard_with_reshard_after_forward_false": "counts reduce-scatters of c10d, and the fp32 wire is an "
    "exchange of fusedcomm's own",
}
"""Tests that pass with torch's own reduce-scatter and cannot pass with another, and why."""

LOST_ON_4 = {
    "test_compute_dtype": "adds in 16 bits to have the numbers to compare with, where fusedcomm adds in 32: of two "
    "ranks that is the same, of four it is not",
}
"""The same, but only on four ranks."""

_ON_CPU = [
    (r"(?m)^ *@(skip_if_lt_x_gpu|requires_nccl_version|requires_multicast_support)\b.*\n", ""),
    (r"(?m)^ *@unittest\.skipIf\(not TEST_(CUDA|XPU)\b.*\n", ""),
    (r"\.cuda\(\)", ""),
    (r"torch\.cuda\.", "torch.cpu."),
    (r"torch\.accelerator\.", "torch.cpu."),
    (r"([\"'])cuda(:0)?\1", r"\1cpu\1"),
    (r"device_ids=\[self\.rank\]", "device_ids=None"),
]


def folder() -> Path | None:
    """The folder with torch's tests; None if there is none."""
    place = os.environ.get(VARIABLE)
    return Path(place) / FOLDER if place and (Path(place) / FOLDER).is_dir() else None


@functools.cache
def names() -> list[str]:
    """Each test as "file.Class.test". Empty if there are none."""
    root = folder()
    found = []
    for path in sorted(root.glob("test_*.py")) if root is not None else ():
        if path.stem in NOT_ABOUT_GRADIENTS:
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                found += [f"{path.stem}.{node.name}.{name}" for name in methods if name.startswith("test_")]
    return found


def _base() -> type:
    """What torch's tests derive from: here every rank is a process that is there already."""
    from torch.testing._internal import common_fsdp
    from torch.testing._internal.common_utils import TestCase

    class OnRanks(getattr(common_fsdp, "FSDPTestMixin", common_fsdp.FSDPTest), TestCase):
        rank = property(lambda self: dist.get_rank())
        process_group = property(lambda self: dist.group.WORLD)

        def setUp(self) -> None:
            TestCase.setUp(self)
            self.perThreadSetUp()

        def perThreadSetUp(self) -> None:
            pass

        def run(self, result: unittest.TestResult | None = None) -> None:
            unittest.TestCase.run(self, result)

    return OnRanks


@functools.cache
def _module(stem: str) -> types.ModuleType:
    stand_in_for_expecttest()
    from torch.testing._internal import common_fsdp

    root = folder()
    assert root is not None
    text = (root / f"{stem}.py").read_text()
    for pattern, replacement in _ON_CPU:
        text = re.sub(pattern, replacement, text)
    module = types.ModuleType(f"torchs_{stem}")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    bases = {name: _base() for name in ("FSDPTest", "FSDPTestMultiThread", "FSDPTestContinuous")}
    with unittest.mock.patch.multiple(common_fsdp, create=True, **bases):
        exec(compile(text, f"torch's {stem}.py", "exec"), module.__dict__)
    return module


@contextlib.contextmanager
def _attached_to_all(said: set[str]) -> Iterator[None]:
    """Attaches fp32 to each model when its first forward pass has made its parameter groups ready.

    said: gets "attached", and what attach() says where it refuses.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    import fusedcomm

    handles = []
    lazy_init = FSDPState._lazy_init

    def attach_too(state: FSDPState) -> None:
        is_first = state._is_root is None
        lazy_init(state)
        if is_first and state._is_root:
            try:
                handles.append(fusedcomm.attach(state._modules[0], "fp32", quiet=True))
                said.add("attached")
            except (ValueError, TypeError) as refusal:
                said.add(str(refusal))

    FSDPState._lazy_init = attach_too
    try:
        yield
    finally:
        FSDPState._lazy_init = lazy_init
        for handle in handles:
            handle.detach()


def run(rank: int, world_size: int, full_name: str, is_attached: bool) -> tuple[str, set[str]]:
    """Runs one test on this rank. Returns its outcome, "passed", "skipped: " with a reason, or "failed: " with the
    error, and what attach() said."""
    stem, kind, name = full_name.split(".")
    said: set[str] = set()
    result = unittest.TestResult()
    attached = _attached_to_all(said) if is_attached else contextlib.nullcontext()
    with unittest.mock.patch("torch.cpu.device_count", lambda: world_size), attached:
        cls = getattr(_module(stem), kind)
        case = type(kind, (cls,), {"world_size": property(lambda self: world_size)})(name)
        case.run(result)
    # Failures first: where a part of a test fails on some ranks alone, others wait in vain and raise.
    for _, text in [*result.failures, *result.errors]:
        return f"failed: {text}", said
    return (f"skipped: {result.skipped[0][1]}" if result.skipped else "passed"), said


def shortened(outcome: str) -> str:
    """An outcome of one line: of a failure, the line with the error's class."""
    errors = re.findall(r"(?m)^\w[\w.]*(?:Error|Exception|Interrupt|Exit): .*|^its process ended|^no answer.*", outcome)
    return f"failed: {errors[-1]}" if errors else outcome.partition("\n")[0]
