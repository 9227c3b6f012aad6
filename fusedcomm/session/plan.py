"""The plan: what fusedcomm does with each bucket. Rank 0 prints it at attach; ``Handle.plan()`` returns it."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fusedcomm.config import Config
from fusedcomm.native import _C
from fusedcomm.ranks.hosts import Hosts, OwnHost
from fusedcomm.session.parameters import NamedParameter, trainable

if TYPE_CHECKING:
    from fusedcomm.session.session import Session

_MIB = 1 << 20

# Buckets that a printed plan has one by one; of more it has the first, the last, and a line for each way of the rest.
_MOST_SHOWN = 12
_FIRST_SHOWN, _LAST_SHOWN = 3, 2
_LEAST_WIDTH = 6  # characters of the first column


@dataclasses.dataclass(frozen=True)
class Row:
    """What is sent together: a bucket, a module of FSDP2's, LocalSteps' message, a unit of a ShardedOptimizer.

    `wire` names the wires of its lossy elements, "int4+bf16" for example; `sum` is the algorithm.
    """

    label: str
    """A bucket as statistics, traces, errors and warnings name it, "bucket 0 (a … b; 2 parameters, 1 MiB)"."""
    parameters: tuple[str, ...]
    grad_nbytes: int
    wire: str
    sum: str
    num_chunks: int | None
    """None where it is not known."""
    sent_nbytes: int
    """Bytes that this rank sends for it in one step; for sparse gradients, the bytes of a dense bucket."""
    reason: str = ""
    """Why it is not sent in the configured wire; empty if it is."""
    sent_between_hosts_nbytes: int | None = None
    """The sent bytes that go to other hosts, as the mean of the ranks of this rank's host; None with ``hosts=None``. An
    all-reduce counts as a ring in the order of ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How each row is sent; each front end has what it adds. ``str(plan)`` is what rank 0 prints."""

    rows: tuple[Row, ...]
    world_size: int
    """Ranks that sum together."""
    through_torch: str | None = None
    """Why NCCL's collectives go through torch; empty if NCCL is called directly; None without NCCL."""

    _of = "bucket"
    """What a row is, for people."""

    @property
    def grad_nbytes(self) -> int:
        """Bytes of all rows' gradients."""
        return sum(row.grad_nbytes for row in self.rows)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return sum(row.sent_nbytes for row in self.rows)

    @property
    def headline(self) -> str:
        """How it is sent, in one line."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join([f"fusedcomm: {self.headline}", *self._nccl(), *self._table(), *self._ends()])

    def _ends(self) -> list[str]:
        """What is told under the rows."""
        return []

    def _nccl(self) -> list[str]:
        """How NCCL is called; empty without it."""
        if self.through_torch is None:
            return []
        if self.through_torch:
            return [f"  NCCL is called through torch: {self.through_torch}"]
        but = f"through torch for the last {self._of} of a pass, so that its watchdog sees a hang"
        return [f"  NCCL is called directly, but {but}"]

    def _table(self) -> list[str]:
        head = f"{'MiB':>9} {'wire':>9} {'sum':>9} {'chunks':>6} {'sends MiB':>9}  parameters"
        rows = [(str(index), _line(row)) for index, row in enumerate(self.rows)]
        if len(rows) > _MOST_SHOWN:
            rows[_FIRST_SHOWN:-_LAST_SHOWN] = [("…", line) for line in self._rest()]
        width = max(len(self._of), _LEAST_WIDTH)
        return [f"  {first:>{width}} {line}" for first, line in [(self._of, head), *rows]]

    def _rest(self) -> list[str]:
        """The rows that are not shown one by one: a line for all that are sent in the same way."""
        like: dict[tuple[str, str, str], int] = {}  # of each way, the first row
        rest: dict[tuple[str, str, str], list[int]] = {}
        for index, row in enumerate(self.rows):
            way = (row.wire, row.sum, row.reason)
            like.setdefault(way, index)
            if _FIRST_SHOWN <= index < len(self.rows) - _LAST_SHOWN:
                rest.setdefault(way, []).append(index)
        return [
            _line_of_many(self._of, like[way], [self.rows[index] for index in indices]) for way, indices in rest.items()
        ]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of a search. ``str()`` is for people. Equal on every rank."""

    chosen: str | None
    """The candidate that is kept, "int8" for example, or "off"; None while the search goes on."""
    candidates: tuple[str, ...]
    """What is tried, in the order in which it is preferred."""
    step_ms: dict[str, float]
    """Milliseconds of a step by candidate: the median of its turns on the slowest rank; empty before the first turn."""
    num_steps: int
    """Training steps that the search has taken so far."""
    max_steps: int
    """Training steps that the search takes."""

    @property
    def finished(self) -> bool:
        """Whether a candidate has been chosen."""
        return self.chosen is not None

    @property
    def line(self) -> str:
        """The choice, or how far the search is; never empty."""
        times = ", ".join(f"{name} {step_ms:.4g} ms" for name, step_ms in self.step_ms.items())
        if not self.finished:
            tried = ", ".join(self.candidates)
            return f"config='auto' tries {tried}, step {self.num_steps} of {self.max_steps}: {times or 'no times'}"
        return f"{self.chosen} chosen by config='auto' " + (
            f"in {self.num_steps} steps: {times}" if times else "at once"
        )

    def __str__(self) -> str:
        return f"fusedcomm: {self.line}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketsPlan(Plan):
    """The effective plan of DDP's or a reducer's buckets."""

    config: Config
    """The effective configuration: both numbers of its `chunks` are set."""
    device_type: str
    codec: str
    """What the codec stages run on; on cuda also where the workspaces are."""
    scratch_nbytes: int
    exempt: tuple[str, ...]
    predicted: bool
    """Whether `rows` is a prediction: before the first backward pass, and when `off`. DDP may cut others."""
    hosts: Hosts | None = None
    """The hosts of the ranks. None with ``hosts=None``, and if hosts have different numbers of ranks."""
    one_level_reason: str = ""
    """Why sums have one level although `config.hosts` is not None; empty if they have two, or with ``hosts=None``."""
    off: bool = False
    """Whether gradients go through DDP's own all-reduce: with "off", if "auto" tries it now or has chosen it,
    or `detached`."""
    tuning: Tuning | None = None
    """What config="auto" has found; None for other wires."""
    frozen: bool = False
    """Whether no parameter requires gradients now. `rows` is then empty, or shows the last backward pass."""
    detached: bool = False
    """Whether the handle has been detached. `config` and `codec` are then those that it had."""
    kept_nbytes: int = 0
    """With members: bytes of the codes and means that this rank keeps of all buckets."""

    @property
    def buckets(self) -> tuple[Row, ...]:
        """The rows."""
        return self.rows

    @property
    def sent_between_hosts_nbytes(self) -> int | None:
        """None with ``hosts=None``."""
        rows = [row.sent_between_hosts_nbytes for row in self.rows]
        return None if None in rows or not (rows or self.hosts) else sum(rows)

    @property
    def headline(self) -> str:
        """How gradients are sent, in one line."""
        return f"detached, {self._off_text()}" if self.detached else self._way()

    def __str__(self) -> str:
        lines = self._head()
        if self.one_level_reason and not self.off:
            hosts = self.config.groups or self.config.hosts
            lines.append(f"  sums have one level, not two: {self.one_level_reason} (hosts={hosts!r})")
        if not self.off:
            lines += self._nccl()
        if self.frozen:
            lines.append("  no parameter requires gradients: nothing is sent until one does")
        if self.rows or not self.frozen:
            lines += self._table() + self._sent()
        if self.exempt:
            shown = ", ".join(self.exempt[:6]) + (f", … ({len(self.exempt)})" if len(self.exempt) > 6 else "")
            lines.append(f"  exact in the same payload: {shown}")
        if self.predicted and not self.frozen:
            later = "" if self.off else "; plan() after two steps shows them as they are"
            lines.append(f"  buckets as they are expected{later}")
        return "\n".join(lines)

    def _head(self) -> list[str]:
        """How gradients are sent. With "auto" the search comes first, because that is what the user asked for."""
        if self.detached:
            return [f"fusedcomm: {self.headline}"]
        if self.tuning is None:
            return [f"fusedcomm: {self._way()}"]
        return [f"fusedcomm: {self.tuning.line}", f"  now {self._way()}"]

    def _off_text(self) -> str:
        return f"DDP's own exact all-reduce, {self.world_size} ranks"

    def _way(self) -> str:
        if self.off:
            return f"off, {self._off_text()}"
        config = self.config
        wire = " ".join(
            (
                config.wire,
                *(["with error feedback"] if config.feedback else []),
            )
        )
        chunk_kib = config.chunks.nbytes >> 10
        return (
            f"wire {wire}, sum {config.sum}, {self._ranks()}, codec {self.codec}, chunks of "
            f"{chunk_kib} KiB, scratch {self.scratch_nbytes / _MIB:.1f} MiB"
            + (f", kept for lost ranks {self.kept_nbytes / _MIB:.1f} MiB" if self.kept_nbytes else "")
        )

    def _sent(self) -> list[str]:
        """What a step sends in all."""
        plain = 2 * self.grad_nbytes * (self.world_size - 1) / self.world_size
        ratio = f", {self.sent_nbytes / plain:.3f} of an uncompressed all-reduce" if plain else ""
        lines = [f"  each rank sends {self.sent_nbytes / _MIB:.3f} MiB a step{ratio}"]
        if (between := self.sent_between_hosts_nbytes) is not None:
            lines.append(
                f"  of these {between / _MIB:.3f} MiB go to other hosts, {(self.sent_nbytes - between) / _MIB:.3f} MiB "
                "stay on the host"
            )
        return lines

    def _ranks(self) -> str:
        if self.hosts is None or self.one_level_reason:
            return f"{self.world_size} ranks"
        return self.hosts.described(self.config.local_wire, self.device_type)


