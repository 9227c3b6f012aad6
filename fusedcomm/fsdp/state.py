"""The state of an attachment to an FSDP2 model: what error feedback has left out so far, as DTensors.

A parameter's residual in the state is the mean over ranks of what they have left out, in the unit of their gradients.
It is a DTensor with the parameter's mesh and placements, so torch's distributed checkpointing can save it, and load it
on another number of ranks. Every rank then gets the whole mean as its residual, so the mean of the gradients contains
what the residuals held before.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fusedcomm.fsdp.comm import FusedReduceScatter

VERSION = 1


def state_dict(comms: list[FusedReduceScatter], consolidated: bool) -> dict[str, Any]:
    """See :meth:`fusedcomm.fsdp.handle.FsdpHandle.state_dict`. A collective call."""
    residuals: dict[str, torch.Tensor] = {}
    # A tensor made in inference mode, as in a trainer's evaluation, could not be changed outside of it.
    with torch.inference_mode(False), torch.no_grad():
        for comm in comms:
            for name, mean in _means(comm).items():
                residuals[name] = mean.full_tensor().cpu() if consolidated else mean
    return {
        "version": VERSION,
        "calls": {comm.sharded.title: comm.num_calls for comm in comms},
        "residuals": residuals,
    }


def load_state_dict(comms: list[FusedReduceScatter], state: dict[str, Any]) -> None:
    """See :meth:`fusedcomm.fsdp.handle.FsdpHandle.load_state_dict`. A collective call."""
    _check(comms, state)
    residuals = state["residuals"]
    with torch.inference_mode(False), torch.no_grad():
        for comm in comms:
            comm.num_calls = state["calls"][comm.sharded.title]
            own = {p.name: p.row(residuals[p.name]) for p in comm.with_residuals()}
            if own:
                comm.restore(own)


def _means(comm: FusedReduceScatter) -> dict[str, DTensor]:
    """The mean over ranks of the residuals of each parameter that has them."""
    residuals, replicas = comm.residuals(), comm.sharded.replicas
    means = {}
    for parameter in comm.with_residuals():
        # A parameter that has been frozen from the start has none.
        none = torch.zeros(parameter.row_numel, dtype=torch.float32, device=comm.sharded.device)
        mean = residuals.get(parameter.name, none)
        dist.all_reduce(mean, group=replicas)
        means[parameter.name] = parameter.dtensor(mean / replicas.size())
    return means


def _check(comms: list[FusedReduceScatter], state: dict[str, Any]) -> None:
    """Raises ValueError if `state` is not of this model and configuration."""
    missing = {"version", "calls", "residuals"} - state.keys()
    if missing:
        raise ValueError(f"fusedcomm: this state has no {sorted(missing)}: give what state_dict() has returned")
    if state["version"] != VERSION:
        raise ValueError(f"fusedcomm: this state has version {state['version']}, and this is for version {VERSION}")
    names = {comm.sharded.title for comm in comms}
    if names != state["calls"].keys():
        different = min(names ^ state["calls"].keys())
        raise ValueError(f"fusedcomm: this state is of another model, or sharded differently: see module {different}")
    shapes = {p.name: p.tensor.shape for comm in comms for p in comm.with_residuals()}
    if shapes.keys() != state["residuals"].keys():
        different = min(shapes.keys() ^ state["residuals"].keys())
        raise ValueError(f"fusedcomm: only one of state and attachment has residuals of {different}: use one Config")
    for name, shape in shapes.items():
        found = state["residuals"][name]
        if not isinstance(found, torch.Tensor) or found.shape != shape:
            found = getattr(found, "shape", found)
            raise ValueError(f"fusedcomm: the state's residual of {name} is {found}, not {shape}")
