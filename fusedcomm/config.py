"""What a user can choose, checked when it is chosen."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence

import torch

from fusedcomm import chunks, env, patterns
from fusedcomm.native import _C
from fusedcomm.patterns import ONE_DIMENSIONAL, Rule
from fusedcomm.ranks import hosts

WIRES = _C.WIRES
WITH_SCALES = tuple(wire for wire in WIRES if _C.has_scales(wire))
WITHOUT_SCALES = tuple(wire for wire in WIRES if not _C.has_scales(wire))
SUMS = ("auto", "exact", "direct", "two-shot", "one-shot")
ROUNDINGS = ("nearest", "stochastic")
RESIDUALS = _C.RESIDUAL_FORMATS
_LOCAL_WIRE = "bf16"
"""By default, of a wire that rounds, too."""

# Biases and norms: a fraction of a percent of the elements, and most of the damage when they are quantised.
_DEFAULT_EXEMPT = dict.fromkeys(WITH_SCALES, (ONE_DIMENSIONAL,))

MAX_CODEC_THREADS = 4
"""By default."""
MOST_CODEC_THREADS = 256
"""That can be asked for."""

STALL_AFTER_S = 60.0
"""By default a bucket that has been under way for so long without moving is a stall."""


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """What may differ from rank to rank, since no byte depends on it. None: chosen by the device's path."""

    isa: str | None = None
    codec_threads: int | None = None
    sm_limit: int | None = None
    stall_after: float | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """One configuration of the engine; the arguments of :func:`fusedcomm.attach`, which documents them.

    Raises:
        ValueError: a field is out of range or two fields cannot go together; names the field, its value and what
            is possible.
    """

    wire: str = "bf16"
    sum: str = "auto"
    exempt: tuple[str, ...] | None = None
    block: int | None = None
    predivide: float | str = "auto"
    chunk_nbytes: int | None = None
    chunks_in_flight: int | None = None
    rotate: bool = False
    wire_for: Mapping[str, str] | None = None
    rounding: str = "nearest"
    seed: int = 0
    error_feedback: bool | str | None = None
    verify_every: int = 0
    measure_every: int = 1000
    fallback_error: float | None = None
    fallback_wire: str = "bf16"
    hosts: str | tuple[tuple[int, ...], ...] | None = None
    local_wire: str | None = None

    def __post_init__(self) -> None:
        _check_choice("wire", self.wire, WIRES)
        _check_choice("sum", self.sum, SUMS)
        if self.wire_for is None:
            object.__setattr__(self, "wire_for", {})
        object.__setattr__(self, "error_feedback", residual_name(self.error_feedback))
        if self.exempt is None:
            of_1d = isinstance(self.wire_for, Mapping) and ONE_DIMENSIONAL in self.wire_for
            object.__setattr__(self, "exempt", () if of_1d else _DEFAULT_EXEMPT.get(self.wire, ()))
        if self.block is None and _C.has_scales(self.wire):
            object.__setattr__(self, "block", _C.default_block_numel(self.wire))
        if isinstance(self.exempt, str):
            raise ValueError(
                f"exempt={self.exempt!r} is one string: pass a tuple of patterns, exempt=({self.exempt!r},)"
            )
        if not isinstance(self.exempt, (tuple, list)):  # a set's order differs from rank to rank
            raise ValueError(f"exempt={self.exempt!r} is not possible: use a tuple of patterns")
        object.__setattr__(self, "exempt", tuple(self.exempt))
        if any(not isinstance(pattern, str) or not pattern for pattern in self.exempt):
            raise ValueError(
                f"exempt={self.exempt!r}: every pattern must be '1d' or a parameter name, wildcards allowed"
            )
        _check_choice("rounding", self.rounding, ROUNDINGS)
        if self.error_feedback is not None:
            _check_choice("error_feedback", self.error_feedback, RESIDUALS)
        self._check_wire_for()
        self._check_guard()
        self._check_hosts()
        for field in ("block", "chunk_nbytes", "chunks_in_flight", "seed"):
            value = getattr(self, field)
            if value is None and field != "seed":
                continue
            _check_whole(field, value)
            if field != "seed" and abs(value) >= 2**63:
                raise ValueError(f"{field}={value} is not possible: it is beyond 2^63")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed={self.seed} is not possible: use a whole number from 0 to 2^64 - 1")
        if self.seed and self.rounding == "nearest":
            raise ValueError(
                f"seed={self.seed} has no effect with rounding='nearest': use rounding='stochastic' with it"
            )
        if self.block is not None and not _C.has_scales(self.wire):
            raise ValueError(
                f"block={self.block} has no effect with wire={self.wire!r}, which rounds each element by itself: it is "
                f"for wires with scales ({', '.join(WITH_SCALES)})"
            )
        if not isinstance(self.rotate, bool):
            raise ValueError(f"rotate={self.rotate!r} is not possible: use True or False")
        if self.predivide != "auto" and (
            isinstance(self.predivide, (bool, str))
            or not isinstance(self.predivide, (int, float))
            or self.predivide <= 0
        ):
            raise ValueError(f"predivide={self.predivide!r} is not possible: use 'auto' or a positive number")
        if self.sum == "direct" and self.exempt:
            raise ValueError(
                f"sum='direct' adds the whole bucket in {self.wire} and cannot carry exempt={self.exempt!r} exactly: "
                "use sum='two-shot' or exempt=()"
            )
        exact = [pattern for pattern, wire in self.wire_for.items() if wire == "fp32"]
        if self.sum == "direct" and exact and self.wire != "fp32":
            raise ValueError(
                f"sum='direct' adds the whole bucket in {self.wire} and cannot carry wire_for[{exact[0]!r}]='fp32' "
                "exactly: use sum='two-shot', or leave it out of wire_for"
            )
        self.native(world_size=1)

    def _check_wire_for(self) -> None:
        if not isinstance(self.wire_for, Mapping):
            raise ValueError(
                f"wire_for={self.wire_for!r} is not possible: use a dict from patterns of parameter names to wires"
            )
        object.__setattr__(self, "wire_for", dict(self.wire_for))
        for pattern, wire in self.wire_for.items():
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(
                    f"wire_for[{pattern!r}]: every pattern must be '1d' or a parameter name, wildcards allowed"
                )
            _check_choice(f"wire_for[{pattern!r}]", wire, WIRES)
            if pattern in self.exempt:
                raise ValueError(
                    f"wire_for[{pattern!r}]={wire!r} has no effect, since exempt={self.exempt!r} has {pattern!r}, "
                    "too, and goes first: leave one of them out"
                )

    def _check_guard(self) -> None:
        for field in ("verify_every", "measure_every"):
            value = getattr(self, field)
            _check_whole(field, value)
            if not 0 <= value < 2**63:
                raise ValueError(f"{field}={value} is not possible: use a number of steps, or 0 for never")
        _check_choice("fallback_wire", self.fallback_wire, WITHOUT_SCALES)
        threshold = self.fallback_error
        if threshold is None:
            if self.fallback_wire != "bf16":
                raise ValueError(
                    f"fallback_wire={self.fallback_wire!r} has no effect without fallback_error: set that to the "
                    "relative error beyond which buckets fall back"
                )
            return
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold < math.inf:
            raise ValueError(
                f"fallback_error={threshold!r} is not possible: use a relative error greater than 0, e.g. 0.5, or None"
            )
        if self.verify_every == 0:
            raise ValueError(
                f"fallback_error={threshold!r} needs errors to compare with: set verify_every to a number of steps"
            )
        if self.sum in ("exact", "direct"):
            raise ValueError(
                f"fallback_error={threshold!r} needs a bucket's wire to be free to change: use sum='auto', "
                f"'two-shot' or 'one-shot' instead of sum='{self.sum}'"
            )
        self._check_fallback_wire()

    def _check_hosts(self) -> None:
        if self.local_wire is None:
            object.__setattr__(self, "local_wire", "fp32" if self.hosts and self.wire == "fp32" else _LOCAL_WIRE)
        _check_choice("local_wire", self.local_wire, WITHOUT_SCALES)
        if self.hosts is None:
            if self.local_wire != _LOCAL_WIRE:
                raise ValueError(f"local_wire={self.local_wire!r} is for sums on two levels: it needs hosts")
            return
        if self.sum not in ("auto", "two-shot"):
            raise ValueError(f"sum={self.sum!r} has one level: use sum='auto' or 'two-shot' with hosts")
        if self.wire == "fp32" and self.local_wire != "fp32":
            raise ValueError(
                f"local_wire={self.local_wire!r} would round what wire='fp32' does not: leave it out, or use 'fp32'"
            )
        if self.hosts == hosts.AUTO:
            return
        if not isinstance(self.hosts, (tuple, list)) or not all(
            isinstance(group, (list, tuple))
            and group
            and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in group)
            for group in self.hosts
        ):
            raise ValueError(
                f"hosts={self.hosts!r} is not possible: use 'auto', or a list of each host's ranks, [[0, 1], [2, 3]]"
            )
        ranks = [rank for group in self.hosts for rank in group]
        twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if twice or not ranks:
            raise ValueError(
                f"hosts={self.hosts!r} is not possible: "
                + (f"rank(s) {twice} are on two hosts" if twice else "there is none")
            )
        hosts.check_even({f"hosts[{index}]": len(group) for index, group in enumerate(self.hosts)})
        object.__setattr__(self, "hosts", hosts.ordered(self.hosts))

    def _check_fallback_wire(self) -> None:
        for wire in self.wires:
            if wire != self.fallback_wire and _C.exactness(wire) < _C.exactness(self.fallback_wire):
                break
        else:
            raise ValueError(
                f"fallback_wire={self.fallback_wire!r} is no more exact than wire={self.wire!r}: there is nothing "
                "to fall back to; use fallback_wire='fp32', or fallback_error=None"
            )

    @property
    def wires(self) -> tuple[str, ...]:
        """The wires that parameters may have, by their numbers; "fp32" has none but EXACT_WIRE, unless it is `wire`."""
        others = [wire for wire in self.wire_for.values() if wire != "fp32"]
        if self.fallback_error is not None and self.fallback_wire != "fp32":
            others.append(self.fallback_wire)
        return tuple(dict.fromkeys((self.wire, *others)))

    @property
    def formats(self) -> list[tuple[str, int, bool]]:
        """(wire, block, rotate) of each of `wires`, as the engine has them: a block also where there are no scales."""
        block = _C.default_block_numel(self.wire) if self.block is None else self.block
        others = [(wire, _C.default_block_numel(wire), self.rotate and _C.has_scales(wire)) for wire in self.wires[1:]]
        return [(self.wire, block, self.rotate), *others]

    def number_of(self, wire: str) -> int:
        """The number of a wire that parameters may have; see csrc/engine/plan.h."""
        return self.wires.index(wire) if wire in self.wires else _C.EXACT_WIRE

    @property
    def rules(self) -> list[Rule]:
        """The patterns, in their order."""
        return [
            *(Rule("exempt", pattern, "fp32") for pattern in self.exempt),
            *(Rule("wire_for", pattern, wire) for pattern, wire in self.wire_for.items()),
        ]

    def wire_number(self, name: str, parameter: torch.Tensor, other_names: Sequence[str] = ()) -> int:
        """See csrc/engine/plan.h. other_names: those of a tied parameter. ValueError: as :func:`patterns.rule_for`."""
        rule = patterns.rule_for(self.rules, (name, *other_names), parameter)
        if rule is None:
            return 0
        return _C.EXACT_WIRE if rule.field == "exempt" else self.number_of(rule.wire)

    @property
    def wire_number_1d(self) -> int:
        """Of parameters with at most one dimension of which nothing else is known."""
        return self.wire_number("", torch.empty(0))

    def resolved(
        self, world_size: int, device_type: str = "cpu", s_per_byte: float | None = None, ranks_per_host: int = 1
    ) -> "Config":
        """With numbers where `chunk_nbytes` and `chunks_in_flight` were left open.

        Args:
            s_per_byte: seconds that the link takes for each byte a rank sends, the same on every rank.
            ranks_per_host: more than one for sums on two levels.
        """
        chunk_nbytes, in_flight = chunks.choose(self, world_size, device_type, s_per_byte, ranks_per_host)
        return dataclasses.replace(self, chunk_nbytes=chunk_nbytes, chunks_in_flight=in_flight)

    def is_one_shot(self, world_size: int) -> bool:
        """Whether what the codec encodes is summed in one shot, on one level."""
        return _C.is_one_shot(self._in_any_chunks().native(world_size), world_size)

    def sum_of_large_buckets(self, world_size: int) -> str:
        """As it is planned for fp32 gradients in the wire of most parameters, on one level."""
        numels = [_C.SMALL_BUCKET_NBYTES] + [0] * (len(self.wires) - 1)
        native = self._in_any_chunks().native(world_size)
        return _C.plan_bucket(native, world_size, torch.empty(0), 0, numels).sum

    def _in_any_chunks(self) -> "Config":
        """With sizes of chunks, whatever they are: for questions that choosing them asks, too."""
        return dataclasses.replace(self, chunk_nbytes=chunks.MAX_DEFAULT_NBYTES, chunks_in_flight=1)

    def native(self, world_size: int, device_type: str = "cpu", ranks_per_host: int = 1) -> "_C.WireConfig":
        """ranks_per_host: more than one for sums on two levels. Chunks left open are for a link of 1 Gbit/s."""
        # A copy is checked as it is made, by calling this.
        is_open = None in (self.chunk_nbytes, self.chunks_in_flight)
        whole = self.resolved(world_size, device_type, ranks_per_host=ranks_per_host) if is_open else self
        (wire, block, rotate), *others = self.formats
        return _C.WireConfig(
            wire=wire,
            sum=self.sum,
            block=block,
            predivide=0.0 if self.predivide == "auto" else float(self.predivide),
            chunk_nbytes=whole.chunk_nbytes,
            chunks_in_flight=whole.chunks_in_flight,
            rotate=rotate,
            others=others,
            stochastic=self.rounding == "stochastic",
            seed=self.seed,
            error_feedback=self.error_feedback,
            ranks_per_host=ranks_per_host,
            local_wire=self.local_wire,
        )

    @property
    def name_patterns(self) -> tuple[str, ...]:
        """Those that need parameters' names to be known."""
        return tuple(pattern for pattern in (*self.exempt, *self.wire_for) if pattern != ONE_DIMENSIONAL)

    def is_exempt(self, name: str, parameter: torch.Tensor) -> bool:
        return any(rule.field == "exempt" and rule.matches(name, parameter) for rule in self.rules)

    def check_patterns(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See :func:`fusedcomm.patterns.check`."""
        patterns.check(self.rules, parameters)


def residual_name(error_feedback: bool | str | None) -> str | None:
    """What `error_feedback=` says residuals are kept in; True: fp32, False: none are."""
    if isinstance(error_feedback, bool):
        return RESIDUALS[0] if error_feedback else None
    return error_feedback


def _check_whole(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field}={value!r} is not possible: it must be a whole number")


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field}={value!r} is not known: use one of {', '.join(map(repr, choices))}")


def choose_isa(isa: str | None) -> str:
    """The argument, else the environment. Raises ValueError for what this machine cannot run."""
    chosen = env.isa() if isa is None else isa
    _check_choice("isa", chosen, ("auto", *_C.available_isas()))
    return chosen


def choose_codec_threads(codec_threads: int | None, world_size: int) -> int:
    """The argument, else the environment, else half of this rank's share of the cores, from 1 to 4."""
    if codec_threads is None:
        codec_threads = env.codec_threads()
    if codec_threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        local_ranks = env.local_world_size() or world_size
        return max(1, min(MAX_CODEC_THREADS, cores // (2 * local_ranks)))
    _check_whole("codec_threads", codec_threads)
    if not 1 <= codec_threads <= MOST_CODEC_THREADS:
        raise ValueError(f"codec_threads={codec_threads} is not possible: use 1 to {MOST_CODEC_THREADS}")
    return codec_threads


def choose_stall_after(stall_after: float | None, timeout_s: float) -> float:
    """The argument, else STALL_AFTER_S, or less, so that a report comes before a group's timeout of `timeout_s`."""
    if stall_after is None:
        return min(STALL_AFTER_S, timeout_s / 3)
    if isinstance(stall_after, bool) or not isinstance(stall_after, (int, float)) or not 0 < stall_after < math.inf:
        raise ValueError(f"stall_after={stall_after!r} is not possible: use a number of seconds greater than 0")
    return float(stall_after)
