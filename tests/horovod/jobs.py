"""Jobs for tests of fusedcomm.horovod: what a rank does between init and shutdown, and inputs with exact sums."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from scripts import ROOT

import fusedcomm.horovod as hvd

REDUCED = [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16, torch.bool]


@contextlib.contextmanager
def job(process_sets: Any = None, **environment: str) -> Iterator[None]:
    """Inits with these variables set, and shuts down when every rank has come to the end."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        hvd.init(process_sets=process_sets)
        try:
            yield
            hvd.barrier()
        finally:
            hvd.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(before)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """Small whole numbers, signed, different on each rank: sums of a few are exact in every dtype."""
    numel = torch.Size(shape).numel()
    numbers = (torch.arange(numel) * 7 + 5 * rank * rank + 3 * rank + salt) % 11 - 5
    if dtype is torch.bool:
        return (numbers > 0).reshape(shape)
    if dtype is torch.uint8:
        numbers = numbers.abs()
    return numbers.to(dtype).reshape(shape)


def all_values(size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    """Every rank's values(), of shape (size, *shape)."""
    return torch.stack([values(rank, shape, dtype, salt) for rank in range(size)])


def reduced(tensors: list[torch.Tensor], op: int, before: float = 1.0, after: float = 1.0) -> torch.Tensor:
    """What a reduction gives, with factors before and after it. Whole numbers are truncated after each, and in an
    average."""
    dtype = tensors[0].dtype

    def scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
        return tensor * factor if dtype.is_floating_point else (tensor * factor).trunc()

    every = scaled(torch.stack(tensors).double(), before)
    if op == hvd.Product:
        return every.prod(0).to(dtype)
    if op in (hvd.Min, hvd.Max):
        return (every.amin(0) if op == hvd.Min else every.amax(0)).to(dtype)
    return scaled(every.sum(0), after / len(tensors) if op == hvd.Average else after).to(dtype)


def raised(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The type and text of what the call raises. Fails if it raises nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"{function.__name__} raised nothing")


LAUNCHERS = ("HOROVOD_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC", "FUSEDCOMM_HOROVOD")


def clean_environment(**more: str) -> dict[str, str]:
    """That of a process that no launcher has started."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}
