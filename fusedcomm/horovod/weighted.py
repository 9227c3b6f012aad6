"""Weights of ranks in the means of a DistributedOptimizer, around the average of gradients.

Gradients are multiplied by w / unit before they are sent, and their average is multiplied by unit / (average of w),
which is one more average of the step. The unit is the average weight of the first step, so that a wire of 16 bits
carries gradients of the usual size.
"""

import math
from typing import Any

import torch

import fusedcomm.horovod.async_ops as async_ops
from fusedcomm.horovod.checks import Average
from fusedcomm.horovod.handles import synchronize
from fusedcomm.horovod.process_sets import ProcessSet
from fusedcomm.horovod.world import world
from fusedcomm.session.weights import AddedPasses, checked

_MAX_MARKED = 1000


class OptimizerWeight:
    """The weight of this rank.

    Args:
        of_sums: whether losses are sums, so that gradients have the weight already.
        name: of the average of weights.
    """

    def __init__(self, of_sums: bool, name: str, process_set: ProcessSet) -> None:
        self.of_sums, self._name, self._process_set = of_sums, name, process_set
        self.value: float | None = None
        self._invalid = ""
        self.passes = AddedPasses(lambda: self)
        self._begin()

    def _begin(self) -> None:
        self._world = world()
        self._unit: float | None = None  # until a step has had a weight
        self._noted, self.has_noted = 0.0, False
        self._average: int | None = None  # the operation's handle

    def set(self, value: Any) -> None:
        """Takes what the user gives. TypeError if it is neither a number nor a tensor."""
        self.value, self._invalid = checked(value)

    def forget_passes(self) -> None:
        """See :class:`fusedcomm.session.weights.Noting`."""
        self._noted, self.has_noted = 0.0, False

    def note_pass(self) -> bool:
        """See :class:`fusedcomm.session.weights.Noting`."""
        if self._world is not world():
            self._begin()  # ranks that are new know no unit
        weight = 0.0 if self.value is None or self._invalid else self.value
        self._noted += weight
        self.has_noted = True
        return weight != 0

    def send(self) -> None:
        """Sends the weight of the step, if that has not been done. Call it before the step's first gradients."""
        if self._world is not world():
            self._begin()
        if self._average is not None:
            return
        self.passes.forget_dropped()
        is_bad = self.value is None or bool(self._invalid)
        mark = 0.5 ** min(self._process_set.rank() or 0, _MAX_MARKED) if is_bad else 0.0
        values = torch.tensor([math.nan if is_bad else self._noted, mark], dtype=torch.float64)
        self._average = async_ops.allreduce_async_(
            values, op=Average, name=f"{self._name}.weights", process_set=self._process_set
        )

    @torch.no_grad()
    def apply_to(self, gradient: torch.Tensor) -> None:
        """Multiplies a gradient that is sent. Call it after send()."""
        if self._noted == 0:
            gradient.zero_()  # also what is not finite
        else:
            gradient.mul_((1.0 if self.of_sums else self._noted) / (self._unit or 1.0))

    def factor(self, is_alone: bool) -> float:
        """What multiplies the step's averages. Waits. RuntimeError on every rank if one has given no weight."""
        if is_alone:
            self.passes.forget_dropped()
            values = [math.nan if self.value is None or self._invalid else self._noted, 1.0]
        else:
            self.send()  # nothing else may have been sent
            handle, self._average = self._average, None
            assert handle is not None
            values = synchronize(handle).tolist()
        noted = self._noted
        self.forget_passes()
        average, mark = values
        if math.isnan(average):
            size = 1 if is_alone else self._process_set.size() or 1
            rank = max(0, math.ceil(-math.log2(mark * size) - 1e-9))
            own = f" ({self._invalid})" if self._invalid else ""
            raise RuntimeError(
                f"fusedcomm: rank {rank} has no weight in this step: it has set no optimizer.weight, or what is none"
                f"{own}. Give optimizer.weight a finite number, 0 or more, on every rank, before the backward pass "
                "that it is for"
            )
        if average == 0:
            return 0.0
        if is_alone:
            return 1 / noted if self.of_sums else 1.0
        unit, self._unit = self._unit or 1.0, self._unit or average
        return unit / average
