"""Small results of a device that the host reads later, so that it need not wait for them."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


class HostCopy:
    """A tensor's values on the host. On an accelerator the copy begins now, on the current stream.

    tensor: of any dtype and shape, on any device.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor
        self._arrived: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._arrived = torch.Event(tensor.device)
            self._arrived.record()

    def tolist(self) -> list[Any]:
        """The values. Waits for the device if it has not come to them. On an accelerator the current stream's later
        work is ordered after the copy."""
        if self._arrived is not None:
            self._arrived.wait()
            if not self._arrived.query():
                self._arrived.synchronize()
        return self._values.tolist()


class LateAnswers:
    """For which of several things a device finds something. On an accelerator an answer is read when the next one is
    asked for, a step later."""

    def __init__(self) -> None:
        self._asked: tuple[HostCopy, Sequence[Any]] | None = None

    def where(self, is_found: torch.Tensor, things: Sequence[_T]) -> list[_T]:
        """Those of `things` for which `is_found` (bool, [number of things]) is true; on an accelerator, what the call
        before this one asked for."""
        asked: tuple[HostCopy, Sequence[Any]] = HostCopy(is_found), things
        before: tuple[HostCopy, Sequence[Any]] | None
        if is_found.device.type == "cpu":
            before = asked
        else:
            before, self._asked = self._asked, asked
        return (
            [] if before is None else [each for each, found in zip(before[1], before[0].tolist(), strict=True) if found]
        )
