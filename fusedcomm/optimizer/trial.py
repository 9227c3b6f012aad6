"""What an optimizer does with small parameters: the state it makes, and what else a call of its step() changes."""

import collections
import copy
from collections.abc import Sequence
from typing import Any

import torch

from fusedcomm.optimizer.parts import Target, index_by_id

_GROUPS = "param_groups"


def stand_in(target: Target) -> torch.Tensor:
    """A small parameter of zeros for which an optimizer does what it does for `target`."""
    shape = (4,) * max(target.tensor.dim(), 1) if target.whole else (16,)
    return torch.zeros(shape, dtype=torch.float32, device=target.tensor.device)


class _First(dict):
    """A parameter's state, in `first` as each value was when it was set first."""

    def __init__(self) -> None:
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:  # noqa: ANN401
        self.first.setdefault(key, copy.deepcopy(value))
        super().__setitem__(key, value)


def fresh_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], values: Sequence[torch.Tensor]
) -> list[dict[str, Any]]:
    """The state of these values before a step: what a step with gradients of zeros begins with. Zeros where an
    optimizer does not set its values one by one."""
    copies = [value.detach().clone() for value in values]
    for each in copies:
        each.grad = torch.zeros_like(each)
    # With weight decay SGD's first momentum would have a part of the parameter.
    own = {**group, "params": copies} | {key: 0.0 for key in ("weight_decay",) if key in group}
    tried = type(optimizer)([own])
    tried.state = collections.defaultdict(_First, tried.state)
    tried.step()
    states = []
    for each in copies:
        found = tried.state[each]
        zeros = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else type(v)() for k, v in found.items()}
        states.append(zeros | (found.first if isinstance(found, _First) else {}))
    return states


def keys_of_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], target: Target) -> set[str]:
    """The keys of the parameter's state after a step; none if that steps no small parameters, so nothing is known."""
    try:
        (state,) = fresh_state(optimizer, group, [stand_in(target)])
    except Exception:
        return set()
    return set(state)


def changes_in_steps(
    groups: Sequence[dict[str, Any]],
    targets: Sequence[Target],
    main: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
) -> bool:
    """Whether step() changes more than parameters and their state, such as a count in a group.

    Raises ValueError if an optimizer computes that from gradients, of which no rank has all.
    """
    index_of, found = index_by_id(targets), False
    for kind in dict.fromkeys(group["optimizer_class"] for group in groups):
        own = [
            ({k: v for k, v in group.items() if k not in ("optimizer_class", "whole")}, stand_in(targets[of_group[0]]))
            for group in groups
            if group["optimizer_class"] is kind
            and (of_group := [index_of[id(p)] for p in group["params"] if id(p) in index_of])
        ]
        if not own:
            continue
        tried = [_try(kind, own, defaults if kind is main else {}, gradient) for gradient in (1.0, 2.0)]
        (changed, ends), (_, others) = tried
        computed = [key for key, value in ends.items() if key.startswith(_GROUPS) and value != others.get(key)]
        if computed:
            what = f"{', '.join(computed)} from the gradients of all parameters"
            raise ValueError(f"fusedcomm: {kind.__name__} computes {what}: use it without a ShardedOptimizer")
        found = found or changed
    return found


def _try(
    kind: type[torch.optim.Optimizer],
    own: Sequence[tuple[dict[str, Any], torch.Tensor]],
    defaults: dict[str, Any],
    gradient: float,
) -> tuple[bool, dict[str, str]]:
    """Returns (whether steps with such gradients change values, all values by name, in words)."""
    params = [small.clone() for _, small in own]
    optimizer = kind([{**group, "params": [p]} for (group, _), p in zip(own, params, strict=True)], **defaults)
    seen = []
    for _ in range(3):
        seen.append(_words(optimizer))
        for p in params:
            p.grad = torch.full_like(p, gradient)
        try:
            optimizer.step()
        except Exception:  # it steps no small parameters, so nothing is known
            return False, {}
    seen.append(_words(optimizer))
    # The first step may note what a later one need not find out again, but not in a group.
    changed = any(value != seen[0 if key.startswith(_GROUPS) else 1].get(key) for key, value in seen[-1].items())
    return changed, seen[-1]


def _words(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    of_object = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    of_state = {f"state[{key!r}]": value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    of_groups = {
        f"{_GROUPS}[{i}][{key!r}]": value
        for i, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    return {key: repr(value) for key, value in (of_object | of_state | of_groups).items()}
