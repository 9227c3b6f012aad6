"""What torch and trainers touch of a DistributedDataParallel beyond its module, on a DataParallel."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from fusedcomm.reducer.reducer import GradReducer


class DdpReducer:
    """``model.reducer``: what pipelines and trainers call on DDP's Reducer to prepare a backward pass."""

    def __init__(self, comm: GradReducer) -> None:
        self._comm = comm

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """The next backward pass synchronizes gradients. `outputs`: DDP looks for unused parameters from there."""
        self._comm.prepare()

    def _rebuild_buckets(self) -> bool:
        """Whether buckets were cut again: never here: the backward pass does it."""
        return False


def refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """A method of DDP that raises RuntimeError with the reason."""

    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"fusedcomm.DataParallel has no {name}: {instead}")

    method.__name__, method.__doc__ = name, f"Refused: {instead}."
    return method
