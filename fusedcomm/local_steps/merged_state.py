"""The merged state: what all ranks share between merges, beside the parameters that each rank trains."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fusedcomm.config import Config
from fusedcomm.local_steps.shards import local, reshard
from fusedcomm.local_steps.shards import place as shard_of
from fusedcomm.native import _C
from fusedcomm.session.checksums import quick
from fusedcomm.session.session import Session

_ROW_NUMEL = 1024
"""Elements whose squares are summed in fp32."""


@dataclasses.dataclass(frozen=True)
class Merged:
    """A parameter that is merged."""

    name: str
    parameter: torch.Tensor
    """Perhaps a DTensor."""
    wire: int
    """Number of its wire; see csrc/engine/config.h."""

    @property
    def local(self) -> torch.Tensor:
        """What this rank holds of it, and merges. Shares its memory. A shard of a DTensor may be empty."""
        return local(self.parameter)


class MergedState:
    """All merged parameters, in one flat order: first those that the wire may round, then the exact ones.

    named: as arguments.merged_parameters() returns it.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], config: Config) -> None:
        merged = [Merged(name, parameter, config.wire_number(name, parameter)) for name, parameter in named]
        lossy = [each for each in merged if each.wire != _C.EXACT_WIRE]
        exact = [each for each in merged if each.wire == _C.EXACT_WIRE]
        self.merged = (*lossy, *exact)
        self._places: list[tuple[int, int, torch.Size]] = []  # of each parameter: where it begins and ends, its shape
        end = 0
        for each in self.merged:
            begin, end = end, end + each.local.numel()
            self._places.append((begin, end, each.local.shape))
        self.numel = end
        self.anchor = torch.zeros(end, dtype=torch.float32, device=merged[0].local.device if merged else None)
        """fp32 [numel]: equal on every rank."""
        if merged:  # none where this rank cannot take part
            self.anchor.copy_(self.read())

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' elements of `flat` [numel], each in its parameter's local shape, in the order of `merged`."""
        return [flat[begin:end].view(shape) for begin, end, shape in self._places]

    def read(self) -> torch.Tensor:
        """fp32 [numel]: the parameters as they are on this rank now."""
        flat = torch.empty_like(self.anchor)
        torch._foreach_copy_(self.views(flat), [each.local for each in self.merged])
        return flat

    def write(self, flat: torch.Tensor) -> None:
        """Gives the parameters the values of `flat` [numel]."""
        torch._foreach_copy_([each.local for each in self.merged], self.views(flat))

    def tensors(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters' elements of `flat` [numel] by the names that the engine knows them by, as views. None is
        empty."""
        views = zip(self.merged, self.views(flat), strict=True)
        return {each.name: view for each, view in views if view.numel()}

    def wires(self) -> dict[str, int]:
        """The number of the wire of every name of tensors()."""
        return {each.name: each.wire for each in self.merged}

    def checksum(self, flat: torch.Tensor | None = None) -> torch.Tensor:
        """32 bits of the merged state, or of `flat`, as an int64 without dimensions where they lie: those of different
        states differ, but by chance."""
        total = quick(self.anchor if flat is None else flat)
        return (total ^ (total >> 32)) & 0xFFFFFFFF


def squares(flat: torch.Tensor) -> torch.Tensor:
    """‖flat‖² of an fp32 tensor, as a float64 without dimensions where it lies: norms of rows in fp32, and their sum in
    float64, which is nearly as exact as float64 alone and takes a quarter of its time."""
    whole = flat.numel() // _ROW_NUMEL * _ROW_NUMEL
    norms = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW_NUMEL), dim=1)
    return norms.double().square().sum() + flat[whole:].double().square().sum()


def record(state: MergedState) -> dict[str, object]:
    """What ranks compare."""
    return {
        "shards": {each.name: shard_of(each.parameter) for each in state.merged},
        "parameters": [
            [each.name, list(each.local.shape), str(each.parameter.dtype), each.wire] for each in state.merged
        ],
    }


@torch.no_grad()
def begin_equal(state: MergedState, session: Session) -> None:
    """Gives every rank the first rank's parameters, which are the first merged state."""

    def broadcast() -> None:
        dist.broadcast(state.anchor, group=session.process_group, group_src=0)

    if session.world_size > 1:
        session.call(broadcast, "LocalSteps(…)")
    state.write(state.anchor)


def refuse_changed(state: MergedState, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Raises RuntimeError if a parameter cannot be merged any more, or the model has another one now."""
    reshard(model)
    named = dict(model.named_parameters())
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    cure = ": detach() this LocalSteps on every rank, and make another. No merge has been applied in part"
    for each in state.merged:
        found = named.get(each.name)
        what = (
            "is no longer in the model"
            if found is None
            else "has been replaced"
            if found is not each.parameter
            else "has been frozen"
            if not found.requires_grad
            else f"has become {found.dtype}"
            if found.dtype not in _C.GRAD_DTYPES
            else "is no longer in the optimizer"
            if id(found) not in held
            else ""
        )
        if what:
            raise RuntimeError(f"fusedcomm: rank {rank}: {each.name} {what}" + cure)
    known = {id(each.parameter) for each in state.merged}
    for name, parameter in named.items():
        if parameter.requires_grad and id(parameter) not in known:
            raise RuntimeError(f"fusedcomm: rank {rank}: {name} has been added or thawed, and no merge has it" + cure)
