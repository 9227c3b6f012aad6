"""Parameters of which a rank holds a shard: FSDP2 inside a host, merges between the ranks that hold the same shard."""

import contextlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, as FSDP2 and tensor parallelism make them."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: its shard of a DTensor, or all of it. Shares its memory; has no gradient."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()  # type: ignore[attr-defined]  # a DTensor's


def has_mates(model: nn.Module) -> bool:
    """Whether other ranks hold the same parameters in every step, or the rest of them: DDP or FSDP2 inside a host."""
    return isinstance(model, DistributedDataParallel) or any(map(is_sharded, model.parameters()))


def reshard(model: nn.Module) -> None:
    """Makes every module of FSDP2 hold its shards. After a forward pass without a backward pass, as in an evaluation,
    FSDP2 leaves whole copies in the outermost module, which would not see what is written to the shards."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model has modules of it only if it has been imported
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def place(tensor: torch.Tensor) -> str:
    """Which shard this rank holds, in words that ranks compare; empty for a tensor that is no DTensor."""
    if not is_sharded(tensor):
        return ""
    mesh, placements = _layout(tensor)
    coordinate = mesh.get_coordinate()
    parts = [
        f"{at} of {mesh.size(dim)} along {placement!r}"
        for dim, (placement, at) in enumerate(zip(placements, coordinate, strict=True))
        if not placement.is_replicate()
    ]
    return " in ".join(parts) or "whole"


def is_first(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether this rank is the first of its host as far as DTensors tell: it says what others would repeat."""
    return not any(is_sharded(each) and any(_mesh(each).get_coordinate() or ()) for each in tensors)


def refuse_group(named: Iterable[tuple[str, torch.Tensor]], process_group: Any) -> None:
    """Raises ValueError for a DTensor that the ranks of `process_group` cannot merge: they hold other shards of it, or
    have equal gradients in every step."""
    ranks = ranks_of(process_group)
    for name, tensor in named:
        if not is_sharded(tensor):
            continue
        if not ranks:
            raise ValueError(f"fusedcomm: {name} is a DTensor: give process_group=, the ranks with the same shard")
        mesh, placements = _layout(tensor)
        if mesh.get_coordinate() is None or any(placement.is_partial() for placement in placements):
            raise ValueError(f"fusedcomm: {name} has the placements {placements}: use fully_shard on each host's ranks")
        for dim, placement in enumerate(placements):
            mates = _beside(mesh, [dim])
            if not placement.is_replicate() and len(mates & ranks) > 1:
                raise ValueError(
                    f"fusedcomm: {name} is sharded over the ranks {sorted(mates)}, of which {sorted(mates & ranks)} "
                    "are to merge with each other: give process_group=, the ranks that hold the same shard, one of "
                    'each host: mesh.get_group("hosts") of init_device_mesh(device, (hosts, ranks_per_host), '
                    'mesh_dim_names=("hosts", "shards")), and fully_shard(model, mesh=mesh["shards"])'
                )
        replicas = _beside(mesh, [dim for dim, placement in enumerate(placements) if placement.is_replicate()])
        if len(ranks) > 1 and ranks <= replicas:
            raise ValueError(
                f"fusedcomm: {name} is replicated over the ranks {sorted(replicas)}, and {sorted(ranks)} have nothing "
                "to merge: give fully_shard a mesh of the ranks of one host, and process_group=, the ranks of the "
                "hosts that hold the same shard"
            )


def ranks_of(process_group: Any) -> set[int]:
    """Numbers in the whole job. Empty if torch.distributed does not know the group."""
    with contextlib.suppress(KeyError):
        return set(dist.get_process_group_ranks(process_group))
    return set()


def _beside(mesh: Any, dims: list[int]) -> set[int]:
    """The ranks of a mesh whose coordinates are this rank's, except in `dims`."""
    here = enumerate(mesh.get_coordinate())
    return set(mesh.mesh[tuple(slice(None) if dim in dims else at for dim, at in here)].flatten().tolist())


def _mesh(tensor: Any) -> Any:
    return tensor.device_mesh


def _layout(tensor: Any) -> tuple[Any, tuple[Any, ...]]:
    return tensor.device_mesh, tuple(tensor.placements)
