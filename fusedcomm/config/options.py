"""The groups of a configuration: options that only make sense together."""

import dataclasses
from collections.abc import Sequence

from fusedcomm.config import check
from fusedcomm.native import _C
from fusedcomm.ranks import hosts

WIRES = _C.WIRES
WITH_SCALES = tuple(wire for wire in WIRES if _C.has_scales(wire))
WITHOUT_SCALES = tuple(wire for wire in WIRES if not _C.has_scales(wire))
SUMS = tuple(_C.SUMS)
ROUNDINGS = ("nearest", "stochastic")
RESIDUALS = _C.RESIDUAL_FORMATS

_MOST = 2**63 - 1

ALWAYS_SHOWN = "always shown"
"""In a field's metadata."""


class Options:
    """A dataclass that is shown as one would write it: without most fields that are as by default."""

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
class Blocks(Options):
    """How a wire with scales shares them.

    Args:
        numel: elements that share a scale of `Config.wire`; a power of two from 32 to 4096. None: 128, for int4 32. The
            wires of `Config.wires` have the default.
        rotate: runs of 32 elements are multiplied by a Hadamard matrix before they are quantised and by its inverse
            afterwards, so that an outlier costs its block less. Helps int4 on heavy-tailed gradients
            (docs/accuracy.md). An Inf or NaN becomes NaN in its whole run.
    """

    numel: int | None = None
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.numel is not None:
            possible = "a power of two from 32 to 4096 elements"
            check.whole("Blocks(numel)", self.numel, 32, 4096, possible)
            if self.numel & (self.numel - 1):
                raise ValueError(f"Blocks(numel)={self.numel} is not possible: use {possible}")
        check.flag("Blocks(rotate)", self.rotate)


@dataclasses.dataclass(frozen=True, repr=False)
class Rounding(Options):
    """How encoders round.

    Args:
        kind: "nearest", or "stochastic": up or down by chance, such that the mean of many roundings is right. Nearest
            has half the worst error; stochastic does not lose what is small in the same direction every time.
        seed: for "stochastic" only: the same seed, step and buckets give the same bits, on any device.
    """

    kind: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        check.choice("Rounding(kind)", self.kind, ROUNDINGS)
        check.whole("Rounding(seed)", self.seed, 0, 2**64 - 1, "a whole number from 0 to 2^64 - 1")
        if self.seed and self.kind == "nearest":
            raise ValueError(
                f"Rounding(kind='nearest', seed={self.seed}): rounding to nearest draws nothing, so the seed has no "
                "effect: use kind='stochastic' with it, or leave the seed out"
            )


@dataclasses.dataclass(frozen=True, repr=False)
class Feedback(Options):
    """Error feedback: what encoders leave out of a step is added to the next one, so that rounding delays gradients
    instead of changing them.

    Needs a two-shot or one-shot sum, which "auto" takes for all but small buckets. Residuals stay with their parameters
    when DDP rebuilds its buckets, and are in ``state_dict()``. With `Config.hosts` a rank keeps those of what it sums
    for its host (4 bytes divided by the host's ranks), and what the local wire leaves out is lost.

    Args:
        format: what residuals are kept in: "fp32" (4 bytes for each element, and by two-shot as much again divided by
            the ranks), or, in half of that, "bf16".
    """

    format: str = "fp32"

    def __post_init__(self) -> None:
        check.choice("Feedback(format)", self.format, RESIDUALS)


@dataclasses.dataclass(frozen=True, repr=False)
class Chunks(Options):
    """How a bucket is cut for its way. Scratch is about 2 · nbytes · in_flight, by one-shot world_size times it.

    Args:
        nbytes: most bytes of a packed bucket that one collective carries, at least 4096. None: 16 MiB on cuda; on cpu
            what takes 2 ms on the link, which is timed at attach (3 ms among more than two ranks, 4 ms by one-shot, 8
            ms by "direct" of two): 32 KiB to 1 MiB for each rank, at most 8 MiB in all. A bucket summed exactly in its
            own memory is not cut.
        in_flight: chunks under way at once, 1 to 64. None: as many as 4 MiB hold, from 4 to 16; 4 on cuda.
    """

    nbytes: int | None = None
    in_flight: int | None = None

    def __post_init__(self) -> None:
        if self.nbytes is not None:
            check.whole("Chunks(nbytes)", self.nbytes, 4096, _MOST, "a whole number of bytes, at least 4096")
        if self.in_flight is not None:
            check.whole("Chunks(in_flight)", self.in_flight, 1, 64, "a whole number from 1 to 64")