def _line(row: Row) -> str:
    first, last = (row.parameters[0], row.parameters[-1]) if row.parameters else ("", "")
    names = first if len(row.parameters) == 1 else f"{first} … {last} ({len(row.parameters)})"
    chunks = "" if row.num_chunks is None else row.num_chunks
    return (
        f"{row.grad_nbytes / _MIB:>9.3f} {row.wire:>9} {row.sum:>9} {chunks:>6} "
        f"{row.sent_nbytes / _MIB:>9.3f}  {names}{_in_brackets(row.reason)}"
    )


def _line_of_many(of: str, like: int, rows: Sequence[Row]) -> str:
    """One line for rows that are sent as row `like` is, which may be one of them. of: what a row is."""
    sizes = sorted(row.grad_nbytes for row in rows)
    total, sent = sum(sizes), sum(row.sent_nbytes for row in rows)
    least, most = f"{sizes[0] / _MIB:.3f}", f"{sizes[-1] / _MIB:.3f}"
    each = least if least == most else f"{least} to {most}"
    these = f"1 {of}" if len(rows) == 1 else f"{len(rows)} {of}s"
    return (
        f"{these} like {of} {like}: {rows[0].wire}, {rows[0].sum}, {each} MiB each, "
        f"{total / _MIB:.3f} MiB in all, sends {sent / _MIB:.3f} MiB{_in_brackets(rows[0].reason)}"
    )


