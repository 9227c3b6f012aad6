"""How a merge changes the merged state and the parameters."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from fusedcomm.local_steps.fragments import Fragment

OuterMaker: TypeAlias = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
"""Makes an outer optimizer of the merged state's tensors, which are fp32."""

MOMENTUM = 0.9
RATES = ((10, 0.2), (30, 0.4), (100, 0.7))
"""(steps from merge to merge, outer learning rate with momentum). A rate that is right for one number of steps loses at
another: 0.4 at 30 and 0.7 at 100 are from the literature, what is below is more careful."""
RATE_OF_TWO = 0.4
"""The most for two ranks, whose mean is noisier."""


def outer_rate(every: int, num_ranks: int) -> float:
    """The outer learning rate where none is given: between the RATES by the logarithm of `every`."""
    steps, rates = [math.log(each) for each, _ in RATES], [rate for _, rate in RATES]
    at = min(max(math.log(every), steps[0]), steps[-1])
    above = next(index for index in range(1, len(steps)) if at <= steps[index])
    share = (at - steps[above - 1]) / (steps[above] - steps[above - 1])
    rate = rates[above - 1] + share * (rates[above] - rates[above - 1])
    return round(min(rate, RATE_OF_TWO) if num_ranks <= 2 else rate, 3)


class Outer:
    """The outer optimizer: it steps the merged state against the mean difference of the ranks.

    Args:
        make: None: SGD with Nesterov's momentum, and the learning rate of outer_rate().
        every: steps from merge to merge; a time only where `make` is given.

    Raises TypeError if `make` makes no optimizer, and ValueError if it does not hold every tensor that it was given.
    """

    def __init__(
        self, fragments: Sequence[Fragment], make: OuterMaker | None, every: int | str, num_ranks: int
    ) -> None:
        # They share the merged state's memory.
        self._of = [[torch.nn.Parameter(view) for view in each.views(each.anchor)] for each in fragments]
        everything = [parameter for of in self._of for parameter in of]
        if make is None:
            assert not isinstance(every, str)
            rate = outer_rate(every, num_ranks)
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(everything, rate, MOMENTUM, nesterov=True)
        else:
            possible = "use a function, lambda parameters: torch.optim.SGD(parameters, lr=0.4)"
            if not callable(make):
                raise TypeError(f"outer={type(make).__name__}(…) is an object: {possible}")
            self.optimizer = make(everything)
            if not isinstance(self.optimizer, torch.optim.Optimizer):
                raise TypeError(f"outer=… returned a {type(self.optimizer).__name__}: {possible}")
            held = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
            if any(id(parameter) not in held for parameter in everything):
                raise ValueError("outer=… made an optimizer that does not hold all the parameters that it was given")

    def step(self, fragment: Fragment, difference: torch.Tensor) -> None:
        """Moves the merged state of a fragment. difference: fp32 [numel], the mean of the ranks."""
        for parameter, view in zip(self._of[fragment.index], fragment.views(-difference), strict=True):
            parameter.grad = view
        self.optimizer.step()
        for parameter in self._of[fragment.index]:
            parameter.grad = None

    def record(self) -> dict[str, object]:
        """What ranks compare: the class and its options."""
        groups = [
            {key: repr(value) for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups
        ]
        return {"class": type(self.optimizer).__name__, "groups": groups}

    @property
    def nbytes(self) -> int:
        """Bytes of its state; before the first step those of one value for each element, which momentum takes."""
        tensors = [
            value for state in self.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
        if not tensors:
            return 4 * sum(parameter.numel() for of in self._of for parameter in of)
        return sum(tensor.nbytes for tensor in tensors)


def move(fragment: Fragment, mean: torch.Tensor, outer: Outer | None) -> torch.Tensor:
    """Moves the merged state by the ranks' mean difference. Returns how far each element has moved, fp32 [numel].

    Args:
        mean: fp32 [numel].
        outer: None: the merged state becomes the mean of the ranks' parameters.
    """
    if outer is None:
        fragment.anchor.add_(mean)
        return mean
    before = fragment.anchor.clone()
    outer.step(fragment, mean)
    return fragment.anchor - before


def corrected(now: torch.Tensor, moved: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The parameters after a merge, for this rank: z + (m̄ − y). Writes to `now` and `own`.

    Args:
        now: the parameters z, which have gone on since the snapshot y.
        moved: m̄ less the merged state before.
        own: y less the merged state before: so z + (moved − own) is z + (m̄ − y).
    """
    return now.add_(torch.sub(moved, own, out=own))  # new memory takes as long as the sums
