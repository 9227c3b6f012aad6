"""The handle of an attachment to an FSDP2 model."""

import contextlib
import dataclasses
import os

import torch.distributed as dist
from torch import nn

import fusedcomm.fsdp.state as state
from fusedcomm.config import Config
from fusedcomm.fsdp.comm import FusedReduceScatter, Pending
from fusedcomm.fsdp.levels import Sums
from fusedcomm.fsdp.replicas import ReplicaSums
from fusedcomm.fsdp.verify import Verifier
from fusedcomm.native import _C
from fusedcomm.session.session import Session
from fusedcomm.session.stats import NonFinite, Stats


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """The gradients of one module. `numel`: of all ranks' slices, padding included. `sent_nbytes`: that a rank sends
    in the reduce-scatter of one step; `fp32_nbytes`: with torch's own in fp32. Both are 0 without a reduce-scatter."""

    module: str
    num_parameters: int
    numel: int
    wires: tuple[str, ...]
    sent_nbytes: int
    fp32_nbytes: int


@dataclasses.dataclass(frozen=True)
class FsdpPlan:
    """How gradients are sent; ``str(plan)`` is what rank 0 prints. `num_shards`: ranks of a reduce-scatter, in `wire`;
    `num_replicas`: ranks of the all-reduce that follows, in `wire_of_replicas`; 1 for neither. `residual_nbytes`: of
    this rank's error feedback in reduce-scatters."""

    wire: str
    wire_of_replicas: str
    num_shards: int
    num_replicas: int
    codec: str
    scratch_nbytes: int
    residual_nbytes: int
    rows: tuple[ModuleRow, ...]

    def __str__(self) -> str:
        sums = []
        if self.num_shards > 1:
            sums.append(f"reduce-scatters in {self.wire} over {self.num_shards} ranks")
        if self.num_replicas > 1:
            sums.append(f"all-reduces in {self.wire_of_replicas} over {self.num_replicas} replicas")
        lines = [
            f"fusedcomm: FSDP2: {' and '.join(sums)}, codec {self.codec}, buffers {self.scratch_nbytes / 2**20:.1f} MiB"
        ]
        if self.residual_nbytes:
            lines.append(
                f"  error feedback: each rank keeps {self.residual_nbytes / 2**20:.2f} MiB of residuals of "
                "reduce-scatters, as many elements as the unsharded parameters that are sent with errors"
            )
        sent, exact = sum(row.sent_nbytes for row in self.rows), sum(row.fp32_nbytes for row in self.rows)
        if exact:
            lines.append(
                f"  reduce-scatters: a rank sends {sent / 2**20:.2f} MiB in a step, {sent / exact:.3f} of fp32"
            )
        for row in self.rows:
            lines.append(
                f"  {row.module or '(model)'}: {row.num_parameters} parameters, {row.numel:,} elements, "
                f"{'+'.join(row.wires)}"
            )
        return "\n".join(lines)


