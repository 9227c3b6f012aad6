"""Results compared with exact sums of the same gradients, one module at a time."""

import collections

import torch
import torch.distributed as dist

from fusedcomm.session.stats import Verified

_MOST_KEPT = 256


class Verifier:
    """Says when a module's sum is also made exactly, and keeps the errors.

    Args:
        every: calls of a module from one verification to the next, of which each is of another module; 0: never.
        num_modules: that take turns.
        groups: the ranks whose elements together are the module's.
    """

    def __init__(self, every: int, num_modules: int, groups: list[dist.ProcessGroup]) -> None:
        self._every, self._num_modules, self._groups = every, num_modules, groups
        self._kept: collections.deque[Verified] = collections.deque(maxlen=_MOST_KEPT)

    def is_due(self, index: int, call: int) -> bool:
        """index: of the module. call: how many it has had before. The same on every rank."""
        return self._every > 0 and call % self._every == 0 and call // self._every % self._num_modules == index

    def add(self, call: int, module: str, result: torch.Tensor, exact: torch.Tensor) -> None:
        """Compares this rank's part of a result with the exact one. A collective call."""
        exact = exact.double()
        squares = torch.stack([(result.double() - exact).square().sum(), exact.square().sum()])
        for group in self._groups:
            dist.all_reduce(squares, group=group)
        error, whole = squares.sqrt().tolist()
        relative = 0.0 if error == 0 else error / whole if whole else float("inf")
        self._kept.append(Verified(call, module or "(model)", relative))

    @property
    def kept(self) -> tuple[Verified, ...]:
        """The latest, oldest first; at most 256."""
        return tuple(self._kept)
