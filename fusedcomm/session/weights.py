"""Weights of ranks in the mean: what ``comm.weight`` takes, and passes that add up gradients before they are sent."""

import math
import numbers
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

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
    if weights.set(number):
        warn_alone(
            f"fusedcomm: comm.weight={value!r} was set within a backward pass that had the weight from before: its "
            "first bucket had left, or its gradients are added to others. The next pass is an error on every rank",
            stacklevel=4,
        )
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

    @property
    def has_noted(self) -> bool:
        """Whether passes were noted since the last sum."""

    def forget_passes(self) -> None:
        """Forgets these passes: their gradients are gone."""


class AddedPasses:
    """Tells weights of every backward pass, where the gradients of several passes add up before they are sent.

    Gradients of means are multiplied by the pass's weight before they are added; those of sums are added as they are.
    It has a hook at every parameter, so it is made when the first pass that only adds up is announced.

    A pass counts as long as a gradient that it was added to is kept. Users drop gradients in many ways, which call
    nothing here: the gradients themselves tell, None or zeros.

    Args:
        weights: returns what is told now. What it returned before may have been replaced.
    """

    def __init__(self, weights: Callable[[], Noting]) -> None:
        self._weights = weights
        self._hooks: dict[
            int, tuple[Any, Any, RemovableHandle]
        ] = {}  # parameter, its node, hook; by the parameter's id
        self._is_noted, self._scale, self._task = False, 1.0, -1
        self._added_to: dict[int, torch.Tensor] = {}  # the parameters that noted passes have reached, by id
        # What the last pass has left, if that was zeros: of each gradient a reference and its version. Zeros that were
        # zeros before and are untouched have not been dropped.
        self._zeros: list[tuple[torch.Tensor, TensorWeakRef, int]] = []

    def announce(self, parameters: Iterable[torch.Tensor]) -> None:
        """Call before a pass: the parameters that require gradients are noted from now on."""
        self._is_noted = False  # a pass that failed has not ended
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:
                # It does not keep this object alive, whose successor may have hooks on the same parameters.
                # Unlike a hook of the tensor, one of its node is not called by torch.autograd.grad().
                node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
                self._hooks[id(parameter)] = (
                    parameter,
                    node,
                    node.register_prehook(_hook_of(weakref.ref(self), id(parameter))),
                )

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter has been announced."""
        return id(parameter) in self._hooks

    def remove(self) -> None:
        """Removes the hooks."""
        for _, _, hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def forget_dropped(self) -> None:
        """Between passes: forgets those whose gradients have been dropped since."""
        if self._is_noted:
            return
        if not self._weights().has_noted:
            self._added_to.clear()
        elif not _any_left(self._added_to.values()) and not any(
            parameter.grad is not None and reference() is parameter.grad and parameter.grad._version == version
            for parameter, reference, version in self._zeros
        ):
            self._weights().forget_passes()
            self._added_to.clear()
        self._zeros = []

    def _before_adding(self, key: int, gradient: torch.Tensor) -> torch.Tensor | None:
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._at_end)
        if not self._is_noted:
            self.forget_dropped()
            self._is_noted, self._scale = True, self._weights().note_pass()
        self._added_to[key] = self._hooks[key][0]
        if self._scale == 1:
            return None
        return torch.zeros_like(gradient) if self._scale == 0 else gradient * self._scale

    def _at_end(self) -> None:
        # Within a node this is the end of a pass that a reentrant checkpoint has begun. The outer one goes on.
        if torch._C._current_autograd_node() is not None:
            return
        self._is_noted = False
        if self._weights().has_noted and not _any_left(self._added_to.values()):
            left = [each for each in self._added_to.values() if each.grad is not None]
            self._zeros = [(each, TensorWeakRef(each.grad), each.grad._version) for each in left]


def _any_left(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether a gradient of these is there and not zero. As a rule one that is small tells."""
    for each in sorted(parameters, key=torch.numel):
        if each.requires_grad and each.grad is not None:
            found = each.grad._values() if each.grad.is_sparse else each.grad
            if found.any():
                return True
    return False


def _hook_of(passes: "weakref.ref[AddedPasses]", key: int) -> Callable[[tuple], tuple | None]:
    def hook(gradients: tuple) -> tuple | None:
        found = passes()
        if found is None or gradients[0] is None:
            return None
        scaled = found._before_adding(key, gradients[0])
        return None if scaled is None else (scaled,)

    return hook