def _in_brackets(reason: str) -> str:
    """With two spaces before it; empty if there is no reason."""
    return f"  [{reason}]" if reason else ""


def plan_of(session: "Session", bucket_nbytes_caps: list[int] | None, off: bool) -> BucketsPlan:
    """The plan for the buckets of the last backward pass; before the first, for those that DDP is expected to make.

    Args:
        bucket_nbytes_caps: DDP's caps on the bytes of its buckets. None: not known; no buckets are predicted.
        off: whether the buckets go through DDP's own all-reduce and not through this session.
    """
    now = trainable(session.parameters)
    own_host = None if session.config.hosts is None else session.levels.own_host
    rows = () if off else actual_rows(session.world_size, own_host, session.synchronizer)
    predicted = not rows
    if predicted and session.parameters is not None and bucket_nbytes_caps is not None:
        native = None if off else session.native_config
        rows = predicted_rows(native, session.world_size, own_host, now, bucket_nbytes_caps)
    return BucketsPlan(
        config=session.effective_config,
        world_size=session.world_size,
        device_type=session.device.type,
        codec=session.codec,
        scratch_nbytes=session.synchronizer.engine.scratch_nbytes if session.has_engine else 0,
        exempt=() if off else tuple(p.name for p in now if p.wire == _C.EXACT_WIRE),
        rows=rows,
        predicted=predicted,
        hosts=session.levels.hosts,
        one_level_reason=session.levels.one_level_reason,
        off=off,
        frozen=session.parameters is not None and not now,
        through_torch=session.through_torch,
    )