class FsdpHandle:
    """One attachment of fusedcomm to an FSDP2 model; made by :func:`fusedcomm.attach`."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        sums: Sums,
        session: Session | None,
        replicas: ReplicaSums | None,
        comms: list[FusedReduceScatter],
        verifier: Verifier,
    ) -> None:
        self._model, self._config, self._sums, self._session, self._replicas = model, config, sums, session, replicas
        self._comms, self._verifier = comms, verifier
        self._attached = True
        self._pending = Pending()
        for comm in comms:
            comm.use(self._pending, verifier)
            comm.sharded.module.set_custom_reduce_scatter(comm)

    @property
    def _sessions(self) -> list[Session]:
        all_reduce = None if self._replicas is None else self._replicas.session
        return [each for each in (self._session, all_reduce) if each is not None]

    def plan(self) -> FsdpPlan:
        """How each module's gradients are sent; printable."""
        num_shards = 1 if self._session is None else self._session.world_size
        return FsdpPlan(
            wire=self._config.wire if self._sums.rows is None else self._sums.rows.wire,
            wire_of_replicas=self._config.wire,
            num_shards=num_shards,
            num_replicas=1 if self._replicas is None else self._replicas.session.world_size,
            codec=self._sessions[0].codec,
            scratch_nbytes=sum(session.hook.scratch_nbytes for session in self._sessions),
            residual_nbytes=sum(comm.residual_nbytes for comm in self._comms),
            rows=tuple(self._row(comm, num_shards) for comm in self._comms),
        )

    def _row(self, comm: FusedReduceScatter, num_shards: int) -> ModuleRow:
        trained = [p for p in comm.sharded.parameters if p.is_trained]
        # With two sums, those of the reduce-scatter.
        config, wire_of = self._sums.rows or self._config, self._sums.wire_of
        numbers = [wire_of(p.name, p.tensor) for p in trained]
        wires = ["fp32" if number == _C.EXACT_WIRE else config.numbered_wires[number] for number in numbers]
        numel = sum(p.row_numel for p in trained)
        return ModuleRow(
            module=comm.sharded.name,
            num_parameters=len(trained),
            numel=numel * num_shards,
            wires=tuple(dict.fromkeys(wires)),
            sent_nbytes=0 if self._session is None else comm.native().sent_nbytes,
            fp32_nbytes=4 * numel * (num_shards - 1),
        )

    def stats(self) -> Stats:
        """Counts and times of this rank since attach. A bucket is the reduce-scatter of one module; with replicate(),
        which has none, its all-reduce."""
        found = self._sessions[0].stats()
        counts = found.nonfinite_by_parameter | self._nonfinite()
        return dataclasses.replace(found, verified=self._verifier.kept, nonfinite_by_parameter=counts)

    def _nonfinite(self) -> dict[str, int]:
        return {name: count for comm in self._comms for name, count in comm.nonfinite().items()}

    def state_dict(self) -> dict:
        """What error feedback has left out so far, and what numbers random roundings. A collective call, between steps.

        The residuals are DTensors with the placements of their parameters: the means over ranks. Save the state with
        ``torch.distributed.checkpoint``, which also calls this and :meth:`load_state_dict` of a handle that it is
        given, and load it on any number of ranks. Nothing that was left out is lost; the bits of the next steps differ
        from an uninterrupted run's, because every rank then has the mean as its residual. Without error feedback
        training goes on with the same bits.
        """
        self._pending.finish()
        return state.state_dict(self._comms)

    def load_state_dict(self, state_dict: dict) -> None:
        """Replaces the state. A collective call, between steps.

        Raises:
            ValueError: `state_dict` is of another model, or of a configuration with other residuals.
        """
        self._pending.finish()
        state.load_state_dict(self._comms, state_dict)

    def nonfinite_report(self) -> list[NonFinite]:
        """NaN and Inf counts of every rank; see :meth:`fusedcomm.Handle.nonfinite_report`. With HSDP, of the ranks with
        the shards of this rank's copy. A bucket is a module. A collective call."""
        session = self._sessions[0]
        if self._session is None:
            return session.nonfinite_report()
        module_of = {p.name: comm.sharded.name for comm in self._comms for p in comm.sharded.parameters}
        rank = dist.get_rank()
        own = [NonFinite(rank, module_of[name], name, count) for name, count in self._nonfinite().items()]
        return session.everybodys(own)

    def trace(self, path: str | os.PathLike, all_ranks: bool = False) -> contextlib.AbstractContextManager[None]:
        """Records when each stage ran, of what :meth:`stats` counts. See :meth:`fusedcomm.Handle.trace`."""
        if not self._attached:
            raise RuntimeError("fusedcomm: this handle is detached, so there is nothing to trace: attach again")
        return self._sessions[0].recorder.record(path, all_ranks, self._model)

    def detach(self) -> None:
        """Stops the engines and restores torch's own collectives. Call it on every rank between steps. Idempotent."""
        if not self._attached:
            return
        self._attached = False
        for comm in self._comms:
            comm.sharded.restore()
        for session in self._sessions:
            session.stop("fusedcomm was detached")

    def __enter__(self) -> "FsdpHandle":
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()
