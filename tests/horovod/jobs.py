"""Jobs for tests of fusedcomm.horovod: what a rank does between init and shutdown, and inputs with exact sums."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

import fusedcomm.horovod as hvd

REDUCED = [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
MOVED = [*REDUCED, torch.uint8, torch.int8, torch.int16, torch.bool]
SHAPES = [(1,), (), (17,), (5, 3), (2, 3, 4), (0, 3)]


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


def raised(function: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The type and text of what the call raises. Fails if it raises nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"{function.__name__} raised nothing")
