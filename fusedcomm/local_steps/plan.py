"""The plan of LocalSteps: what a merge sends, and what memory it needs."""

import dataclasses

import torch

from fusedcomm.local_steps.arguments import Schedule
from fusedcomm.local_steps.merges import Merges
from fusedcomm.local_steps.messages import CONTROL_NUMEL
from fusedcomm.native import _C
from fusedcomm.session.plan import Plan, row_of
from fusedcomm.session.session import Session

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalPlan(Plan):
    """What LocalSteps does. Its row is the message: few elements travel in fp32 whatever the wire is."""

    schedule: Schedule
    wire: str
    state_nbytes: int
    """Bytes that stay: the merged state."""
    under_way_nbytes: int
    """Bytes of one merge under way."""

    _of = "message"

    @property
    def headline(self) -> str:
        of, (row,) = self.schedule, self.rows
        return f"local steps, a merge every {of.period}, {of.delay} steps late, {row.wire}, {self.world_size} ranks"

    def _ends(self) -> list[str]:
        parts = (self.state_nbytes, self.under_way_nbytes)
        return [
            f"  each rank sends {self.sent_nbytes / _MIB:.3f} MiB in {self.schedule.period}",
            "  memory, MiB: merged state {:.1f}, a merge under way {:.1f}".format(*(part / _MIB for part in parts)),
        ]


def make_plan(session: Session, of: Merges) -> LocalPlan:
    """See :meth:`fusedcomm.LocalSteps.plan`."""
    state = of.state
    own_host = session.levels.own_host if session.levels.hosts is not None and session.ranks_per_host > 1 else None
    slices = [(each.local.numel(), each.wire) for each in state.merged if each.local.numel()]
    slices.append((CONTROL_NUMEL, _C.EXACT_WIRE))
    like = torch.empty(0, dtype=torch.float32)
    plan = _C.plan_bucket(session.native_config, session.world_size, like, slices)
    names = tuple(each.name for each in state.merged)
    row = row_of(session.world_size, own_host, 0, names, like.dtype, state.numel, plan)
    return LocalPlan(
        schedule=of.schedule,
        wire=session.config.wire,
        world_size=session.world_size,
        through_torch=session.through_torch,
        rows=(row,),
        state_nbytes=state.anchor.nbytes,
        under_way_nbytes=2 * state.anchor.nbytes,
    )
