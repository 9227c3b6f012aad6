"""``Config``: what all ranks must share of how gradients travel, checked when it is made."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from fusedcomm import patterns
from fusedcomm.config import check
from fusedcomm.config.moved import explains_moved
from fusedcomm.config.options import (
    ALWAYS_SHOWN,
    SUMS,
    WIRES,
    WITH_SCALES,
    Blocks,
    Checks,
    Chunks,
    Feedback,
    Options,
    Rounding,
    TwoLevels,
)
from fusedcomm.native import _C
from fusedcomm.patterns import ONE_DIMENSIONAL, Rule

AUTO = "auto"
"""As a wire: a search for one, :class:`fusedcomm.Auto`."""

_ANY_CHUNKS = Chunks(nbytes=8 << 20, in_flight=1)
"""For questions that do not depend on chunks; choosing chunks asks some of them."""


@dataclasses.dataclass(frozen=True, repr=False)
class Config(Options):
    """How gradients travel. The same object serves every front end: :func:`fusedcomm.attach`,
    :class:`fusedcomm.CommState` and :func:`fusedcomm.simulate`. Every rank must have an equal one.

    Fields stay as they were given, so ``dataclasses.replace(config, wire="int4")`` has the defaults of int4.

    Args:
        wire: what travels: "fp32", "bf16", "fp16", or codes with a scale for every block of elements: "int8", "fp8"
            (e4m3), "int4".
        sum: "exact" (fp32 all-reduce), "direct" (all-reduce in the 16-bit wire), "two-shot" (each rank takes the fp32
            sum of a part of all ranks' encoded chunks, in rank order, and encodes it again), "one-shot" (every rank
            gets all ranks' encoded chunks and takes the fp32 sum: of two ranks as many bytes, rounded once), or "auto":
            by world size and bucket size, as the printed plan says.
        wires: wires of their own for some parameters, in the same payload: {"lm_head.*": "bf16", "*.mlp.*": "int4"}. A
            pattern is a parameter's name with wildcards, of a tied parameter any of its names, or "1d" for biases and
            norms; the first that matches counts. "fp32" is exact. On wires with scales "1d" goes first and is "fp32",
            unless it stands here: {"1d": wire} sends biases and norms like the rest. Two patterns that give a tied
            parameter, by different names, different wires are an error.
        predivide: fp16 only: gradients are divided by it before the wire, and the sum multiplied by it and divided by
            the world size afterwards, in fp32. "auto": a power of two near √world_size for direct, else 1.
        blocks: a :class:`Blocks`: how a wire with scales shares them.
        rounding: a :class:`Rounding`: to nearest or stochastic.
        feedback: a :class:`Feedback`: what rounding leaves out of a step is added to the next. None: it is lost.
        chunks: a :class:`Chunks`: how large the pieces of a bucket are that travel, and how many at once.
        checks: a :class:`Checks`: which errors are measured, and what follows from them.
        hosts: sums on two levels: a :class:`TwoLevels`, or its `groups`, as "auto". None: one level.

    Raises:
        ValueError: a field is out of range or two fields cannot go together; names both and what is possible.
        TypeError: a keyword of fusedcomm 0.1; names its new place.
    """

    wire: str = dataclasses.field(default="bf16", metadata={ALWAYS_SHOWN: True})
    sum: str = "auto"
    wires: Mapping[str, str] = dataclasses.field(default_factory=dict)
    predivide: float | str = "auto"
    blocks: Blocks = Blocks()
    rounding: Rounding = Rounding()
    feedback: Feedback | None = None
    chunks: Chunks = Chunks()
    checks: Checks = Checks()
    hosts: str | int | Sequence[Sequence[int]] | TwoLevels | None = None

    def __post_init__(self) -> None:
        if self.wire == AUTO:
            raise ValueError("wire='auto' is a search and not a configuration: use fusedcomm.Auto(…) in its place")
        check.choice("wire", self.wire, WIRES)
        check.choice("sum", self.sum, SUMS)
        for name, kind in (("blocks", Blocks), ("rounding", Rounding), ("chunks", Chunks), ("checks", Checks)):
            check.kind(name, getattr(self, name), kind)
        if self.feedback is not None:
            check.kind("feedback", self.feedback, Feedback)
        if self.predivide != "auto":
            check.positive("predivide", self.predivide, "'auto' or a positive number")
        self._check_wires()
        self._check_blocks()
        self._check_fallback()
        self._check_hosts()
        self.native(_ANY_CHUNKS)

    def _check_wires(self) -> None:
        if not isinstance(self.wires, Mapping):
            raise ValueError(f"wires={self.wires!r} is not possible: use a dict from patterns to wires")
        object.__setattr__(self, "wires", dict(self.wires))  # the user's may change
        for pattern, wire in self.wires.items():
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(f"wires[{pattern!r}]: a pattern is '1d' or a parameter's name, wildcards allowed")
            check.choice(f"wires[{pattern!r}]", wire, WIRES)
            if wire == "fp32" and self.wire != "fp32" and self.sum == "direct":
                raise ValueError(
                    f"sum='direct' adds the whole bucket in {self.wire} and cannot carry wires[{pattern!r}]='fp32' "
                    "exactly: use sum='two-shot', or leave the pattern out"
                )

    def _check_blocks(self) -> None:
        if self.blocks.numel is not None and self.wire not in WITH_SCALES:
            raise ValueError(
                f"Blocks(numel={self.blocks.numel}) has no effect with wire={self.wire!r}, which rounds each element "
                f"by itself: it is for wires with scales ({', '.join(WITH_SCALES)})"
            )

    def _check_fallback(self) -> None:
        fallback = self.checks.fallback
        if fallback is None:
            return
        if self.sum in ("exact", "direct"):
            raise ValueError(
                f"{fallback} needs a bucket's wire to be free to change, which sum={self.sum!r} does not allow: use "
                "sum='auto', 'two-shot' or 'one-shot'"
            )
        wires = self.numbered_wires
        if not any(wire != fallback.wire and _C.exactness(wire) < _C.exactness(fallback.wire) for wire in wires):
            raise ValueError(
                f"{fallback} is no more exact than wire={self.wire!r}: there is nothing to fall back to; use "
                "Fallback(error, wire='fp32'), or leave it out"
            )

    def _check_hosts(self) -> None:
        levels = self.two_levels
        if levels is None:
            return
        if self.sum not in ("auto", "two-shot"):
            raise ValueError(
                f"hosts={levels.groups!r} needs sums on two levels, and sum={self.sum!r} has one: use sum='auto' or "
                "'two-shot' with hosts"
            )
        if self.wire == "fp32" and self.local_wire != "fp32":
            raise ValueError(
                f"local_wire={self.local_wire!r} would round what wire='fp32' does not: leave it out, or use 'fp32'"
            )

    # ---- what fields that were left open come to

    @property
    def two_levels(self) -> TwoLevels | None:
        """`hosts`, in full."""
        return self.hosts if self.hosts is None or isinstance(self.hosts, TwoLevels) else TwoLevels(self.hosts)

    @property
    def groups(self) -> str | int | tuple[tuple[int, ...], ...] | None:
        """Of `two_levels`; None: one level."""
        return None if self.two_levels is None else self.two_levels.groups

    @property
    def local_wire(self) -> str:
        """What would travel within a host."""
        given = None if self.two_levels is None else self.two_levels.local_wire
        return given or ("fp32" if self.two_levels is not None and self.wire == "fp32" else "bf16")

    @property
    def block_numel(self) -> int:
        """Of `wire`; a number also where there are no scales."""
        return self.blocks.numel or _C.default_block_numel(self.wire)

    @property
    def residual_format(self) -> str | None:
        """None: no residuals are kept."""
        return None if self.feedback is None else self.feedback.format

    @property
    def is_stochastic(self) -> bool:
        return self.rounding.kind == "stochastic"

    # ---- the wires of parameters

    @property
    def numbered_wires(self) -> tuple[str, ...]:
        """The wires that parameters may have, by their numbers; "fp32" has none but EXACT_WIRE, unless it is `wire`."""
        others = [wire for wire in self.wires.values() if wire != "fp32"]
        if self.checks.fallback is not None and self.checks.fallback.wire != "fp32":
            others.append(self.checks.fallback.wire)
        return tuple(dict.fromkeys((self.wire, *others)))

    @property
    def formats(self) -> list[tuple[str, int, bool]]:
        """(wire, block, rotate) of each of `numbered_wires`, as the engine has them: a block also where there are no
        scales."""
        rotate = self.blocks.rotate
        others = [
            (wire, _C.default_block_numel(wire), rotate and wire in WITH_SCALES) for wire in self.numbered_wires[1:]
        ]
        return [(self.wire, self.block_numel, rotate), *others]

    def number_of(self, wire: str) -> int:
        """The number of a wire that parameters may have; see csrc/engine/config.h."""
        return self.numbered_wires.index(wire) if wire in self.numbered_wires else _C.EXACT_WIRE

    @property
    def rules(self) -> list[Rule]:
        """The patterns, in the order in which they are tried."""
        # Biases and norms: a fraction of a percent of the elements, and most of the damage when they are quantised.
        has_default = self.wire in WITH_SCALES
        rules = [
            Rule("wires", pattern, wire, replaces_default=has_default and pattern == ONE_DIMENSIONAL)
            for pattern, wire in self.wires.items()
        ]
        if has_default and ONE_DIMENSIONAL not in self.wires:
            rules.insert(0, Rule("default", ONE_DIMENSIONAL, "fp32"))
        return rules

    @property
    def name_patterns(self) -> tuple[str, ...]:
        """Those that need parameters' names to be known."""
        return tuple(pattern for pattern in self.wires if pattern != ONE_DIMENSIONAL)

    def wire_number(self, name: str, parameter: torch.Tensor, other_names: Sequence[str] = ()) -> int:
        """Its number. other_names: those of a tied parameter. ValueError: as :func:`patterns.rule_for`."""
        rule = patterns.rule_for(self.rules, (name, *other_names), parameter)
        return 0 if rule is None else self.number_of(rule.wire)

    @property
    def wire_number_1d(self) -> int:
        """Of parameters with at most one dimension of which nothing else is known."""
        return self.wire_number("", torch.empty(0))

    @property
    def exempts_1d(self) -> bool:
        """Whether these travel exactly beside others that do not."""
        return self.wire_number_1d == _C.EXACT_WIRE

    def is_exempt(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether it travels exactly beside others that do not."""
        return self.wire_number(name, parameter) == _C.EXACT_WIRE

    def check_patterns(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See :func:`fusedcomm.patterns.check`."""
        patterns.check(self.rules, parameters)

    # ---- what the engine is told

    def native(self, chunks: Chunks, ranks_per_host: int = 1) -> "_C.WireConfig":
        """With these chunks, both numbers of which are given. ValueError for what the engine cannot combine.

        Args:
            ranks_per_host: more than one for sums on two levels.
        """
        (wire, block, rotate), *others = self.formats
        return _C.WireConfig(
            wire=wire,
            sum=self.sum,
            block=block,
            predivide=0.0 if self.predivide == "auto" else float(self.predivide),
            chunk_nbytes=chunks.nbytes,
            chunks_in_flight=chunks.in_flight,
            rotate=rotate,
            others=others,
            stochastic=self.is_stochastic,
            seed=self.rounding.seed,
            error_feedback=self.residual_format,
            ranks_per_host=ranks_per_host,
            local_wire=self.local_wire,
        )

    def is_one_shot(self, world_size: int) -> bool:
        """Whether what the codec encodes is summed in one shot, on one level."""
        return _C.is_one_shot(self.native(_ANY_CHUNKS), world_size)

    def plan_of_large_buckets(self, world_size: int) -> "_C.BucketPlan":
        """For fp32 gradients in the wire of most parameters, on one level: its sum, and the steps of a chunk."""
        numels = [_C.SMALL_BUCKET_NBYTES] + [0] * (len(self.numbered_wires) - 1)
        return _C.plan_bucket(self.native(_ANY_CHUNKS), world_size, torch.empty(0), 0, numels)

    def record(self) -> dict[str, object]:
        """All of it, JSON-serialisable: what ranks compare. Two ways to say the same are equal."""
        levels = self.two_levels
        return {
            **dataclasses.asdict(self),
            # The first pattern that matches counts, and the wires' order is that of the bytes.
            "wires": list(self.wires.items()),
            "blocks": {"numel": self.block_numel, "rotate": self.blocks.rotate},
            "hosts": None if levels is None else {"groups": levels.groups, "local_wire": self.local_wire},
        }


def given(config: Config | None, wire: str | None) -> Config:
    """What a front end was called with: a configuration, or `wire` as a shorthand for one of nothing else.

    Raises:
        ValueError: both, or something else than a configuration.
    """
    refuse_both(config, wire)
    if config is None:
        return Config() if wire is None else Config(wire)
    if isinstance(config, str):
        raise ValueError(
            f"config={config!r} is not possible: write wire={config!r}, or fusedcomm.Config({config!r}, …)"
        )
    check.kind("config", config, Config)
    return config


def refuse_both(config: object, wire: str | None) -> None:
    if config is not None and wire is not None:
        raise ValueError(
            f"config={config!r} and wire={wire!r} both say what travels: leave wire out, or give wire alone"
        )


# Whoever writes Config(block=64) has read of 0.1.
Config.__init__ = explains_moved("Config")(Config.__init__)
