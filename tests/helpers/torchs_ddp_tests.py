"""torch's own tests of DistributedDataParallel, with another class in its place, on CPUs.

Most of them want a GPU for each rank, but compute nothing that only a GPU can: their text is changed before it runs.
torch's module is not imported as it is, because it decides at import which tests the machine can run.
"""

import ast
import contextlib
import functools
import os
import re
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

PATH = Path(torch.__file__).parent / "testing" / "_internal" / "distributed" / "distributed_test.py"
WRAPPER = "DistributedDataParallel"

_CALL = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"  # with parentheses in it, two levels deep
_ON_CPU = [
    (r"(?m)^ *@(skip_if_lt_x_gpu|skip_if_no_gpu)\b.*\n", ""),
    (rf"\.cuda{_CALL}", ""),
    (rf"torch\.cuda\.(set_device|synchronize|manual_seed){_CALL}", "None"),
    (r"torch\.cuda\.current_device\(\)", '"cpu"'),
    (r"\bdevice_ids=(\[[^\[\]]*\]|[\w.]+)", "device_ids=None"),
    (rf"\boutput_device=[\w.]+(?:{_CALL})?", "output_device=None"),
    (r"\bdevice=(self\.rank|rank|self\.device|torch\.device\(rank\)|\"cuda\")", 'device="cpu"'),
    (r"\.to\((self\.rank|rank|device)\)", '.to("cpu")'),
    (r"(?m)^( *)(device|device_id) = (self\.rank|rank|torch\.device\(.*\))$", r'\1\2 = "cpu"'),
    # Once torch wraps a wrapper, where it means a copy.
    (rf"(model_static_graph = torch\.nn\.parallel\.{WRAPPER}\(\n +)model,", r"\1model_static_graph,"),
    # test_ddp_uneven_inputs also runs without a communication hook.
    (r"if test_case\.hook is not None:", "if False:"),
    # Its images of a million points are smaller on a CPU.
    (r"torch\.ones\(batch, batch, dim, dim,", "torch.ones(batch, batch, 20, 20,"),
]


def text_on_cpu() -> str:
    """The text of torch's tests, changed so that they run on CPUs."""
    text = PATH.read_text()
    for pattern, replacement in _ON_CPU:
        text, count = re.subn(pattern, replacement, text)
        assert count, f"torch's tests have changed: they do not have {pattern}"
    return text


@functools.cache
def names() -> list[str]:
    """torch's tests that use DDP, by themselves or through the helpers that they call, or have ddp in their names."""
    text = PATH.read_text()
    lines = text.splitlines()
    (outer,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == "DistributedTest"]
    functions = [node for node in outer.body[0].body if isinstance(node, ast.FunctionDef)]
    methods = {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in functions}
    using = {name for name, source in methods.items() if WRAPPER in source}
    while True:
        more = {name for name, source in methods.items() if any(f"self.{other}(" in source for other in using)}
        if more <= using:
            break
        using |= more
    return [name for name in methods if name.startswith("test") and (name in using or "ddp" in name.lower())]


def stand_in_for_expecttest() -> None:
    """torch's test helpers import expecttest for tests of text."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase


def _module(world_size: int) -> types.ModuleType:
    """The module of torch's tests. It reads the environment when it is made."""
    os.environ.update(WORLD_SIZE=str(world_size), BACKEND="gloo", TEMP_DIR="/tmp", INIT_METHOD="env://")
    stand_in_for_expecttest()
    name = f"torchs_ddp_tests_of_{world_size}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        sys.modules[name] = module  # dataclasses look their module up
        exec(compile(text_on_cpu(), str(PATH), "exec"), module.__dict__)
    return sys.modules[name]


@contextlib.contextmanager
def _in_place_of_ddp(module: types.ModuleType, wrapper: type) -> Iterator[None]:
    before = torch.nn.parallel.DistributedDataParallel
    module.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel = wrapper
    try:
        yield
    finally:
        module.DistributedDataParallel = torch.nn.parallel.DistributedDataParallel = before


def run(rank: int, world_size: int, name: str, make_wrapper) -> str:
    """Runs one test on this rank with the class that `make_wrapper()` returns. Returns "passed" or why it was skipped.
    Raises what the test raises."""
    module = _module(world_size)

    from torch.testing._internal.common_utils import TestCase

    class Case(module.DistributedTest._DistTestBase, TestCase):
        pass

    Case.rank, Case.world_size, Case.file_name = rank, world_size, os.devnull
    Case._barrier = lambda self, *args, **kwargs: dist.barrier()
    case = Case(name)
    try:
        with _in_place_of_ddp(module, make_wrapper()):
            getattr(case, name)()
    except unittest.SkipTest as reason:
        return f"skipped: {reason}"
    finally:
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
        dist.set_debug_level_from_env()
    return "passed"
