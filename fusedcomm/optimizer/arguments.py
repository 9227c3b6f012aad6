"""Checks of the arguments of a ShardedOptimizer."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from fusedcomm.config import AUTO, Config, TwoLevels, combinations
from fusedcomm.literals import Wire
from fusedcomm.members.training.passes import Training
from fusedcomm.optimizer.parts import Target, is_whole, refuse
from fusedcomm.ranks import agreement
from fusedcomm.reducer.reducer import GradReducer
from fusedcomm.session.parameters import NamedParameter
from fusedcomm.session.session import Session

OptimizerClass = type[torch.optim.Optimizer]


def check_reducer(reducer: object) -> None:
    """Raises TypeError for what is no reducer, as a model, its parameters or a DistributedDataParallel; RuntimeError or
    ValueError for one that is detached, has members or tries wires."""
    if not isinstance(reducer, GradReducer):
        raise TypeError(
            "fusedcomm.ShardedOptimizer takes a fusedcomm.GradReducer or a fusedcomm.DataParallel, not "
            f"{type(reducer).__name__}: it is the first argument, as in ShardedOptimizer(fusedcomm.DataParallel("
            "module), torch.optim.AdamW, params, lr=…)"
        )
    reducer.refuse_detached("no optimizer can own its parameters")
    members = reducer.runs.members if isinstance(reducer.runs, Training) else None
    config = None if reducer.tuning() is None else AUTO
    combinations.refuse("ShardedOptimizer", {"members": members, "config": config})


def plain(value: Any, waits: bool = False) -> Any:  # noqa: ANN401
    """Numbers and names of hyperparameters, for a comparison of the ranks. What is of another kind is left out.

    waits: whether the host waits for what is on an accelerator; else that is left out, too.
    """
    if isinstance(value, dict):
        return {str(key): plain(inner, waits) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner, waits) for inner in value]
    if isinstance(value, torch.Tensor) and (waits or not is_on_device(value)):
        return value.tolist()
    return value if isinstance(value, (bool, int, float, str)) else None


def is_on_device(value: object) -> bool:
    """Whether it is a tensor on an accelerator, whose values the host would have to wait for."""
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def record(
    groups: list[dict[str, Any]], targets: list[Target], update: Wire, defaults: dict[str, Any]
) -> dict[str, object]:
    """The values that must be equal on all ranks."""
    names = {id(target.tensor): target.name for target in targets}
    return {
        "update": update,
        "groups": [
            {
                "optimizer_class": group["optimizer_class"].__name__,
                "params": [names.get(id(p)) for p in group["params"]],
                **plain({k: v for k, v in group.items() if k not in ("params", "optimizer_class")}, waits=True),
            }
            for group in groups
        ],
        "whole": [target.name for target in targets if target.whole],
        "arguments": plain(defaults, waits=True),
    }


def why_unequal(session: Session, rates: list[dict[str, Any]]) -> str:
    """Names the first of this rank's `rates` that another rank has otherwise. A collective call."""
    of_all = session.gather("rates", {"param_groups": rates}, "backward()")
    found = agreement.difference({session.peers.title(rank): each for rank, each in enumerate(of_all)})
    return (
        f"fusedcomm: {found}. Each rank steps a part of the parameters, with its own hyperparameters: give every rank "
        "the same, also where a scheduler changes them. Then call detach(), and make the GradReducer and the "
        "ShardedOptimizer anew on every rank"
    )


def rows_config(reducer: GradReducer) -> Config:
    """The reducer's configuration for sums of rows. Raises ValueError and RuntimeError."""
    if reducer.has_owner:
        raise RuntimeError("fusedcomm: this GradReducer has a ShardedOptimizer already: give that one several groups")
    config = reducer.session.config
    combinations.refuse("ShardedOptimizer", {"feedback": config.feedback, "sum": config.sum})
    return dataclasses.replace(config, sum="two-shot")


def update_config(wire: Wire, sums: Config) -> Config:
    """The configuration of the all-gathers of updates, on the hosts that `sums` have."""
    levels = sums.two_levels
    hosts = sums.hosts if levels is None or sums.hosts == AUTO else TwoLevels(levels.groups)
    return Config(wire, sum="two-shot", hosts=hosts)


class _Groups(torch.optim.Optimizer):
    """Groups of parameters as torch's optimizers take them."""


def groups(
    reducer: GradReducer,
    params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None,
    kind: OptimizerClass,
    defaults: dict[str, Any],
) -> list[dict[str, Any]]:
    """Groups with their optimizer's class, each with a list of parameters. Raises TypeError and ValueError."""
    named = _named(reducer)
    if params is None:
        params = [p.tensor for p in named if p.tensor.requires_grad]
    try:
        entries = _Groups([dict(each) if isinstance(each, dict) else each for each in params], {}).param_groups
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"fusedcomm: params= is not possible ({error}): use parameters, named ones, or groups, dicts with 'params'"
        ) from error
    ours = {id(p.tensor): p.name for p in named}
    found: set[int] = set()
    for group in entries:
        group.setdefault("optimizer_class", kind)
        if not (
            isinstance(group["optimizer_class"], type) and issubclass(group["optimizer_class"], torch.optim.Optimizer)
        ):
            raise TypeError(f"fusedcomm: {group['optimizer_class']!r} is no class of torch optimizers")
        for p in group["params"]:
            if id(p) not in ours:
                raise ValueError(f"fusedcomm: a parameter of shape {list(p.shape)} is not one of the GradReducer's")
            if id(p) in found:
                raise ValueError(f"fusedcomm: {ours[id(p)]} is given twice: a parameter has one owner and one step")
            found.add(id(p))
    if defaults and all(group["optimizer_class"] is not kind for group in entries):
        raise ValueError(f"fusedcomm: {', '.join(defaults)} would do nothing: every group has its own class")
    return entries


def targets(
    reducer: GradReducer, of_groups: list[dict[str, Any]], update: Config, whole: bool | None
) -> tuple[list[Target], dict[int, int]]:
    """The parameters that are stepped, in the order in which their gradients come, and their indices by those that the
    native reducer has. Raises ValueError."""
    kind_of = {id(p): group["optimizer_class"] for group in of_groups for p in group["params"]}
    whole_of = {id(p): group.get("whole", whole) for group in of_groups for p in group["params"]}
    found: list[Target] = []
    by_reducer: dict[int, int] = {}
    for index, parameter in enumerate(reversed(_named(reducer))):
        tensor = parameter.tensor
        if not tensor.requires_grad:
            continue
        if id(tensor) not in kind_of:
            name = parameter.name
            raise ValueError(f"fusedcomm: {name} is in no group: add it, or freeze it before the GradReducer is made")
        by_reducer[index] = len(found)
        update_wire = update.wire_number(parameter.name, tensor)
        is_one = is_whole(kind_of[id(tensor)], whole_of[id(tensor)])
        found.append(Target(parameter.name, tensor, parameter.wire, update_wire, is_one))
    refuse(found, reducer.has_sparse_gradient)
    return found, by_reducer


def _named(reducer: GradReducer) -> list[NamedParameter]:
    parameters = reducer.session.parameters
    assert parameters is not None
    return parameters
