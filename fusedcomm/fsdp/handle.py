"""The handle of an attachment to an FSDP2 model."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import fusedcomm.fsdp.state as state
from fusedcomm.fsdp.all_gather import VALUE
from fusedcomm.fsdp.mesh import Meshes, MeshSums
from fusedcomm.fsdp.plan import FsdpPlan
from fusedcomm.session.compare import ParameterDifference
from fusedcomm.session.handle import CommHandle
from fusedcomm.session.stats import NonFinite, Stats, nonfinite_of_all, together


class FsdpHandle(CommHandle):
    """One attachment of fusedcomm to an FSDP2 model; made by :func:`fusedcomm.attach`.

    With "off" torch reduces, as without fusedcomm: nothing is counted or traced, and the state is what was loaded.

    ``plan()`` shows how each module's gradients are sent, as a :class:`fusedcomm.fsdp.plan.FsdpPlan`. In ``stats()`` a
    bucket is the reduce-scatter of one module; with replicate(), which has none, its all-reduce; with
    ``Config(params=…)`` also each all-gather, whose rows count as gradients. Of modules on several meshes the counts
    are added up, and the times and steps are those of the model's own mesh.
    """

    _runs: Meshes | None

    def __init__(self, model: nn.Module, meshes: list[MeshSums]) -> None:
        super().__init__(Meshes(meshes))
        self._model = model
        self._guard = model.register_forward_pre_hook(self._refuse_adding) if self.runs.weights is not None else None
        self._seal()

    def _let_go(self) -> None:
        if self._guard is not None:
            self._guard.remove()
        self._gather_exactly(True)

    def _refuse_adding(self, module: nn.Module, inputs: tuple) -> None:
        """Raises RuntimeError before a pass that only adds up gradients, whose weight would not be counted."""
        if self.is_copy:
            return
        adding = next((comm.sharded.title for comm in self.runs.comms if not comm.sharded.reduces), None)
        if adding is not None and torch.is_grad_enabled():
            raise RuntimeError(
                f"fusedcomm: {adding} adds up gradients of several passes, which FSDP2 cannot with weighted="
                f"{self.session.config.weighted!r}: synchronize every pass, or use DistributedDataParallel"
            )

    def _described(self) -> str:
        meshes = self.runs.meshes
        first = meshes[0]
        shards, replicas = first.num_shards, first.num_replicas
        ranks = f"{shards * replicas} ranks"
        if replicas > 1:
            ranks += f" ({shards} shards × {replicas} replicas)" if shards > 1 else f" ({replicas} replicas)"
        ranks += f", {len(meshes)} meshes" if len(meshes) > 1 else ""
        how = "off, torch's own sums" if first.is_off else f"wire {first.config.wire}"
        steps = "" if first.is_off else f", {first.num_steps} steps"
        return f"{how}, {ranks}, {len(self.runs.comms)} modules{steps}"

    def plan(self) -> FsdpPlan:
        """How each module's gradients are sent; printable."""
        first, *others = self.runs.meshes
        return first.plan(tuple(mesh.plan() for mesh in others))

    def stats(self) -> Stats:
        """Counts and times of this rank, of all meshes together."""
        is_off = self.runs.mode == "off"
        return together([mesh.stats() for mesh in self.runs.meshes if mesh.is_off == is_off])

    def _compared(self) -> ParameterDifference | None:
        """The first difference between replicas."""
        self.runs.pending.finish()
        found = [mesh.between.session.comparison.now() for mesh in self.runs.meshes if mesh.between is not None]
        return next((each for each in found if each is not None), None)

    def state_dict(self, consolidated: bool = False) -> dict:
        """The residuals of error feedback, and the number of steps. A collective call, between steps.

        The residuals are DTensors with the placements of their parameters: the means over ranks. Save the state with
        ``torch.distributed.checkpoint``, which also calls this and :meth:`load_state_dict` of a handle that it is
        given, and load it on any number of ranks. Nothing that was left out is lost; the bits of the next steps differ
        from an uninterrupted run's, because every rank then has the mean as its residual. Without error feedback
        training goes on with the same bits.

        Args:
            consolidated: whether to return whole tensors on cpu instead, the same on every rank, for a file that one
                rank writes. Each rank then holds all residuals in fp32.
        """
        self.runs.pending.finish()
        return state.state_dict(self.runs.comms, consolidated)

    def load_state_dict(self, state_dict: dict) -> None:
        """Replaces the state, of either form. A collective call, between steps.

        Raises:
            ValueError: `state_dict` is of another model, or of a configuration with other residuals.
            RuntimeError: this object has been detached.
        """
        self.refuse_detached("no reduce-scatter would use the state")
        self.runs.pending.finish()
        state.load_state_dict(self.runs.comms, state_dict)

    @contextlib.contextmanager
    def exact_params(self) -> Iterator[None]:
        """Context in which parameters are gathered exactly, for an evaluation for example, in spite of
        ``Config(params=…)``. Every rank enters and leaves it between steps."""
        self.refuse_detached("parameters are gathered exactly anyway")
        self._gather_exactly(True)
        try:
            yield
        finally:
            self._gather_exactly(False)

    def _gather_exactly(self, is_exact: bool) -> None:
        """From the next all-gather on; drops what has been gathered."""
        coded = [each for mesh in self.runs.meshes for each in mesh.coded_all_gathers]
        for each in coded:
            each.is_exact = is_exact
        for module in self._model.modules() if coded else ():
            if isinstance(module, FSDPModule):
                module.reshard()

    def nonfinite_report(self) -> list[NonFinite]:
        """NaN and Inf counts of every rank; see :meth:`fusedcomm.Handle.nonfinite_report`. With HSDP, of the ranks with
        the shards of this rank's copy. A bucket is a module. What ``Config(params=…)`` sends of a parameter follows its
        gradients as "NAME (value)". Empty with config="off". A collective call."""
        if self.runs.mode == "off":
            return []
        rank = dist.get_rank()
        module_of = {p.name: comm.sharded.name for comm in self.runs.comms for p in comm.sharded.parameters}
        own = [
            NonFinite(rank, module_of[name.removesuffix(VALUE)], name, count)
            for mesh in self.runs.meshes
            for name, count in mesh.stats().nonfinite_by_parameter.items()
        ]
        return nonfinite_of_all(own, self.session.gather)
