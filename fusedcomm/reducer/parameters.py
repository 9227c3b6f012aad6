"""What a reducer takes: the parameters of a module, or named parameters, and refusals of those that it cannot take."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusedcomm.config import combinations
from fusedcomm.native import _C
from fusedcomm.session.parameters import has_sparse_gradient
from fusedcomm.session.served import refuse_served

Named = Sequence[tuple[str, torch.Tensor]]

USUAL_BUCKET_MIB = 25
"""MiB at which a bucket is complete if nobody chooses, as in DDP."""


def named_tensors(module_or_named_parameters: nn.Module | Iterable[tuple[str, torch.Tensor]]) -> Named:
    """Returns the parameters that may have gradients, with their names.

    They are in their order in the model. A tied parameter appears once under each of its names. Those of a module that
    ``_ddp_params_and_buffers_to_ignore`` names are left out, as in DDP.

    Raises:
        TypeError: the argument is a DistributedDataParallel, or no module and no (name, parameter) pairs.
        ValueError: two parameters have the same name, or there are none.
    """
    given = module_or_named_parameters
    if isinstance(given, DistributedDataParallel):
        raise TypeError(
            "fusedcomm.GradReducer takes no DistributedDataParallel: give it ddp.module, or use fusedcomm.attach(ddp). "
            "A fusedcomm.DataParallel has one: model.comm"
        )
    pairs = given
    if isinstance(given, nn.Module):
        ignored = getattr(given, "_ddp_params_and_buffers_to_ignore", ())
        named_parameters = given.named_parameters(remove_duplicate=False)
        pairs = [(name, parameter) for name, parameter in named_parameters if not is_ignored(name, ignored)]
    named, tensors = [], {}
    try:
        pairs = [(name, tensor) for name, tensor in pairs]
    except (TypeError, ValueError) as error:
        raise TypeError(f"fusedcomm.GradReducer takes a module or its named_parameters(): {error}") from error
    for name, tensor in pairs:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            pair = f"a {type(name).__name__} and a {type(tensor).__name__}"
            raise TypeError(f"fusedcomm.GradReducer takes a module or its named_parameters(), not {pair}")
        if tensors.setdefault(name, tensor) is not tensor:
            raise ValueError(f"fusedcomm.GradReducer was given two parameters with the name {name!r}")
        if tensor.is_floating_point() or tensor.is_complex():
            named.append((name, tensor))
    if not named:
        raise ValueError("fusedcomm.GradReducer was given no parameters that could have gradients")
    return named


def is_ignored(name: str, ignored: Collection[str]) -> bool:
    """Whether `ignored` has the name. DDP expects a leading dot before names of the module's own parameters."""
    return name in ignored or ("." not in name and f".{name}" in ignored)


def ignored_names(module: nn.Module) -> set[str]:
    """Parameters and buffers that DDP would leave alone; see _set_params_and_buffers_to_ignore_for_model."""
    given = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return given | {name.removeprefix(".") for name in given}


def replicas_to_agree(module: nn.Module, ignored: Collection[str]) -> dict[str, object]:
    """The shapes and dtypes of the parameters, frozen ones included, and buffers that all ranks must have, by name."""
    named = {"parameter": module.named_parameters(), "buffer": module.named_buffers()}
    return {
        f"{kind} {name}": [list(tensor.shape), str(tensor.dtype)]
        for kind, tensors in named.items()
        for name, tensor in tensors
        if not is_ignored(name, ignored)
    }


def refuse(named: Named) -> None:
    """Raises ValueError or RuntimeError for a parameter that a reducer cannot take; names it."""
    for name, tensor in named:
        if not tensor.is_leaf:
            raise ValueError(f"fusedcomm.GradReducer: {name!r} is the result of a computation, not a parameter")
        if is_traceable_wrapper_subclass(tensor):
            kind = type(tensor).__name__
            raise ValueError(f"fusedcomm.GradReducer: {name!r} is a {kind}: a sharded model has sums of its own")
        if hasattr(tensor, "_in_backward_optimizers"):
            given = {"parameters of _apply_optimizer_in_backward()": name}
            combinations.refuse("GradReducer", given)
    refuse_served(named, "a fusedcomm.GradReducer", hooks=True)


def refuse_with_members(named: Named, sparse: Collection[int], members: object) -> None:
    """Raises ValueError for a parameter that a reducer cannot take whose ranks come and go."""
    for name, tensor in named:
        if isinstance(tensor, DTensor):
            combinations.refuse("FSDP2", {"members": members})
        if id(tensor) in sparse or tensor.dtype.to_real() not in _C.GRAD_DTYPES:
            what = "sparse" if id(tensor) in sparse else str(tensor.dtype)
            raise ValueError(
                f"fusedcomm: gradients of {name} are {what}, which no wire carries: with members every gradient is "
                "dense, of float32, bfloat16 or float16"
            )


def tensors_of(module_or_named_parameters: nn.Module | Iterable[tuple[str, torch.Tensor]], named: Named) -> dict:
    """What a rank that joins gets of the model, by name: the parameters, and a module's buffers."""
    tensors = {f"parameter {name}": tensor for name, tensor in named}
    if isinstance(module_or_named_parameters, nn.Module):
        ignored = getattr(module_or_named_parameters, "_ddp_params_and_buffers_to_ignore", ())
        whole = module_or_named_parameters.named_parameters()  # also those that cannot have gradients
        tensors |= {f"parameter {name}": parameter for name, parameter in whole if not is_ignored(name, ignored)}
        tensors |= {f"buffer {name}": buffer for name, buffer in module_or_named_parameters.named_buffers()}
    return tensors


def ids_of_sparse(module_or_named_parameters: object) -> set[int]:
    """The ids of parameters with sparse gradients. Only a module can tell them."""
    if not isinstance(module_or_named_parameters, nn.Module):
        return set()
    return {id(module.weight) for module in module_or_named_parameters.modules() if has_sparse_gradient(module)}
