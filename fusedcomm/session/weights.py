"""Weights of ranks in the mean: what ``comm.weight`` takes, and passes that add up gradients before they are sent."""

import math
import numbers
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from fusedcomm.config import combinations
from fusedcomm.native import _C
from fusedcomm.ranks.peers import warn_alone

ADDED_MEANS = combinations.text("every front end", {"weighted": "mean", combinations.ADDED_PASSES: True})


def checked(value: object) -> tuple[float, str]:
    """(`value` as a number, why it is no weight). The text is empty if it is one.

    Raises TypeError if `value` is neither a number nor a tensor.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return math.nan, f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"fusedcomm: weight={value!r} is not possible: use a number or a tensor with one element")
    number = float(value)
    return number, "" if math.isfinite(number) and number >= 0 else repr(value)


def give(weights: "_C.PassWeights", value: object) -> float:
    """Gives this rank's weight to the engine, and returns it as a number.

    A number that is no weight is an error of every rank in the next backward pass, which names this rank; a warning
    names the value. Raises TypeError as checked().
    """
    number, problem = checked(value)
    next_pass = "The next pass is an error on every rank"
    if problem:
        weights.set_invalid()
        warn_alone(
            f"fusedcomm: comm.weight={problem} is no weight: use a finite number, 0 or more. {next_pass}", stacklevel=4
        )
    elif weights.set(number):
        warn_alone(
            f"fusedcomm: comm.weight={value!r} was set within a backward pass that had the weight from before: its "
            f"first bucket had left, or its gradients are added to others. {next_pass}",
            stacklevel=4,
        )
    return number


class Noting(Protocol):
    """What is told of backward passes, as _C.PassWeights is."""

    def note_pass(self) -> bool:
        """Adds the weight of a pass to those before it. Returns whether it has one."""

    @property
    def has_noted(self) -> bool:
        """Whether passes were noted since the last sum."""

    def forget_passes(self) -> None:
        """Forgets these passes: their gradients are gone."""


class AddedPasses:
    """Tells weights of every backward pass, where the gradients of several passes add up before they are sent.

    It has a hook at every parameter, so it is made when the first pass that only adds up is announced. The gradients of
    a pass of weight 0 become zeros before they are added.

    A pass counts as long as a gradient is kept. Users drop gradients in many ways, which call nothing here: the
    gradients themselves tell, None or zeros.

    Args:
        weights: returns what is told now. What it returned before may have been replaced.
    """

    def __init__(self, weights: Callable[[], Noting]) -> None:
        self._weights = weights
        # Parameter and hook, by the parameter's id.
        self._hooks: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}
        self._is_noted, self._counts, self._task = False, True, -1
        self._added_to: dict[int, torch.Tensor] = {}  # the parameters that noted passes have reached, by id

    def announce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Call before a pass: the parameters that require gradients are noted from now on."""
        self._is_noted = False  # a pass that failed has not ended
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                # Unlike a hook of the tensor, one of its node is not called by torch.autograd.grad().
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                hook = node.register_prehook(_hook_of(weakref.ref(self), id(parameter)))
                self._hooks[id(parameter)] = parameter, hook

    def remove(self) -> None:
        """Removes the hooks."""
        for _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def forget_dropped(self) -> None:
        """Between passes: forgets those whose gradients have been dropped since."""
        if not self._is_noted and self._weights().has_noted and not _any_left(self._added_to.values()):
            self._weights().forget_passes()
            self._added_to.clear()

    def _before_adding(self, key: int) -> bool:
        """Whether the gradient is added."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end)
        if not self._is_noted:
            self.forget_dropped()
            self._is_noted = True
            self._counts = self._weights().note_pass()
        self._added_to[key] = self._hooks[key][0]
        return self._counts

    def _at_end(self) -> None:
        # Within a node this is the end of a pass that a reentrant checkpoint has begun. The outer one goes on.
        if torch._C._current_autograd_node() is None:
            self._is_noted = False


def _any_left(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a gradient of these is there and not zero. As a rule one that is small tells."""
    for each in sorted(parameters, key=torch.numel):
        if each.requires_grad and each.grad is not None:
            found = each.grad._values() if each.grad.is_sparse else each.grad
            if found.any():
                return True
    return False


def _hook_of(passes: "weakref.ref[AddedPasses]", key: int) -> Callable[[tuple], tuple | None]:
    """A hook that does not keep `passes` alive, whose successor may have hooks on the same parameters."""

    def hook(gradients: tuple) -> tuple | None:
        found = passes()
        if found is None or gradients[0] is None or found._before_adding(key):
            return None
        return (torch.zeros_like(gradients[0]),)

    return hook
