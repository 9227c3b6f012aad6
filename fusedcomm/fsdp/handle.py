"""The handle of an attachment to an FSDP2 model."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn

import fusedcomm.fsdp.state as state
from fusedcomm.fsdp.all_gather import waiting
from fusedcomm.fsdp.comm import FusedReduceScatter, Pending
from fusedcomm.fsdp.mesh import FsdpPlan, MeshSums, together
from fusedcomm.fsdp.norm import clip, gradients_by_mesh, total_norm
from fusedcomm.session.session import Session
from fusedcomm.session.stats import NonFinite, Stats


class FsdpHandle:
    """One attachment of fusedcomm to an FSDP2 model; made by :func:`fusedcomm.attach`.

    With "off" torch reduces, as without fusedcomm: nothing is counted or traced, and the state is what was loaded.
    """

    def __init__(self, model: nn.Module, meshes: list[MeshSums]) -> None:
        self._model = model
        # The first mesh is that of the first module which is not left to torch: as a rule the model's own.
        self._meshes = sorted(meshes, key=lambda mesh: mesh.is_off)
        self._attached = True
        self._pending = Pending()
        for mesh in self._meshes:
            mesh.start(self._pending)

    @property
    def _comms(self) -> list[FusedReduceScatter]:
        return [comm for mesh in self._meshes for comm in mesh.comms]

    @property
    def _is_off(self) -> bool:
        return self._meshes[0].is_off

    @property
    def _session(self) -> Session:
        return self._meshes[0].sessions[0]

    def plan(self) -> FsdpPlan:
        """How each module's gradients are sent; printable. After detach() as before it."""
        first, *others = self._meshes
        return first.plan(tuple(mesh.plan() for mesh in others))

    def stats(self) -> Stats:
        """Counts and times of this rank since attach. A bucket is the reduce-scatter of one module; with replicate(),
        which has none, its all-reduce. Of modules on several meshes the counts are added up, and the times and steps
        are those of the model's own mesh. All counts are 0 with config="off"; `off` is True then."""
        return together([mesh.stats() for mesh in self._meshes if mesh.is_off == self._is_off])

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients together, over all shards, the same on every rank: a tensor without dimensions.
        Call it after a backward pass. torch computes it, from gradients that it reads.

        Raises:
            RuntimeError: no parameter has a gradient, as before any backward pass.
            ValueError: the modules are on meshes of different ranks, so which ranks hold different gradients is not
                known.
        """
        firsts = [mesh.comms[0].sharded for mesh in self._meshes]
        gradients, rows = gradients_by_mesh(self._model, firsts), self._meshes[0].rows
        is_watched = self._attached and rows is not None and firsts[0].device.type == "cpu"
        with waiting(rows, "grad_norm()") if is_watched else contextlib.nullcontext():
            return total_norm(gradients, norm_type)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales the gradients down to `max_norm` if their norm is greater, and returns the norm before: the bits of
        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)``, which does the same.

        Args:
            error_if_nonfinite: whether a NaN or infinite norm is an error. If not, it makes the gradients NaN or 0, as
                in torch.

        Raises as :meth:`grad_norm`. Also:

        Raises:
            RuntimeError: error_if_nonfinite, and the norm is not finite.
        """
        norm = self.grad_norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"fusedcomm: the norm of the gradients is {norm.item()}, so they cannot be clipped. To clip anyway: "
                "error_if_nonfinite=False"
            )
        clip(self._model, max_norm, norm)
        return norm

    def state_dict(self, consolidated: bool = False) -> dict:
        """What error feedback has left out so far, and what numbers random roundings. A collective call, between steps.

        The residuals are DTensors with the placements of their parameters: the means over ranks. Save the state with
        ``torch.distributed.checkpoint``, which also calls this and :meth:`load_state_dict` of a handle that it is
        given, and load it on any number of ranks. Nothing that was left out is lost; the bits of the next steps differ
        from an uninterrupted run's, because every rank then has the mean as its residual. Without error feedback
        training goes on with the same bits.

        Args:
            consolidated: whether to return whole tensors on cpu instead, the same on every rank, for a file that one
                rank writes. Each rank then holds all residuals in fp32.
        """
        self._pending.finish()
        return state.state_dict(self._comms, consolidated)

    def load_state_dict(self, state_dict: dict) -> None:
        """Replaces the state, of either form. A collective call, between steps.

        Raises:
            ValueError: `state_dict` is of another model, or of a configuration with other residuals.
        """
        self._pending.finish()
        state.load_state_dict(self._comms, state_dict)

    def nonfinite_report(self) -> list[NonFinite]:
        """NaN and Inf counts of every rank; see :meth:`fusedcomm.Handle.nonfinite_report`. With HSDP, of the ranks with
        the shards of this rank's copy. A bucket is a module. Empty with config="off". A collective call."""
        if self._is_off:
            return []
        rank = dist.get_rank()
        module_of = {p.name: comm.sharded.name for comm in self._comms for p in comm.sharded.parameters}
        own = [
            NonFinite(rank, module_of[name], name, count)
            for mesh in self._meshes
            for name, count in mesh.stats().nonfinite_by_parameter.items()
        ]
        return self._session.everybodys(own)

    def trace(self, path: str | os.PathLike, all_ranks: bool = False) -> contextlib.AbstractContextManager[None]:
        """Records when each stage ran, of the modules on the model's own mesh. See :meth:`fusedcomm.Handle.trace`."""
        if not self._attached:
            raise RuntimeError("fusedcomm: this handle is detached, so there is nothing to trace: attach again")
        if self._is_off:
            raise RuntimeError(
                "fusedcomm: config='off' leaves the sums to torch, so fusedcomm has nothing to trace. Use "
                "torch.profiler, or attach with the wire that you want to trace, config='bf16' for example"
            )
        return self._session.recorder.record(path, all_ranks, self._model)

    def detach(self) -> None:
        """Stops the engines and restores torch's own collectives. Call it on every rank between steps. Idempotent."""
        if not self._attached:
            return
        self._attached = False
        for mesh in self._meshes:
            mesh.stop("fusedcomm was detached")

    def __repr__(self) -> str:
        """One line, which waits for nothing: ``<fusedcomm.FsdpHandle: wire int8, 2 ranks, 5 modules, 10 steps>``."""
        if not self._attached:
            return "<fusedcomm.FsdpHandle: detached>"
        first = self._meshes[0]
        shards, replicas = first.num_shards, first.num_replicas
        ranks = f"{shards * replicas} ranks"
        if replicas > 1:
            ranks += f" ({shards} shards × {replicas} replicas)" if shards > 1 else f" ({replicas} replicas)"
        ranks += f", {len(self._meshes)} meshes" if len(self._meshes) > 1 else ""
        how = "off, torch's own sums" if self._is_off else f"wire {first.config.wire}"
        steps = "" if self._is_off else f", {first.num_steps} steps"
        return f"<fusedcomm.FsdpHandle: {how}, {ranks}, {len(self._comms)} modules{steps}>"

    def __str__(self) -> str:
        """How gradients are sent now, in one line, and the statistics as a table."""
        if not self._attached:
            return repr(self)
        return f"fusedcomm: {self.plan().headline}\n{self.stats()}"

    def __enter__(self) -> "FsdpHandle":
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()
