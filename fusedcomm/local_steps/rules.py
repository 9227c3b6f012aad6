"""How a merge changes the merged state and the parameters."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from fusedcomm.local_steps.fragments import Fragment
from fusedcomm.local_steps.messages import Messages
from fusedcomm.local_steps.shards import local, set_gradient

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

    Raises TypeError if `make` makes no optimizer, and ValueError if it does not hold every tensor that it was given.
    """

    def __init__(self, fragments: Sequence[Fragment], make: OuterMaker | None, every: int, num_ranks: int) -> None:
        # They share the merged state's memory.
        self._of = [[torch.nn.Parameter(view) for view in each.views(each.anchor)] for each in fragments]
        everything = [parameter for of in self._of for parameter in of]
        if make is None:
            rate = outer_rate(every, num_ranks)
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(everything, rate, MOMENTUM, nesterov=True)
        else:
            if not callable(make):
                raise TypeError(
                    f"outer={type(make).__name__}(…) is an object, which cannot step the merged state: give a function "
                    f"that makes it of a list of parameters, lambda parameters: torch.optim.SGD(parameters, lr=0.4)"
                )
            self.optimizer = make(everything)
            if not isinstance(self.optimizer, torch.optim.Optimizer):
                raise TypeError(
                    f"outer=… returned a {type(self.optimizer).__name__}: give a function that makes a torch.optim."
                    "Optimizer of a list of parameters, lambda parameters: torch.optim.SGD(parameters, lr=0.4)"
                )
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


def move(fragment: Fragment, group: int, mean: torch.Tensor, outer: Outer | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves the merged state by the ranks' mean difference. Returns a message's elements of the merged state now, and
    how far each has moved.

    Args:
        mean: fp32, a message's elements.
        outer: None: the merged state becomes the mean of the ranks' parameters.
    """
    before = fragment.gather(fragment.anchor, group)
    if outer is None:
        now = before + mean
        fragment.scatter(now, fragment.anchor, group)
        return now, mean
    before = before.clone()
    outer.step(fragment, mean)
    now = fragment.gather(fragment.anchor, group)
    return now, now - before


def merged(
    now: torch.Tensor, merged_state: torch.Tensor, moved: torch.Tensor, own: torch.Tensor, alpha: float | None
) -> torch.Tensor:
    """The parameters after a merge, for this rank. The corrected rule writes to `now` and `own`.

    Args:
        now: the parameters z, which have gone on since the snapshot y.
        merged_state: m̄.
        moved: m̄ less the merged state before.
        own: y less the merged state before: so z + (moved − own) is z + (m̄ − y).
        alpha: the local parameters' share in a blend; None: corrected.
    """
    if alpha is None:
        return now.add_(torch.sub(moved, own, out=own))  # new memory takes as long as the sums
    return alpha * now + (1 - alpha) * merged_state


def average_state(optimizer: torch.optim.Optimizer, fragment: Fragment, messages: Messages) -> None:
    """Replaces the optimizer's state of a fragment, what has its parameters' shapes, by means over the ranks; waits.

    Raises ValueError if the optimizer has no state, or keeps it elsewhere.
    """
    if not any(optimizer.state.values()):
        raise ValueError(
            f"fusedcomm: state='average' averages what {type(optimizer).__name__}.state has, and it is empty: SGD "
            "without momentum has none, and optimizers that divide their state over ranks keep it elsewhere. Use "
            "state='local'"
        )
    found = {
        f"{key} of {each.name}": local(value)
        for each in fragment.merged
        for key, value in sorted(optimizer.state.get(each.target, {}).items())
        if torch.is_tensor(value) and value.is_floating_point() and local(value).shape == each.local.shape
    }
    copies = {name: value.to(torch.float32, copy=True).contiguous() for name, value in found.items()}
    messages.mean_of(copies)
    for name, value in found.items():
        value.copy_(copies[name])


def move_state(optimizer: torch.optim.Optimizer, moves: Sequence[str], fragment: Fragment, by: torch.Tensor) -> None:
    """Moves optimizer state that lies where the parameters lie, by fp32 [numel]. Raises ValueError if there is none."""
    for each, view in zip(fragment.merged, fragment.views(by), strict=True):
        for key in moves:
            value = optimizer.state.get(each.target, {}).get(key)
            value = local(value) if torch.is_tensor(value) else None
            if value is None or value.shape != view.shape:
                raise ValueError(
                    f"fusedcomm: moves={tuple(moves)!r}, and the optimizer's state of {each.name} has no {key!r} of "
                    f"its shape: it has {sorted(optimizer.state.get(each.target, {}))}"
                )
            value.add_(view)


def average_gradients(fragment: Fragment, messages: Messages) -> None:
    """Replaces the gradients of a fragment by their means over the ranks, exactly; waits."""
    flat = torch.zeros_like(fragment.anchor)
    for each, view in zip(fragment.merged, fragment.views(flat), strict=True):
        if each.target.grad is not None:
            view.copy_(local(each.target.grad))
    messages.mean_of({f"gradients of fragment {fragment.index}": flat})
    for each, view in zip(fragment.merged, fragment.views(flat), strict=True):
        set_gradient(each.target, view)
