"""What reducers look at when an optimizer steps: its gradients must be means over the ranks."""

import weakref
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from fusedcomm.reducer.reducer import GradReducer

_watched: "weakref.WeakSet[GradReducer]" = weakref.WeakSet()
_is_hooked = False


def watch_steps(reducer: "GradReducer") -> None:
    """From now on, until :func:`ignore_steps`, an optimizer's step raises if it would use gradients that are no means.

    This is so within a backward pass, and if gradients of the reducer's parameters no longer come to it.
    """
    global _is_hooked
    if not _is_hooked:
        register_optimizer_step_pre_hook(_before_step)
        _is_hooked = True
    _watched.add(reducer)


def ignore_steps(reducer: "GradReducer") -> None:
    """Ends :func:`watch_steps`. Idempotent."""
    _watched.discard(reducer)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if torch._C._current_graph_task_id() != -1:
        _refuse_within_backward(optimizer)
        return
    for reducer in list(_watched):
        why = reducer.why_local()
        if why and not _held(optimizer).isdisjoint(map(id, reducer.parameters_of_module())):
            reducer.native.refuse(why)


def _held(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _refuse_within_backward(optimizer: torch.optim.Optimizer) -> None:
    held = _held(optimizer)
    for reducer in _watched:
        name = next((p.name for p in reducer.session.parameters if id(p.tensor) in held), None)
        # Looked at last: what an owner steps while its bucket is handed over may not ask the reducer, which is at work.
        if name is not None and reducer.native.is_on:
            raise RuntimeError(
                f"fusedcomm: {type(optimizer).__name__}.step() was called within a backward pass, where the gradient "
                f"of {name} is not yet the mean over the ranks: call it when backward() has returned"
            )
