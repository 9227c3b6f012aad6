"""DistributedOptimizer: reduces gradients over the ranks while the backward pass runs, and steps with the result."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from fusedcomm.horovod.checks import Average
from fusedcomm.horovod.compression import Compression, check_compression
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set
from fusedcomm.horovod.reduced_optimizer import Groups, ReducedOptimizer, name_of_place
from fusedcomm.literals import Weighted
from fusedcomm.session.served import refuse_served, serve, servers_of
from fusedcomm.session.weights import ADDED_MEANS


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    weighted: Weighted | None = None,
) -> torch.optim.Optimizer:
    """An optimizer that steps with gradients reduced over the ranks. It takes over `optimizer`'s parameters, options
    and state; use it in the other's place. Parameters that are thawed, or given to add_param_group(), on every rank in
    the same step are reduced from then on, each by itself, also with groups.

    named_parameters: model.named_parameters(); names must be the same on every rank. None: parameters are named by
        their places in the optimizer's groups.
    compression: how gradients travel; see compression.py (Compression.none: as they are).
    backward_passes_per_step: backward passes whose gradients are added up before they are reduced (1). They are not
        divided by this number.
    op: Average (the default) or Sum; also Min, Max and Product.
    gradient_predivide_factor: gradients are divided by it before the sum, the sum multiplied by it after (1.0; Average
        only).
    groups: number of groups, or lists of parameters, whose gradients travel together (None: each by itself).
        num_groups is its old name.
    sparse_as_dense: whether sparse gradients travel as dense ones (False).
    process_set: the ranks that take part (all); on others the optimizer is as it was.
    weighted: how ranks weigh in the average (None: equally). "mean" or "sum", as in fusedcomm.Config: each rank sets
        the attribute `weight` of what is returned before backward passes. Average only.

    It takes the place of an older one with one of its parameters, whose step() then raises RuntimeError.

    Raises TypeError for a `compression` that is none, ValueError for other arguments that are not possible, before
    hvd.init(), and if something else synchronizes a parameter. Its synchronize() and step() raise HorovodInternalError
    if the ranks disagree or one is lost, and a backward pass raises AssertionError if it is one too many for
    backward_passes_per_step.
    """
    check_compression(compression)
    if gradient_predivide_factor != 1.0 and (op != Average):
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} is possible with op=hvd.Average only")
    if num_groups != 0:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} is not possible: it must be at least 1")
    if weighted is not None and (weighted not in ("mean", "sum") or op != Average):
        raise ValueError(f"weighted={weighted!r} is not possible: use 'mean' or 'sum', with op=hvd.Average")
    if weighted == "mean" and backward_passes_per_step > 1:
        raise ValueError(ADDED_MEANS)
    names = parameter_names(optimizer, named_parameters)
    _check_groups(groups)
    named = [(names[each], each) for group in optimizer.param_groups for each in group["params"]]
    if process_set.included():
        refuse_served(named, ReducedOptimizer.serves_as, replaces=ReducedOptimizer)
    reduced = _taken_over(optimizer)
    if process_set.included():
        for older in servers_of(parameter for _, parameter in named):
            older.replace()  # type: ignore[attr-defined]  # others have been refused
        refuse_served(named, ReducedOptimizer.serves_as, hooks=True)
    reduced.set_up(
        names=names,
        compression=compression,
        backward_passes_per_step=backward_passes_per_step,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        weighted=weighted,
    )
    if process_set.included():
        serve(reduced)
    return reduced


def _taken_over(optimizer: torch.optim.Optimizer) -> Any:
    """An object of a new class, ReducedOptimizer before the optimizer's own, with its name. It shares the optimizer's
    options and state."""
    inner = type(optimizer)
    if isinstance(optimizer, ReducedOptimizer):
        raise ValueError(f"DistributedOptimizer: this {inner.__name__} is a distributed optimizer already")
    cls = type(inner.__name__, (ReducedOptimizer, inner), {"__module__": __name__})
    new = cls.__new__(cls)
    # A learning rate scheduler sets `step` on the object it was given; here it would hide the method of the class.
    new.__dict__.update((name, value) for name, value in vars(optimizer).items() if name != "step")
    return new


def parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Names of the optimizer's parameters. Raises ValueError if one has none, or for entries that are no pairs, or if a
    name is used twice."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return {
            parameter: name_of_place(i, j)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        }
    named = list(named_parameters)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in named):
        raise ValueError("named_parameters must be pairs (name, parameter): pass model.named_parameters()")
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else None:
        raise ValueError(f"named_parameters must have different names; these are used twice: {', '.join(twice)}")
    by_parameter = {parameter: name for name, parameter in named}
    unnamed = [tuple(parameter.shape) for parameter in own if parameter not in by_parameter]
    if unnamed:
        raise ValueError(
            f"named_parameters lack {len(unnamed)} of the optimizer's {len(own)} parameters, the first of shape "
            f"{unnamed[0]}: pass model.named_parameters()"
        )
    return by_parameter


def _check_groups(groups: Groups) -> None:
    """Raises ValueError for groups that are neither a number of at least 1 nor lists of different tensors."""
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups <= 0:
            raise ValueError(f"groups={groups!r} is not possible: pass a number of at least 1, or lists of parameters")
        return
    seen: set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"groups: a group has a {type(parameter).__name__}; expected parameters")
            if id(parameter) in seen:
                raise ValueError(f"groups: a parameter of shape {tuple(parameter.shape)} is in two groups")
            seen.add(id(parameter))
