"""Choices on a model of FSDP2: fusedcomm's collectives, torch's own, or none at all, one after another."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from fusedcomm.attaching import unwrapped
from fusedcomm.config import Config, Wire
from fusedcomm.fsdp.attach import attach_fsdp, refuse_gathers
from fusedcomm.fsdp.handle import FsdpHandle
from fusedcomm.fsdp.modules import sharded_modules
from fusedcomm.fsdp.replicas import reduced
from fusedcomm.tools.errors import ProbeError


def unattached(model: nn.Module) -> nn.Module:
    """`model`. Raises ProbeError if the script has attached something to it."""
    _, problem = sharded_modules(model)
    if problem is not None:
        raise ProbeError(f"{str(problem).removeprefix('fusedcomm: ')}. The probe attaches each choice itself")
    return model


def wires_of_params(model: nn.Module, wires: Sequence[Wire]) -> list[Wire]:
    """Those of `wires` in which the model's parameters can be gathered, but not "fp32", as torch does."""
    found: list[Wire] = []
    for wire in wires:
        with contextlib.suppress(ValueError):
            refuse_gathers(Config(wire, params=wire), sharded_modules(model)[0])
            found += [wire] if wire != "fp32" else []
    return found


@contextlib.contextmanager
def attached(model: nn.Module, config: Config | None) -> Iterator[FsdpHandle]:
    """fusedcomm's handle, for None that of torch's own collectives. It rests: see Meshes.running(). A collective
    call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one level where there could be two is a choice here
        handle = attach_fsdp(unwrapped(model), config or "off", quiet=True)
    meshes: Any = handle.runs
    with meshes.running():
        pass
    try:
        yield handle
    finally:
        handle.detach()
        model.zero_grad()


def sent(handle: FsdpHandle, num_links: int) -> tuple[int, int | None]:
    """Bytes of a step that (this rank sends, its host sends to other hosts; None if that is not known).

    num_links: those of the ring over all ranks that leave this rank's host.
    """
    plan = handle.plan()
    if plan.traffic is not None:
        return plan.sent_nbytes + plan.gathered_nbytes + plan.summed_nbytes, plan.traffic.nbytes
    # gloo's reduce-scatter is an all-reduce, NCCL's a ring.
    meshes: Any = handle.runs
    passes = 2 if meshes.comms[0].sharded.device.type == "cpu" else 1
    share = (plan.num_replicas - 1) / plan.num_replicas / plan.num_shards
    nbytes = passes * plan.sent_nbytes + plan.exact_gathered_nbytes + round(2 * share * plan.grad_nbytes)
    return nbytes, nbytes * num_links if plan.num_replicas == 1 and not plan.others else None


class _Silent:
    """An all-gather or a reduce-scatter in which no rank sends anything: others' parameters and all means are zeros."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return reduced(torch.zeros(size, dtype=dtype, device=device), lambda tensor, op: None)  # nor between replicas

    def __call__(self, **arguments: object) -> None: ...


@contextlib.contextmanager
def without_collectives(model: nn.Module) -> Iterator[None]:
    """Context of steps in which no rank sends anything. Their losses and gradients mean nothing."""
    found = [(each, each.all_gather) for each in sharded_modules(model)[0]]
    for each, _ in found:
        each.use(_Silent(), _Silent())
    try:
        yield
    finally:
        for each, all_gather in found:
            each.use(DefaultReduceScatter(), all_gather)
