"""Weights of ranks in the means of a DistributedOptimizer, around the average of gradients.

Gradients are multiplied by w / unit before they are added to others, and their average is multiplied by
unit / (average of w), which travels in an operation of 32 bytes. The unit is the average weight of the first step, so
that a wire of 16 bits carries gradients of the usual size.
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
        name: of the operation.
    """

    def __init__(self, of_sums: bool, name: str, process_set: ProcessSet) -> None:
        self._of_sums, self._name, self._process_set = of_sums, name, process_set
        self.value: float | None = None
        self._invalid = ""
        self.passes = AddedPasses(lambda: self)
        self._begin()

    def _begin(self) -> None:
        self._world = world()
        self._unit: float | None = None  # until a step has had a weight
        self._noted = 0.0
        self._scales: set[float] = set()  # of the step's passes
        self._average: int | None = None  # the operation's handle

    def set(self, value: Any) -> None:
        """Takes what the user gives. TypeError if it is neither a number nor a tensor."""
        self.value, self._invalid = checked(value)

    @property
    def has_noted(self) -> bool:
        """See :class:`AddedPasses`."""
        return bool(self._scales)

    def forget_passes(self) -> None:
        """See :class:`AddedPasses`."""
        self._noted = 0.0
        self._scales.clear()

    def _enter_world(self) -> None:
        """Begins anew where the ranks have changed: those that are new know no unit."""
        if self._world is not world():
            self._begin()

    def note_pass(self) -> float:
        """See :class:`AddedPasses`. What multiplies the gradients of this pass."""
        self._enter_world()
        weight = 0.0 if self.value is None or self._invalid else self.value
        self._noted += weight
        scale = weight and (1.0 if self._of_sums else weight) / (self._unit or 1.0)
        self._scales.add(scale)
        return scale

    def scale_of_step(self, parameter: str) -> float:
        """What multiplies the gradients of a parameter that the passes of this step did not know."""
        if len(self._scales) > 1:
            raise RuntimeError(
                f"fusedcomm: {parameter} was thawed or added after optimizer.weight was set, and the passes of the "
                "step have several weights: set optimizer.weight afterwards, on every rank"
            )
        return next(iter(self._scales), 1.0)

    def send(self) -> None:
        """Sends the weight of the step, if that has not been done. Call it before the step's first gradients."""
        self._enter_world()
        if self._average is not None:
            return
        self.passes.forget_dropped()
        mark = 0.5 ** min(self._process_set.rank() or 0, _MAX_MARKED)
        is_missing = self.value is None
        marks = [mark * is_missing, mark * bool(self._invalid)]
        values = torch.tensor([self._noted, *marks, 0.0], dtype=torch.float64)
        self._average = async_ops.allreduce_async_(
            values, op=Average, name=f"{self._name}.weights", process_set=self._process_set
        )

    def factor(self, is_alone: bool) -> float:
        """What multiplies the step's averages. Waits. RuntimeError on every rank if one has given no weight."""
        if is_alone:
            self.passes.forget_dropped()
        else:
            self.send()  # nothing else may have been sent
        noted = self._noted
        self.forget_passes()
        if is_alone:
            values = [noted, float(self.value is None), float(bool(self._invalid))]
        else:
            handle, self._average = self._average, None
            assert handle is not None
            values = synchronize(handle).tolist()
        size = 1 if is_alone else self._process_set.size() or 1
        for problem, what in ((values[1], "has not set optimizer.weight"), (values[2], "has set what is no weight")):
            if problem:
                rank = max(0, math.ceil(-math.log2(problem * size) - 1e-9))
                own = f" ({self._invalid})" if self._invalid else ""
                raise RuntimeError(
                    f"fusedcomm: rank {rank} {what}{own}. Give optimizer.weight a finite number, 0 or more, on every "
                    "rank, before the backward pass that it is for"
                )
        average, unit = values[0], self._unit or 1.0
        if average == 0:
            return 0.0
        self._unit = self._unit or average
        return unit / average
