"""The all-reduce that follows in HSDP, and that is all of replicate(): over the ranks that have the same shards.

torch calls dist.all_reduce itself. It looks at the tensor's type first, so a subclass can take the call over.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.native import _C
from fusedcomm.session.session import Session


class Reduced(torch.Tensor):
    """Memory for gradients whose all-reduce goes to `taker`. Every other operation sees a plain tensor."""

    taker: Callable[[torch.Tensor, Any], None] | None

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        if func is dist.all_reduce and isinstance(tensor, Reduced) and tensor.taker is not None:
            op = kwargs.get("op", args[1] if len(args) > 1 else dist.ReduceOp.SUM)
            tensor.taker(plain(tensor), op)
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as torch.Tensor, in the same memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def reduced(memory: torch.Tensor, taker: Callable[[torch.Tensor, Any], None]) -> Reduced:
    """`memory` as a tensor whose all-reduce goes to `taker`."""
    tensor = memory.as_subclass(Reduced)
    tensor.taker = taker
    return tensor


class ReplicaSums:
    """Sums gradients over the ranks with the same shards, in the wires of their parameters."""

    def __init__(self, session: Session, wires: dict[str, int]) -> None:
        self.session, self._wires = session, wires
        session.synchronizer.choose_wires(lambda name, num_dims: wires[name])
        self._sum = _C.FusedSum(session.synchronizer)
        self._weighed_task = -1  # the backward pass that has its weights

    def wire_of(self, name: str, parameter: torch.Tensor) -> int:
        """The number of a parameter's wire."""
        return self._wires[name]

    def weigh_as(self, rows: "_C.PassWeights | None") -> None:
        """Gives this sum the weights that the reduce-scatter has added up, at the beginning of a pass."""
        own, task = self.session.weights, torch._C._current_graph_task_id()
        # A pass may not have ended for the engine: a module's gradients can come after those of the last one.
        begins = not own.in_pass if task == -1 else task != self._weighed_task
        if rows is not None and begins:
            self._weighed_task = task
            own.follow(rows)

    def all_reduce(
        self, tensor: torch.Tensor, row: list[tuple[str, int]], factor: float, is_last: bool
    ) -> torch.futures.Future | None:
        """Replaces `tensor`, which has the gradients of `row`, one after another, by the sum × factor, when the future
        is done; None: there is nothing to sum.

        Args:
            row: names and numels.
            is_last: whether no other module's all-reduce follows in the backward pass.
        """
        names, parts, begin = [], [], 0
        for name, numel in row:
            if numel:
                names.append(name)
                parts.append(tensor.narrow(0, begin, numel))
            begin += numel
        if not names:
            return None
        factor *= self.session.world_size
        return self._sum.run(names=names, tensors=parts, factor=factor, ends_step=is_last)
