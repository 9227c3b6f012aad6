"""The groups of a configuration: options that make sense only together."""

import dataclasses
from collections.abc import Sequence
from typing import get_args

from fusedcomm.config import check
from fusedcomm.literals import Compare, Sum, Wire, WireWithoutScales
from fusedcomm.native import _C
from fusedcomm.ranks import hosts

WIRES: tuple[Wire, ...] = tuple(_C.WIRES)
WITH_SCALES = tuple(wire for wire in WIRES if _C.has_scales(wire))
WITHOUT_SCALES = tuple(wire for wire in WIRES if not _C.has_scales(wire))
SUMS: tuple[Sum, ...] = tuple(_C.SUMS)
COMPARE: tuple[Compare, ...] = get_args(Compare)

MOST = 2**63 - 1
"""The greatest int64."""

_POSSIBLE_HOSTS = "'auto', the number of ranks on each host, or a list of each host's ranks, [[0, 1], [2, 3]]"

LEAST_CHUNK_NBYTES, MOST_CHUNK_NBYTES = 4096, 1 << 30

ALWAYS_SHOWN = "always shown"
"""A key in a field's metadata: repr() shows the field even if it has its default."""


class Options:
    """Base of dataclasses whose repr() reads like the call that makes them: fields with their default are left out."""

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            has_factory = field.default_factory is not dataclasses.MISSING
            value = getattr(self, field.name)
            default = field.default_factory() if has_factory else field.default
            if value != default or ALWAYS_SHOWN in field.metadata:
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclasses.dataclass(frozen=True, repr=False)
class Feedback(Options):
    """Error feedback: the encoders' errors of one step are added to the gradients of the next. Rounding then delays
    gradients instead of changing them.

    Needs a two-shot or one-shot sum, which "auto" takes for all but small buckets. Residuals stay with their parameters
    when DDP rebuilds its buckets, and are in ``state_dict()``. On two levels (`Config.hosts`) a rank keeps residuals
    only for the elements that it sums for its host, 1/L of the bucket with L ranks on a host; errors of the local wire
    are lost. They are fp32: 4 bytes an element, and with two-shot 4 bytes divided by the world size in addition.

    Of FSDP2 the all-reduce of HSDP and replicate() has it. Reduce-scatters have none: a rank's residuals would be as
    large as the whole model.
    """


@dataclasses.dataclass(frozen=True, repr=False)
class Chunks(Options):
    """How a bucket is cut into chunks. Scratch memory is about 2 · nbytes · in_flight; with one-shot, world_size times
    that. On cpu it is an error if the machine has less memory.

    Args:
        nbytes: most bytes of a packed bucket that one collective sends; from 4096 to 2^30. None: 16 MiB on cuda. On
            cpu as many as the link, timed at attach, sends in 2 ms: 32 KiB to 1 MiB for each rank, at most 8 MiB. The
            time is 3 ms among more than two ranks, and 4 ms with one-shot. With "direct" and "exact" it is 8 ms between
            two ranks; among more a chunk has 512 KiB for each rank, at most 4 MiB. A bucket that is summed exactly in
            its own memory is not cut.
        in_flight: most chunks in flight at once, from 1 to 64. None: as many as 4 MiB hold, from 4 to 16; 4 on cuda.
    """

    nbytes: int | None = None
    in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.nbytes is not None:
            possible = f"a whole number of bytes from {LEAST_CHUNK_NBYTES} to {MOST_CHUNK_NBYTES}"
            check.whole("Chunks(nbytes)", self.nbytes, LEAST_CHUNK_NBYTES, MOST_CHUNK_NBYTES, possible)
        if self.in_flight is not None:
            check.whole("Chunks(in_flight)", self.in_flight, 1, 64, "a whole number from 1 to 64")


@dataclasses.dataclass(frozen=True, repr=False)
class TwoLevels(Options):
    """Sums on two levels, for links between hosts that are slower than those within a host.

    Gradients are summed first over the ranks of a host, in `local_wire`, then over hosts, in `Config.wire`. With L
    ranks on a host, each rank then sends to other hosts only 1/L of what it would send on one level.

    With one host, or with one rank on each, there is one level, and the plan says so. Two levels need the two-shot sum,
    which "auto" takes for all but small buckets. Exact sums have one level, over all ranks. Two levels add in another
    order than one. In fp16 the sum of a host's ranks must stay below 65504.

    This object asks for two levels: a configuration or hosts that exclude them are an error. ``Config(hosts="auto")``,
    the default, has two levels only where they are possible.

    Args:
        groups: "auto": ranks with the same host name share a host. A number n: each n consecutive ranks share a host.
            A list has each host's ranks: [[0, 1], [2, 3]]. Every host must have the same number of ranks.
        local_wire: the wire within a host: "bf16", "fp16" or "fp32". It adds one rounding, to nearest. None:
            `Config.wire`, or "bf16" if that has scales.
    """

    groups: str | int | Sequence[Sequence[int]] = hosts.AUTO
    local_wire: WireWithoutScales | None = None

    def __post_init__(self) -> None:
        if self.local_wire is not None:
            check.choice("TwoLevels(local_wire)", self.local_wire, WITHOUT_SCALES)
        if isinstance(self.groups, (tuple, list)):
            object.__setattr__(self, "groups", self._ordered())
        elif self.groups != hosts.AUTO:
            check.whole("hosts", self.groups, 1, MOST, _POSSIBLE_HOSTS)

    def _ordered(self) -> tuple[tuple[int, ...], ...]:
        if not all(
            isinstance(group, (list, tuple))
            and group
            and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in group)
            for group in self.groups
        ):
            raise ValueError(f"hosts={self.groups!r} is not possible: use {_POSSIBLE_HOSTS}")
        ranks = [rank for group in self.groups for rank in group]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice or not ranks:
            problem = f"rank(s) {twice} are on two hosts" if twice else "it has no ranks"
            raise ValueError(f"hosts={self.groups!r} is not possible: {problem}. Put every rank on exactly one host")
        hosts.check_even({f"hosts[{index}]": len(group) for index, group in enumerate(self.groups)})
        return hosts.ordered(self.groups)
