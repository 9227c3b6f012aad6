"""The plan of LocalSteps: what a merge sends, how long that takes, and what memory it needs."""

import dataclasses
import math

import torch

from fusedcomm.local_steps.arguments import Schedule
from fusedcomm.local_steps.messages import CONTROL_NUMEL
from fusedcomm.local_steps.progress import Progress
from fusedcomm.native import _C
from fusedcomm.session.plan import Plan, row_of
from fusedcomm.session.session import Session

_MIB = 1 << 20
_MARGIN = 1.1
"""What a message takes beside its bytes: headers of packets, and encoding before and decoding after them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalPlan(Plan):
    """What LocalSteps does. Its row is the message: few elements travel in fp32 whatever the wire is."""

    schedule: Schedule
    wire: str
    state_nbytes: int
    """Bytes that stay: the merged state."""
    under_way_nbytes: int
    """Bytes of one merge under way."""
    residual_nbytes: int
    """About as many bytes as error feedback keeps."""
    s_per_byte: float
    """Seconds for each sent byte, as given or as timed when LocalSteps was made."""
    step_s: float | None
    """Seconds of a step, as given or as measured; None if not known."""

    _of = "message"

    @property
    def line_s(self) -> float:
        """Seconds that the bytes take on the line, if nothing else is sent."""
        (row,) = self.rows
        between = row.sent_between_hosts_nbytes
        return (row.sent_nbytes if between is None else between) * self.s_per_byte

    @property
    def least_every(self) -> int | None:
        """The smallest `every`, in steps, that hides messages: above `least_delay`. None if `step_s` is not known."""
        return None if self.least_delay is None else self.least_delay + 1

    @property
    def least_delay(self) -> int | None:
        """The smallest `delay` that hides a message. None if `step_s` is not known."""
        return None if self.step_s is None else max(1, math.ceil(self.line_s * _MARGIN / self.step_s))

    @property
    def headline(self) -> str:
        of, (row,) = self.schedule, self.rows
        return f"local steps, a merge every {of.period}, {of.delay} steps late, {row.wire}, {self.world_size} ranks"

    def _ends(self) -> list[str]:
        of = self.schedule
        hides = ""
        if self.step_s is not None and self.least_every is not None:
            least = f'"{self.least_every * self.step_s:.3g}s"' if of.seconds is not None else str(self.least_every)
            hides = (
                f"; a step takes {self.step_s:.3g} s, so every={least} is the least that hides them, with "
                f"delay={self.least_delay}"
            )
        lines = [
            f"  each rank sends {self.sent_nbytes / _MIB:.3f} MiB in {of.period}, {self.line_s:.3g} s on the line"
            + hides
        ]
        parts = (self.state_nbytes, self.under_way_nbytes, self.residual_nbytes)
        lines.append(
            "  memory, MiB: merged state {:.1f}, a merge under way {:.1f}, residuals {:.1f}".format(
                *(part / _MIB for part in parts)
            )
        )
        return lines


def make_plan(
    session: Session,
    of: Progress,
    bits_s: float | None,
    step_s: float | None,
) -> LocalPlan:
    """See :meth:`fusedcomm.LocalSteps.plan`."""
    state, residual_nbytes = of.state, 0
    own_host = session.levels.own_host if session.levels.hosts is not None and session.ranks_per_host > 1 else None
    slices = [(each.local.numel(), each.wire) for each in state.merged if each.local.numel()]
    slices.append((CONTROL_NUMEL, _C.EXACT_WIRE))
    like = torch.empty(0, dtype=torch.float32)
    plan = _C.plan_bucket(session.native_config, session.world_size, like, slices)
    names = tuple(each.name for each in state.merged)
    row = row_of(session.world_size, own_host, 0, names, like.dtype, state.numel, plan)
    if session.config.residual_format is not None and row.wire != "fp32":
        lossy = sum(each.local.numel() for each in state.merged if each.wire != _C.EXACT_WIRE)
        second = lossy // session.world_size if plan.sum == "two-shot" else 0
        residual_nbytes = _C.residual_nbytes(session.config.residual_format, lossy + second)
    return LocalPlan(
        schedule=of.schedule,
        wire=session.config.wire,
        world_size=session.world_size,
        rows=(row,),
        state_nbytes=state.anchor.nbytes,
        under_way_nbytes=2 * state.anchor.nbytes,
        residual_nbytes=residual_nbytes,
        s_per_byte=8 / bits_s if bits_s is not None else session.s_per_byte or 0.0,
        step_s=step_s,
    )