@dataclasses.dataclass(frozen=True, repr=False)
class Fallback(Options):
    """A more exact wire for buckets that turn out to be too far off.

    A bucket whose mean `Checks.verify_every` found to be off by more than `error` has its parameters sent in `wire`
    from the second step after that on, those whose wire is less exact; said once, with the numbers. With
    `Config.feedback` a result also contains what earlier steps left out. Attaching again, a restart or another process
    group begin with `Config.wire` again.

    Args:
        error: the relative error beyond which a bucket falls back.
        wire: "bf16", "fp16" or "fp32"; one that is more exact than `Config.wire`.
    """

    error: float
    wire: str = dataclasses.field(default="bf16", metadata={ALWAYS_SHOWN: True})

    def __post_init__(self) -> None:
        check.positive("Fallback(error)", self.error, "a relative error greater than 0, e.g. 0.5")
        check.choice("Fallback(wire)", self.wire, WITHOUT_SCALES)


@dataclasses.dataclass(frozen=True, repr=False)
class Checks(Options):
    """What is measured of the errors while training goes on, and what follows from it.

    Args:
        verify_every: in every so many steps one bucket, another each time, is also summed exactly, in fp32, and its
            result compared: ``stats().verified`` has the errors. That step waits for the extra bytes. 0: never.
        measure_every: in one of so many steps every bucket's relative quantisation error on this rank is measured:
            ``stats().quantisation_error``. Takes one pass over the residual, and 4 bytes for each element where there
            is no fp32 residual. 0: never.
        fallback: a :class:`Fallback`. None: never; buckets keep their wire.
    """

    verify_every: int = 0
    measure_every: int = 1000
    fallback: Fallback | None = None

    def __post_init__(self) -> None:
        for option in ("verify_every", "measure_every"):
            possible = "a whole number of steps, or 0 for never"
            check.whole(f"Checks({option})", getattr(self, option), 0, _MOST, possible)
        if self.fallback is None:
            return
        check.kind("Checks(fallback)", self.fallback, Fallback)
        if self.verify_every == 0:
            raise ValueError(
                f"Checks(verify_every=0, fallback={self.fallback}): nothing is verified, so nothing is ever found to "
                "be off: set verify_every to a number of steps, or leave fallback out"
            )


@dataclasses.dataclass(frozen=True, repr=False)
class TwoLevels(Options):
    """Sums on two levels, for links between hosts that are slower than those within: first over the ranks of a host, in
    `local_wire`, then over hosts, in `Config.wire`, so that each rank sends 1/L of what it would send to other hosts,
    where L is the number of ranks on a host.

    One host, or one rank on each, is one level, as the plan then says. Needs the two-shot sum, which "auto" takes for
    all but small buckets; what is summed exactly goes over all ranks at once. The order of addition is another than
    without.

    Args:
        groups: "auto": ranks with the same host name share a host; a number of consecutive ranks on each host; or a
            list of each host's ranks, [[0, 1], [2, 3]]. Every host must have as many ranks.
        local_wire: what travels within a host: "bf16", "fp16" or "fp32", rounded to nearest once more. None: "bf16", or
            "fp32" with wire="fp32", which is not to be rounded on its way.
    """

    groups: str | int | Sequence[Sequence[int]] = hosts.AUTO
    local_wire: str | None = None

    def __post_init__(self) -> None:
        if self.local_wire is not None:
            check.choice("TwoLevels(local_wire)", self.local_wire, WITHOUT_SCALES)
        if isinstance(self.groups, (tuple, list)):
            object.__setattr__(self, "groups", self._ordered())
        elif self.groups != hosts.AUTO:
            possible = "'auto', the number of ranks on each host, or a list of each host's ranks, [[0, 1], [2, 3]]"
            check.whole("hosts", self.groups, 1, _MOST, possible)

    def _ordered(self) -> tuple[tuple[int, ...], ...]:
        if not all(
            isinstance(group, (list, tuple))
            and group
            and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in group)
            for group in self.groups
        ):
            raise ValueError(
                f"hosts={self.groups!r} is not possible: use 'auto', the number of ranks on each host, or a list of "
                "each host's ranks, [[0, 1], [2, 3]]"
            )
        ranks = [rank for group in self.groups for rank in group]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice or not ranks:
            problem = f"rank(s) {twice} are on two hosts" if twice else "there is none"
            raise ValueError(f"hosts={self.groups!r} is not possible: {problem}")
        hosts.check_even({f"hosts[{index}]": len(group) for index, group in enumerate(self.groups)})
        return hosts.ordered(self.groups)
