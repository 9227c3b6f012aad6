"""Refuses an optimizer's step within a backward pass: its gradients are not yet means over the ranks."""

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from fusedcomm.reducer.reducer import GradReducer

_watched: "weakref.WeakSet[GradReducer]" = weakref.WeakSet()
_is_hooked = False


def refuse_early_steps(reducer: "GradReducer") -> None:
    """From now on, until the reducer is detached."""
    global _is_hooked
    if not _is_hooked:
        register_optimizer_step_pre_hook(_before_step)
        _is_hooked = True
    _watched.add(reducer)


def allow_early_steps(reducer: "GradReducer") -> None:
    _watched.discard(reducer)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    if not _watched or torch._C._current_graph_task_id() == -1:
        return
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for reducer in _watched:
        name = _first_name(reducer, held)
        if reducer._reducer.is_on and name is not None:
            raise RuntimeError(
                f"fusedcomm: {type(optimizer).__name__}.step() was called within a backward pass, where the gradient "
                f"of {name} is not yet the mean over the ranks: call it when backward() has returned. (In no_sync() "
                "steps are possible at any time)"
            )


def _first_name(reducer: "GradReducer", held: Iterable[int]) -> str | None:
    """The name of a parameter that the optimizer holds; None if it holds none of this reducer's."""
    return next((p.name for p in reducer._of_original().parameters if id(p.tensor) in held), None)
