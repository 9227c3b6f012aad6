"""Weights of ranks in the mean: what ``comm.weight`` takes, and passes that add up gradients before they are sent."""

import math
import numbers
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from fusedcomm.config import Config
from fusedcomm.native import _C
from fusedcomm.ranks.peers import warn_alone


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

    A number that is no weight is an error of every rank in the next backward pass, which names this rank. Raises
    TypeError as checked().
    """
    number, problem = checked(value)
    if problem:
        weights.set_invalid(problem)
        return number
    if weights.in_pass and torch._C._current_graph_task_id() >= 0:
        warn_alone(
            f"fusedcomm: comm.weight={value!r} was set within a backward pass whose first bucket had left, which had "
            "the weight from before. The next pass is an error on every rank",
            stacklevel=4,
        )
    weights.set(number)
    return number


def used(synchronizer: "_C.Synchronizer", config: Config) -> "_C.PassWeights | None":
    """The weights of a new engine, if `config` has any."""
    if config.weighted is None:
        return None
    synchronizer.weights.use(of_sums=config.weighted == "sum")
    return synchronizer.weights


class Noting(Protocol):
    """What is told of backward passes, as _C.PassWeights is."""

    def note_pass(self) -> float:
        """Notes a pass. Returns what multiplies its gradients before they are added to others."""

    def forget_passes(self) -> None:
        """Forgets the passes that were noted since the last sum: their gradients are gone."""


class AddedPasses:
    """Tells `weights` of every backward pass, where the gradients of several passes add up before they are sent.

    Gradients of means are multiplied by the pass's weight before they are added; those of sums are added as they are.
    It has a hook at every parameter, so it is made when the first pass that only adds up is announced.
    """

    def __init__(self, weights: Noting) -> None:
        self._weights = weights
        self._hooks: dict[
            int, tuple[Any, Any, RemovableHandle]
        ] = {}  # parameter, its node, hook; by the parameter's id
        self._is_noted, self._scale, self._task = False, 1.0, -1

    def announce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Call before a pass: the parameters that require gradients are noted from now on."""
        self._is_noted = False  # a pass that failed has not ended
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                # It does not keep this object alive, whose successor may have hooks on the same parameters.
                # Unlike a hook of the tensor, one of its node is not called by torch.autograd.grad().
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                self._hooks[id(parameter)] = (parameter, node, node.register_prehook(_hook_of(weakref.ref(self))))

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter has been announced."""
        return id(parameter) in self._hooks

    def remove(self) -> None:
        """Removes the hooks."""
        for _, _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _before_adding(self, gradient: torch.Tensor) -> torch.Tensor | None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end)
        if not self._is_noted:
            if all(parameter.grad is None for parameter, _, _ in self._hooks.values()):
                self._weights.forget_passes()  # a pass before failed, or its gradients were dropped
            self._is_noted, self._scale = True, self._weights.note_pass()
        if self._scale == 1:
            return None
        return torch.zeros_like(gradient) if self._scale == 0 else gradient * self._scale

    def _at_end(self) -> None:
        # Within a node this is the end of a pass that a reentrant checkpoint has begun. The outer one goes on.
        if torch._C._current_autograd_node() is None:
            self._is_noted = False


def _hook_of(passes: "weakref.ref[AddedPasses]") -> Callable[[tuple], tuple | None]:
    def hook(gradients: tuple) -> tuple | None:
        found = passes()
        if found is None or gradients[0] is None:
            return None
        scaled = found._before_adding(gradients[0])
        return None if scaled is None else (scaled,)

    return hook
