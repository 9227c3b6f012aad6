"""The handle of an attachment to an FSDP2 model."""

import contextlib
import dataclasses
import os

from torch import nn

from fusedcomm.fsdp.comm import FusedReduceScatter, Pending
from fusedcomm.native import _C
from fusedcomm.session.session import Session
from fusedcomm.session.stats import NonFinite, Stats


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """The reduce-scatter of one module. `sent_nbytes`: that a rank sends in one step; `fp32_nbytes`: with torch's own
    in fp32."""

    module: str
    num_parameters: int
    numel: int
    wires: tuple[str, ...]
    sent_nbytes: int
    fp32_nbytes: int


@dataclasses.dataclass(frozen=True)
class FsdpPlan:
    """How gradients are reduce-scattered; ``str(plan)`` is what rank 0 prints."""

    wire: str
    world_size: int
    codec: str
    scratch_nbytes: int
    rows: tuple[ModuleRow, ...]
    reduces_further: bool

    def __str__(self) -> str:
        sent, exact = sum(row.sent_nbytes for row in self.rows), sum(row.fp32_nbytes for row in self.rows)
        lines = [
            f"fusedcomm: FSDP2 reduce-scatters in {self.wire}, {self.world_size} ranks, codec {self.codec}, buffers "
            f"{self.scratch_nbytes / 2**20:.1f} MiB",
            f"  a rank sends {sent / 2**20:.2f} MiB for the gradients of a step, {sent / max(1, exact):.3f} of fp32",
        ]
        if self.reduces_further:
            lines.append("  the all-reduce between the groups that share shards is torch's own")
        for row in self.rows:
            lines.append(
                f"  {row.module or '(model)'}: {row.num_parameters} parameters, {row.numel:,} elements, "
                f"{'+'.join(row.wires)}"
            )
        return "\n".join(lines)


class FsdpHandle:
    """One attachment of fusedcomm to an FSDP2 model; made by :func:`fusedcomm.attach`."""

    def __init__(self, model: nn.Module, session: Session, comms: list[FusedReduceScatter]) -> None:
        self._model, self._session, self._comms = model, session, comms
        self._attached = True
        pending = Pending()
        for comm in comms:
            comm.use(pending)
            comm.sharded.module.set_custom_reduce_scatter(comm)

    def plan(self) -> FsdpPlan:
        """How each module's gradients are sent; printable."""
        session = self._session
        config, world_size = session.config, session.world_size
        rows = []
        for comm in self._comms:
            trained = [p for p in comm.sharded.parameters if p.is_trained]
            numel = sum(p.row_numel for p in trained)
            numbers = [config.wire_number(p.name, p.tensor) for p in trained]
            names = ["fp32" if number == _C.EXACT_WIRE else config.numbered_wires[number] for number in numbers]
            rows.append(
                ModuleRow(
                    module=comm.sharded.name,
                    num_parameters=len(trained),
                    numel=numel * world_size,
                    wires=tuple(dict.fromkeys(names)),
                    sent_nbytes=comm.native().sent_nbytes,
                    fp32_nbytes=4 * numel * (world_size - 1),
                )
            )
        return FsdpPlan(
            wire=config.wire,
            world_size=world_size,
            codec=session.codec,
            scratch_nbytes=session.hook.scratch_nbytes,
            rows=tuple(rows),
            reduces_further=any(comm.sharded.reduces_further for comm in self._comms),
        )

    def stats(self) -> Stats:
        """Counts and times of this rank since attach. A bucket is one module's reduce-scatter."""
        return self._session.stats()

    def nonfinite_report(self) -> list[NonFinite]:
        """Every rank's NaN and Inf counts; see :meth:`fusedcomm.Handle.nonfinite_report`. A collective call."""
        return self._session.nonfinite_report()

    def trace(self, path: str | os.PathLike, all_ranks: bool = False) -> contextlib.AbstractContextManager[None]:
        """Records when each stage of each reduce-scatter ran. See :meth:`fusedcomm.Handle.trace`."""
        if not self._attached:
            raise RuntimeError("fusedcomm: this handle is detached, so there is nothing to trace")
        return self._session.recorder.record(path, all_ranks, self._model)

    def detach(self) -> None:
        """Stops the engine and restores torch's own reduce-scatters. Call it on every rank between steps.
        Idempotent."""
        if not self._attached:
            return
        self._attached = False
        for comm in self._comms:
            comm.sharded.restore()
        self._session.stop("fusedcomm was detached")

    def __enter__(self) -> "FsdpHandle":
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()