def predicted_rows(
    native: "_C.WireConfig | None",
    world_size: int,
    own_host: OwnHost | None,
    parameters: Sequence[NamedParameter],
    bucket_nbytes_caps: list[int],
) -> tuple[Row, ...]:
    """Rows for the buckets that DDP is expected to make of `parameters`, from the last parameter to the first.

    Args:
        native: the engine's configuration; None for DDP's own all-reduce.
        bucket_nbytes_caps: most bytes of each bucket; the last entry holds for all that follow.
    """
    if not parameters:  # torch's function fails an assertion on an empty list
        return ()
    backwards = parameters[::-1]
    indices, _ = dist._compute_bucket_assignment_by_size([p.tensor for p in backwards], bucket_nbytes_caps)
    rows = []
    for index, bucket in enumerate(indices):
        members = [backwards[position] for position in bucket]
        slices = [(p.tensor.numel() * (2 if p.tensor.is_complex() else 1), p.wire) for p in members]
        dtype = members[0].tensor.dtype.to_real()
        plan = None
        if native is not None and dtype in _C.GRAD_DTYPES:
            plan = _C.plan_bucket(native, world_size, torch.empty(0, dtype=dtype), slices)
        names, numel = tuple(parameter.name for parameter in members), sum(numel for numel, _ in slices)
        rows.append(row_of(world_size, own_host, index, names, dtype, numel, plan))
    return tuple(rows)


def actual_rows(world_size: int, own_host: OwnHost | None, synchronizer: "_C.Synchronizer") -> tuple[Row, ...]:
    """Rows for the buckets of the last backward pass."""
    rows = []
    for index, record in enumerate(synchronizer.buckets()):
        plan = None if record.passthrough else record.plan
        names = tuple(record.parameters)
        rows.append(row_of(world_size, own_host, index, names, record.dtype, record.numel, plan))
    return tuple(rows)


def row_of(
    world_size: int,
    own_host: OwnHost | None,
    index: int,
    names: tuple[str, ...],
    dtype: torch.dtype,
    numel: int,
    plan: "_C.BucketPlan | None",
) -> Row:
    """The row of a bucket with this plan.

    own_host: None: bytes between hosts are not counted. plan: None: the group's backend sums it as it is.
    """
    nbytes = numel * dtype.itemsize
    label = _C.bucket_label(index, names, nbytes)
    if plan is None:
        sent = 2 * nbytes * (world_size - 1) // world_size
        between = own_host and sent * own_host.num_links // own_host.num_ranks
        name = str(dtype).removeprefix("torch.")
        return Row(label, names, nbytes, name, "exact", 1, sent, "sent as it is", between)
    return Row(
        label=label,
        parameters=names,
        grad_nbytes=nbytes,
        wire="+".join(layout.wire for layout in plan.layouts),
        sum=plan.sum,
        num_chunks=plan.num_chunks,
        sent_nbytes=plan.sent_nbytes,
        reason=plan.reason,
        sent_between_hosts_nbytes=own_host and plan.sent_between_hosts_nbytes(own_host.num_ranks, own_host.num_links),
    )
