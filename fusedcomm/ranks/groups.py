"""The user's process group: what it is made of, and whether fusedcomm can use it."""

import contextlib
import datetime
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from fusedcomm.ranks import own_address, torch_groups
from fusedcomm.ranks.own_group import OwnGroup

Group: TypeAlias = dist.ProcessGroup | OwnGroup


def check_backend(process_group: Group, device: torch.device) -> None:
    """Raises RuntimeError if fusedcomm cannot move gradients on this device over the group's backend."""
    possible = torch_groups.BACKENDS.get(device.type)
    if possible is None:
        raise RuntimeError(
            f"fusedcomm: the gradients are on {device}; fusedcomm moves them on {' and '.join(torch_groups.BACKENDS)} "
            "only. Leave DDP's default all-reduce on other devices."
        )
    wanted = possible[0]
    if isinstance(process_group, OwnGroup):
        name = backend = process_group.backend_name(device)
    else:
        name = dist.get_backend_config(process_group)
        backend = c10d.BackendConfig(dist.Backend(name)).get_device_backend_map().get(device.type)
    if backend not in possible:
        raise RuntimeError(
            f"fusedcomm: the process group's backend for {device.type} tensors is {backend!r} (of {name!r}); fusedcomm "
            f"moves {device.type} gradients over {wanted}: use init_process_group('{wanted}') or leave DDP's default "
            "all-reduce"
        )
    if device.type == "cuda":
        torch_groups.refuse_unread(process_group._get_backend(device))


def refuse_unknown(process_group: Group) -> None:
    """Raises RuntimeError if torch.distributed does not know the group, and so has no store and no backends for it.

    Such a group is a class written in Python, or has been destroyed, or this rank is not in it.
    """
    if isinstance(process_group, OwnGroup) or process_group in c10d._world.pg_map:
        return
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise RuntimeError(
            f"fusedcomm: rank {dist.get_rank()} is not in the process group, which new_group() made of other ranks: "
            "use fusedcomm on the group's ranks only"
        )
    kind = type(process_group)
    what = (
        "has been destroyed, or was not made by torch.distributed"
        if kind is dist.ProcessGroup
        else f"is a {kind.__module__}.{kind.__qualname__}, which torch.distributed did not make"
    )
    raise RuntimeError(
        f"fusedcomm: the process group {what}. fusedcomm connects the ranks of a group over channels of its own, for "
        "which it needs the group's store and its gloo or NCCL backend: make the group with "
        "torch.distributed.init_process_group() or new_group(), and give that one to DistributedDataParallel, "
        "GradReducer, DataParallel, CommState or the device mesh"
    )


def describe_process(process_group: Group) -> str:
    """Names this rank's process and host, for people. Never empty."""
    in_job = process_group.rank_in_job if isinstance(process_group, OwnGroup) else dist.get_rank()
    text = own_address.own_process()
    return text if in_job in (None, process_group.rank()) else f"{text}, rank {in_job} of the job"


def ranks_in_job(process_group: Group) -> list[int] | None:
    """The numbers that the group's ranks have in the job; None if the group has all ranks, or is fusedcomm's own."""
    if isinstance(process_group, OwnGroup) or process_group.size() == dist.get_world_size():
        return None
    return dist.get_process_group_ranks(process_group)


def gloo_backend(process_group: Group) -> dist.Backend | None:
    """The group's backend for CPU tensors if that is gloo, else None."""
    with contextlib.suppress(RuntimeError):  # it has no backend for CPU tensors
        backend = process_group._get_backend(torch.device("cpu"))
        return backend if backend.name() == "gloo" else None
    return None


def group_timeout(process_group: Group, device: torch.device) -> datetime.timedelta:
    """The timeout of the group's backend for `device`; torch's default if it has none."""
    if isinstance(process_group, OwnGroup):
        return process_group.timeout
    with contextlib.suppress(Exception):  # whoever needs that backend says so
        return process_group._get_backend(device).options._timeout
    return dist.default_pg_timeout


def end_together() -> None:
    """Destroys the job's process group once every rank has called this. A collective call.

    A rank that exits right after a collective may get SIGABRT from a gloo thread that still holds it: with a DDP model,
    `destroy_process_group()` does not wait for these threads (torch 2.13). This function does not wait for them either,
    but ranks wait here for the slowest one, which takes long enough except on a very busy machine.
    """
    dist.barrier()
    dist.destroy_process_group()
