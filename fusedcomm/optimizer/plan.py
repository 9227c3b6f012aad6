"""The plan of a ShardedOptimizer: who owns what, and what it costs."""

import dataclasses
from collections.abc import Sequence

from fusedcomm.config import Config
from fusedcomm.optimizer.exchange import Exchange
from fusedcomm.optimizer.owner import Owner
from fusedcomm.optimizer.parts import Target
from fusedcomm.session.plan import Plan, Row
from fusedcomm.session.session import Session

_MIB = 1 << 20
_MOST_SHOWN = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedPlan(Plan):
    """Who owns what, and what it costs. A row is a unit, both halves of its sum together. Bytes are of one rank.

    `master_nbytes` and `buffer_nbytes` are beside the optimizers' state of what the rank owns: fp32 copies of that, and
    rows of gradients and updates.
    `padding`: the part of the rows' elements that is no parameter's.
    `owners`: of each parameter, its elements on each rank."""

    optimizers: tuple[str, ...]
    rank: int
    wire: str
    update: str
    master_nbytes: int
    buffer_nbytes: int
    padding: float
    owners: dict[str, tuple[int, ...]]

    _of = "unit"

    @property
    def sent_between_hosts_nbytes(self) -> int:
        """Bytes of `sent_nbytes` that go to other hosts, as the mean of the ranks of this rank's host."""
        return sum(row.sent_between_hosts_nbytes or 0 for row in self.rows)

    @property
    def headline(self) -> str:
        return (
            f"{', '.join(self.optimizers)} on the owners of {len(self.owners)} parameters, {self.world_size} ranks, "
            f"gradients in {self.wire}, updates in {self.update}"
        )

    def _ends(self) -> list[str]:
        lines = [
            f"  rank {self.rank} has, beside optimizers' state, fp32 copies of {self.master_nbytes / _MIB:.2f} MiB, "
            f"rows of {self.buffer_nbytes / _MIB:.2f} MiB",
            f"  each rank sends {self.sent_nbytes / _MIB:.3f} MiB a step, {self.padding:.1%} of it padding; "
            f"{self.sent_between_hosts_nbytes / _MIB:.3f} MiB go to other hosts",
        ]
        for name, numels in list(self.owners.items())[:_MOST_SHOWN]:
            of_ranks = ", ".join(f"{numel:,} on rank {rank}" for rank, numel in enumerate(numels) if numel)
            lines.append(f"  {name}: {of_ranks or 'no elements'}")
        if len(self.owners) > _MOST_SHOWN:
            lines.append(f"  … {len(self.owners)} parameters in all: plan().owners")
        return lines


def make_plan(
    owner: Owner,
    exchanges: Sequence[Exchange],
    targets: Sequence[Target],
    sums: Session,
    update: Config,
) -> ShardedPlan:
    """The plan of this rank."""
    owners = {target.name: [0] * sums.world_size for target in targets}
    own, rows = sums.levels.own_host, []
    numel = padding = 0
    for index, exchange in enumerate(exchanges):
        of_all = exchange.unit.row_numel * sums.world_size
        names = tuple(targets[i].name for i in exchange.unit.targets)
        nbytes = of_all * exchange.unit.dtype.itemsize
        wires = f"{sums.config.wire}, {update.wire}"
        sent = sum(plan.sent_nbytes for plan in exchange.plans)
        between = own.sent_nbytes(exchange.plans) // own.num_ranks
        rows.append(
            Row(f"unit {index}", names, nbytes, wires, "two-shot", None, sent, sent_between_hosts_nbytes=between)
        )
        numel += of_all
        padding += exchange.unit.padding
        for piece in exchange.unit.pieces:
            owners[targets[piece.target].name][piece.owner] += piece.end - piece.begin
    return ShardedPlan(
        rows=tuple(rows),
        optimizers=tuple(type(optimizer).__name__ for optimizer in owner.optimizers),
        world_size=sums.world_size,
        through_torch=sums.through_torch,
        rank=sums.rank,
        wire=sums.config.wire,
        update=update.wire,
        master_nbytes=sum(exchange.owned.nbytes for exchange in exchanges),
        buffer_nbytes=sum(exchange.buffer_nbytes for exchange in exchanges),
        padding=padding / numel if numel else 0.0,
        owners={name: tuple(numels) for name, numels in owners.items()},
    )


def warn_of_one_level(plan: ShardedPlan, sums: Session) -> None:
    """Warns if sums and updates on one level send more between hosts than the ring of DDP's own all-reduce."""
    own = sums.levels.own_host
    if own.num_ranks > 1:
        now = own.num_ranks * plan.sent_between_hosts_nbytes
        ring = 2 * (plan.world_size - 1) * plan.grad_nbytes * own.num_links // plan.world_size
        sums.levels.warn_of_more(sums.config, now, "DDP's own all-reduce", ring, stacklevel=3)
