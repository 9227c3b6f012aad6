"""``fusedcomm plan``: the bytes of a step on machines that need not be there, and their time on the line.

The bytes are those of the engine's own plans (csrc/engine/plan.h), for buckets as large as DDP's. The times follow from
them:

1. The line between hosts carries what a host sends to others, the line within a host what a rank sends to others
   there, both at once: the slower of the two is the time on the line.
2. Equal buckets become ready one after another, evenly over the backward pass. The line sends them in turn.
3. What the line still sends when the backward pass has ended is added to the step. Latency, encoding and the cores'
   work for sending come on top, so an added time is a floor.
"""

import dataclasses
from collections.abc import Sequence

import torch

from fusedcomm import chunks
from fusedcomm.config import SUMS, Config
from fusedcomm.literals import Sum, Wire
from fusedcomm.native import _C
from fusedcomm.ranks.hosts import AUTO
from fusedcomm.tools.code import attach_arguments

BUCKET_NBYTES = 25 << 20
"""DDP's default bucket_cap_mb, in bytes."""
LINE_SHARE = 0.949
"""Share of a line's rate that gradients can use: TCP's payload in a full Ethernet frame."""
HIDDEN = 0.03
"""Share of a step. Gradients that add no more to it count as hidden."""
OFF = "off"


@dataclasses.dataclass(frozen=True)
class Machines:
    """Equal hosts. Rates are Gbit/s each way: `nic_gbps` of a host, `local_gbps` of a rank to others on its host."""

    hosts: int
    ranks_per_host: int
    nic_gbps: float
    local_gbps: float

    @property
    def ranks(self) -> int:
        """Ranks on all hosts."""
        return self.hosts * self.ranks_per_host


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of one rank without synchronization, and the fp32 gradients that it makes."""

    numel: int
    seconds: float
    backward_share: float

    @property
    def num_buckets(self) -> int:
        """Buckets of equal size, as near to DDP's as they can be."""
        return max(1, round(4 * self.numel / BUCKET_NBYTES))


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to send the gradients of a step."""

    wire: str
    """OFF: DDP's own all-reduce, around a ring that leaves each host once."""
    sum: str
    by_host: bool
    """Whether sums have two levels, within hosts first."""
    code: str
    """The arguments of fusedcomm.attach after the module, as source text; empty if `wire` is OFF."""
    between_nbytes: int
    """Bytes that a host sends to other hosts."""
    inside_nbytes: int
    """Bytes that a rank sends to others on its host, in the mean of its ranks."""
    line_s: float
    """Seconds that these bytes need on their lines."""
    added_s: float
    """Seconds by which they make the step longer."""
    hides: bool

    @property
    def way(self) -> str:
        """The wire and the sum, for people. Never empty."""
        return self.wire if self.wire == OFF else f"{self.wire} {self.sum}" + (" by host" if self.by_host else "")


def added_s(line_s: float, backward_s: float, num_buckets: int) -> float:
    """Seconds that the line is busy after the backward pass. Either it waits for the last bucket, or it has been busy
    since the first one was ready."""
    of_bucket_s, first_ready_s = line_s / num_buckets, backward_s / num_buckets
    return max(of_bucket_s, first_ready_s + line_s - backward_s)


def plan(machines: Machines, step: Step, wires: Sequence[Wire]) -> list[Row]:
    """DDP's own all-reduce, then each of `wires` with each sum that it can have, the one of "auto" first."""
    several_ranks, several_hosts = machines.ranks_per_host > 1, machines.hosts > 1
    ring = 8 * step.numel * (machines.ranks - 1) // machines.ranks
    between = ring if several_hosts else 0  # one of a host's ranks sends to another host
    inside = (machines.ranks_per_host * ring - between) // machines.ranks_per_host
    rows = [_row(OFF, "exact", False, "", between, inside, machines, step)]
    for wire in wires:
        found: dict[tuple[str, bool], Row] = {}
        for hosts in (AUTO, None) if several_ranks and several_hosts else (AUTO,):
            for sum in sorted(SUMS, key=lambda sum: sum != "auto"):
                config = _config(wire, sum, hosts)
                if config is not None:
                    row = _planned(config, machines, step)
                    found.setdefault((row.sum, row.by_host), row)
        rows += found.values()
    return rows


def _config(wire: Wire, sum: Sum, hosts: str | None) -> Config | None:
    """None if this wire cannot be summed in this way."""
    try:
        return Config(wire, sum, hosts=hosts)
    except ValueError:
        return None


def _planned(config: Config, machines: Machines, step: Step) -> Row:
    """The row of `config`, from the engine's plan of each bucket."""
    per_host = machines.ranks_per_host
    by_host = config.two_levels is not None and 1 < per_host < machines.ranks
    native = chunks.native(config, machines.ranks, ranks_per_host=per_host if by_host else 1)
    like = torch.empty(0, dtype=torch.float32)
    ends = [step.numel * (bucket + 1) // step.num_buckets for bucket in range(step.num_buckets)]
    numels = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    # Most buckets are equally large, and a plan depends on nothing else.
    plans = {numel: _C.plan_bucket(native, machines.ranks, like, [(numel, 0)]) for numel in set(numels)}
    sent = sum(plans[numel].sent_nbytes for numel in numels)
    between = 0  # of a rank, in the mean of a host's ranks
    if machines.hosts > 1:
        between = sum(plans[numel].sent_between_hosts_nbytes(per_host, 1) for numel in numels)
    largest = plans[max(numels)]
    code = attach_arguments(config)
    return _row(config.wire, largest.sum, by_host, code, per_host * between, sent - between, machines, step)


def _row(
    wire: str, sum: str, by_host: bool, code: str, between: int, inside: int, machines: Machines, step: Step
) -> Row:
    nbytes_per_s = 1e9 / 8 * LINE_SHARE
    line_s = max(between / machines.nic_gbps, inside / machines.local_gbps) / nbytes_per_s
    added = added_s(line_s, step.seconds * step.backward_share, step.num_buckets)
    hides = added <= HIDDEN * step.seconds
    return Row(wire, sum, by_host, code, between, inside, line_s, added, hides)


def answer(rows: Sequence[Row], step: Step) -> str:
    """The conclusion from the rows, in one line. Never empty."""
    off, *ours = rows
    if off.hides:
        return "Leave fusedcomm off: DDP's own all-reduce hides behind the backward pass"
    adds = f"DDP's own all-reduce adds {off.added_s * 1e3:.1f} ms to a step of {step.seconds * 1e3:g} ms"
    hiding = [row for row in ours if row.hides]
    if hiding:  # the first is the most exact, unless --wires has another order
        return f"{adds}; the first that hides: {hiding[0].way}, fusedcomm.attach(ddp, {hiding[0].code})"
    least = min(ours, key=lambda row: row.added_s)
    return f"{adds}; none hides. The least, {least.added_s * 1e3:.1f} ms: fusedcomm.attach(ddp, {least.code})"
