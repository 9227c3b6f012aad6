"""The plan of LocalSteps: what a merge sends, how long that takes, and what memory it needs."""

import dataclasses
import math

import torch

from fusedcomm.local_steps.arguments import Schedule
from fusedcomm.local_steps.messages import CONTROL_NUMEL
from fusedcomm.local_steps.progress import Progress
from fusedcomm.native import _C
from fusedcomm.session.plan import Plan, Row, row_of
from fusedcomm.session.session import Session

_MIB = 1 << 20
_MARGIN = 1.1
"""What a message takes beside its bytes: headers of packets, and encoding before and decoding after them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalPlan(Plan):
    """What LocalSteps does. A row is the message of a fragment: few elements travel in fp32 whatever the wire is."""

    schedule: Schedule
    wire: str
    state_nbytes: int
    """Bytes that stay: the merged state."""
    under_way_nbytes: int
    """Bytes of one merge under way."""
    outer_nbytes: int
    """Bytes of the outer optimizer's state."""
    residual_nbytes: int
    """About as many bytes as error feedback keeps."""
    s_per_byte: float
    """Seconds for each sent byte, as given or as timed when LocalSteps was made."""
    step_s: float | None
    """Seconds of a step, as given or as measured; None if not known."""

    _of = "fragment"

    @property
    def fragments(self) -> tuple[Row, ...]:
        """The rows."""
        return self.rows

    @property
    def line_s(self) -> float:
        """Seconds that the bytes take on the line, if nothing else is sent."""
        return sum(map(line_nbytes, self.rows)) * self.s_per_byte

    @property
    def is_waited_for(self) -> bool:
        """Whether every merge waits for its message, whatever it takes, so that none can be hidden."""
        return self.schedule.merge == "average"

    @property
    def least_every(self) -> int | None:
        """The smallest `every`, in steps, within which all messages are hidden: bytes fit on the line, and the delay is
        below it. None if `step_s` is not known, or if every merge waits for its message."""
        delay, of_line = self.least_delay, self._steps_for(self.line_s)
        return None if delay is None or of_line is None else max(delay + 1, of_line)

    @property
    def least_delay(self) -> int | None:
        """The smallest `delay` that hides the largest message. None if `step_s` is not known, or if none can."""
        if self.is_waited_for:
            return None
        return self._steps_for(max(map(line_nbytes, self.rows)) * self.s_per_byte)

    def _steps_for(self, line_s: float) -> int | None:
        return None if self.step_s is None else max(1, math.ceil(line_s * _MARGIN / self.step_s))

    @property
    def headline(self) -> str:
        of, wires = self.schedule, " and ".join(dict.fromkeys(row.wire for row in self.rows))
        how = f"local steps, merge {of.merge!r} every {of.period}, {of.delay} steps late"
        return f"{how}, {wires}, {self.world_size} ranks"

    def _ends(self) -> list[str]:
        of = self.schedule
        hides = "; every merge waits for them" if self.is_waited_for else ""
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
        parts = (self.state_nbytes, self.under_way_nbytes, self.outer_nbytes, self.residual_nbytes)
        lines.append(
            "  memory, MiB: merged state {:.1f}, a merge under way {:.1f}, outer optimizer {:.1f}, residuals "
            "{:.1f}".format(*(part / _MIB for part in parts))
        )
        return lines


def line_nbytes(row: Row) -> int:
    """The sent bytes that leave the host, where sums have two levels; else all."""
    between = row.sent_between_hosts_nbytes
    return row.sent_nbytes if between is None else between


def make_plan(
    session: Session,
    of: Progress,
    bits_s: float | None,
    step_s: float | None,
) -> LocalPlan:
    """See :meth:`fusedcomm.LocalSteps.plan`."""
    fragments = of.fragments
    rows, residual_nbytes = [], 0
    own_host = session.levels.own_host if session.levels.hosts is not None and session.ranks_per_host > 1 else None
    for fragment in fragments:
        slices = [(each.local.numel(), each.wire) for each in fragment.merged if each.local.numel()]
        slices.append((CONTROL_NUMEL, _C.EXACT_WIRE))
        like = torch.empty(0, dtype=torch.float32)
        plan = _C.plan_bucket(session.native_config, session.world_size, like, slices)
        names = tuple(each.name for each in fragment.merged)
        row = row_of(session.world_size, own_host, fragment.index, names, like.dtype, fragment.numel, plan)
        rows.append(row)
        if session.config.residual_format is not None and row.wire != "fp32":
            lossy = sum(each.local.numel() for each in fragment.merged if each.wire != _C.EXACT_WIRE)
            second = lossy // session.world_size if plan.sum == "two-shot" else 0
            residual_nbytes += _C.residual_nbytes(session.config.residual_format, lossy + second)
    s_per_byte = 8 / bits_s if bits_s is not None else session.s_per_byte or 0.0
    return LocalPlan(
        schedule=of.schedule,
        wire=session.config.wire,
        world_size=session.world_size,
        rows=tuple(rows),
        state_nbytes=sum(fragment.anchor.nbytes for fragment in fragments),
        under_way_nbytes=max(2 * fragment.anchor.nbytes for fragment in fragments),
        outer_nbytes=0 if of.outer is None else of.outer.nbytes,
        residual_nbytes=residual_nbytes,
        s_per_byte=s_per_byte,
        step_s=step_s,
    )
