"""Norms and clipping of an FSDP2 model's gradients, which torch computes over all shards."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fusedcomm.fsdp.modules import Sharded


def gradients_by_mesh(model: nn.Module, firsts: Sequence[Sharded]) -> list[list[torch.Tensor]]:
    """The gradients, those on one mesh together. Raises RuntimeError if there are none, and ValueError if no norm of
    them all is known.

    firsts: a module of each mesh over which fusedcomm sums.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        raise RuntimeError(
            "fusedcomm: no parameter of this model has a gradient, so there is no norm: call this between backward() "
            "and the zero_grad() after it"
        )
    of_meshes: dict[object, list[torch.Tensor]] = {}
    for gradient in gradients:
        of_meshes.setdefault(gradient.device_mesh if isinstance(gradient, DTensor) else None, []).append(gradient)
    _refuse_unknown(firsts, [mesh for mesh in of_meshes if mesh is not None])
    return list(of_meshes.values())


def total_norm(gradients: Sequence[Sequence[torch.Tensor]], norm_type: float) -> torch.Tensor:
    """The norm of gradients_by_mesh(). A collective call."""
    norms = [torch.nn.utils.get_total_norm(each, norm_type) for each in gradients]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole), norm_type)


def clip(model: nn.Module, max_norm: float, norm: torch.Tensor) -> None:
    """What torch.nn.utils.clip_grads_with_norm_ does, on this rank's shards."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                local.mul_(factor.to(local.device))


def _refuse_unknown(firsts: Sequence[Sharded], meshes: Sequence[DeviceMesh]) -> None:
    """Raises ValueError if modules are summed over several meshes, and the parameters' own do not say of which ranks
    the gradients are different: an expert that is sharded over some ranks may be another expert on the other ranks."""
    ranks = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in meshes}
    if len(firsts) == 1 or len(ranks) == 1:
        return
    sizes = sorted(map(len, ranks))
    raise ValueError(
        f"fusedcomm: the gradients are on meshes of {' and '.join(map(str, sizes))} ranks, and it is not known whether "
        "the other ranks hold further gradients or copies: make one norm of the gradients of each mesh with "
        "torch.nn.utils.get_total_norm, combine them over the ranks that hold different ones, and clip with "
        "torch.nn.utils.clip_grads_with_norm_"
    )
