"""``Config``: the options for sending gradients that all ranks must share, checked when it is made."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from fusedcomm import patterns
from fusedcomm.config import check, combinations
from fusedcomm.config.options import (
    ALWAYS_SHOWN,
    COMPARE,
    MOST,
    SUMS,
    WIRES,
    WITH_SCALES,
    WITHOUT_SCALES,
    Chunks,
    Feedback,
    Options,
    TwoLevels,
)
from fusedcomm.literals import Compare, Sum, Weighted, Wire
from fusedcomm.native import _C
from fusedcomm.patterns import ONE_DIMENSIONAL, Rule
from fusedcomm.ranks import hosts
from fusedcomm.ranks.hosts import OwnHost

AUTO = "auto"
"""In place of a configuration: search for the fastest of some wires."""

SUMS_ON_TWO_LEVELS = ("auto", "two-shot")

OFF = "off"
"""In place of a wire: DDP's own all-reduce. Only :func:`fusedcomm.attach` takes it, because a configuration has nothing
to say about it."""

_ALONE = OwnHost()
_ANY_CHUNKS = Chunks(nbytes=8 << 20, in_flight=1)
"""Stands in where the answer does not depend on chunks. Some of these answers are needed to choose the chunks."""


@dataclasses.dataclass(frozen=True, repr=False)
class Config(Options):
    """How gradients are sent and summed. The same object serves every front end: :func:`fusedcomm.attach`,
    :class:`fusedcomm.CommState` and :func:`fusedcomm.simulate`. Every rank must have an equal one.

    Fields keep the values they are given, so ``dataclasses.replace(config, wire="int4")`` has the defaults of int4.

    Args:
        wire: the dtype that is sent: "fp32", "bf16", "fp16", or codes with one scale for each block of elements:
            "int8" and "fp8" (e4m3), of 128 elements, or "int4", of 32.
        sum: how buckets are summed.
            "exact": all-reduce in fp32.
            "direct": all-reduce in the 16-bit wire; of fp16 after a division by a power of two near √world_size.
            "two-shot": each rank sums one part of all ranks' encoded chunks, in fp32 and in rank order, encodes the
            sum and sends it to all ranks.
            "one-shot": each rank receives all ranks' encoded chunks and sums them in fp32. Gradients are rounded once
            instead of twice; two ranks send as many bytes as with two-shot, more ranks send more.
            "auto": by world size and bucket size; the printed plan says which.
        wires: other wires for some parameters, in the same payload: {"lm_head.*": "bf16", "*.mlp.*": "int4"}. A pattern
            is a parameter's name with wildcards, or "1d" for biases and norms. It matches a tied parameter by any of
            its names. The first pattern that matches counts. "fp32" is exact. If `wire` has scales, "1d" comes first
            and means "fp32", unless it is given here: {"1d": wire} sends biases and norms like the rest. It is an error
            if patterns give a tied parameter different wires through different names.
        feedback: a :class:`Feedback`: the error of rounding in one step is added to the next. None: it is lost.
        chunks: a :class:`Chunks`: the size of a bucket's pieces, and how many are in flight at once.
        compare_every: steps between comparisons of the parameters, which should be equal on all ranks. In such a step
            each rank sends a checksum of its parameters, 8 bytes, before the first bucket. None: never. With FSDP2 only
            replicas (HSDP, replicate()) are compared.
        compare: what a difference is. It names the ranks that differ from most, the parameters, and how far they are
            apart. "warn": rank 0 warns, once. "raise": RuntimeError on every rank. With members a rank that most others
            outvote always leaves with DamagedError.
        hosts: which ranks share a host, so that sums have two levels, first within hosts, then between them.
            "auto": ranks with the same host name share one. Sums have two levels where several hosts have equally many
            ranks, at least two, and where `sum` and `wire` allow it ("fp32" with sum="auto" keeps the bits of DDP's
            all-reduce, on one level). The printed plan says which, and why.
            None: one level.
            A :class:`TwoLevels`, or just its `groups`, [[0, 1], [2, 3]] for example: two levels. What excludes them is
            an error.
        weighted: how ranks weigh in the mean. None: equally. Otherwise each rank gives the handle's `weight`, the
            number of its tokens for example, before backward passes.
            "mean": losses are means over what the weight counts: a gradient becomes Σ wᵣ·gᵣ / Σ wᵣ.
            "sum": losses are sums: Σ gᵣ / Σ wᵣ.
        params: FSDP2 only: the wire in which parameters are gathered. "fp32": torch gathers them, exactly. Otherwise
            each rank sends its shard in that wire, and all ranks compute with the same decoded values; the shards,
            which optimizers step, are not rounded. Exact are the parameters whose wire in `wires` is "fp32", and if
            `params` has scales, biases and norms, unless "1d" is among `wires`.
        params_kept: whether a rank keeps the codes that it receives of other hosts from a forward pass to the backward
            pass, so that this one gathers within hosts. It needs sums on two levels, and modules that free their
            parameters between the passes. The plan has the memory.

    Raises:
        ValueError: a field is out of range, or two fields exclude each other. The text names them and what is possible.
    """

    wire: Wire = dataclasses.field(default="bf16", metadata={ALWAYS_SHOWN: True})
    sum: Sum = "auto"
    wires: Mapping[str, Wire] = dataclasses.field(default_factory=dict)
    feedback: Feedback | None = None
    chunks: Chunks = Chunks()
    compare_every: int | None = 1000
    compare: Compare = "warn"
    hosts: str | int | Sequence[Sequence[int]] | TwoLevels | None = hosts.AUTO
    weighted: Weighted | None = None
    params: Wire = "fp32"
    params_kept: bool = False

    def __post_init__(self) -> None:
        combinations.refuse("Config", {"wire": self.wire})
        check.choice("wire", self.wire, WIRES)
        check.choice("sum", self.sum, SUMS)
        check.choice("params", self.params, WIRES)
        check.flag("params_kept", self.params_kept)
        check.kind("chunks", self.chunks, Chunks)
        if self.compare_every is not None:
            possible = "a whole number of steps, 1 or more, or None for never"
            check.whole("compare_every", self.compare_every, 1, MOST, possible)
        check.choice("compare", self.compare, COMPARE)
        if self.feedback is not None:
            check.kind("feedback", self.feedback, Feedback)
        if self.weighted is not None:
            check.choice("weighted", self.weighted, ("mean", "sum"))
        self._check_wires()
        combinations.refuse("Config", self._combined())
        self.native(_ANY_CHUNKS)

    def _check_wires(self) -> None:
        if not isinstance(self.wires, Mapping):
            raise ValueError(f"wires={self.wires!r} is not possible: use a dict from patterns to wires")
        object.__setattr__(self, "wires", dict(self.wires))  # a copy, because the user may change the original
        for pattern, wire in self.wires.items():
            if not isinstance(pattern, str) or not pattern:
                raise ValueError(f"wires[{pattern!r}] is no pattern: use '1d' or a parameter's name, perhaps with *")
            check.choice(f"wires[{pattern!r}]", wire, WIRES)

    def _combined(self) -> dict[str, object]:
        """What combinations.py knows of this configuration."""
        return {
            "wire": self.wire,
            "sum": self.sum,
            "wires": {pattern: wire for pattern, wire in self.wires.items() if wire != self.wire} or None,
            "feedback": self.feedback,
            "wires that are all 'fp32'": {self.wire, *self.wires.values()} == {"fp32"},
            "hosts": self.named_hosts,
            "local_wire": self.local_wire if self.needs_two_levels else "fp32",
            "weighted": self.weighted,
            "params": self.params,
            "params_kept": self.params_kept,
        }

    # ---- the values of fields that were left open

    @property
    def two_levels(self) -> TwoLevels | None:
        """`hosts` as a TwoLevels. None: one level, whatever the hosts are."""
        if self.hosts is None or self.one_level_reason:
            return None
        return self.hosts if isinstance(self.hosts, TwoLevels) else TwoLevels(self.hosts)

    @property
    def needs_two_levels(self) -> bool:
        """Whether hosts on which sums cannot have two levels are an error."""
        return self.named_hosts is not None

    @property
    def named_hosts(self) -> int | Sequence[Sequence[int]] | TwoLevels | None:
        """`hosts` if it asks for two levels; None if it does not."""
        return None if self.hosts == hosts.AUTO else self.hosts

    @property
    def one_level_reason(self) -> str:
        """Why sums have one level with hosts="auto" on any hosts; empty if that depends on the hosts, or if `hosts` is
        something else."""
        if self.hosts != hosts.AUTO:
            return ""
        if self.sum not in SUMS_ON_TWO_LEVELS:
            return f"sum={self.sum!r} has one"
        if self.wire == "fp32" and self.sum == "auto":
            return "wire='fp32' keeps the bits of DDP's own all-reduce"
        return ""

    @property
    def groups(self) -> str | int | tuple[tuple[int, ...], ...] | None:
        """The hosts' ranks as :class:`TwoLevels` has them. None: one level."""
        return None if self.two_levels is None else self.two_levels.groups

    @property
    def local_wire(self) -> str:
        """The wire within a host, if sums have two levels."""
        given = None if self.two_levels is None else self.two_levels.local_wire
        return given or (self.wire if self.wire in WITHOUT_SCALES else "bf16")

    # ---- the wires of parameters

    @property
    def numbered_wires(self) -> tuple[str, ...]:
        """The wires that parameters may have; the index of a wire is its number.

        "fp32" is not among them, unless it is `wire`: its number is EXACT_WIRE.
        """
        others = [wire for wire in (*self.wires.values(), self.params) if wire != "fp32"]
        return tuple(dict.fromkeys((self.wire, *others)))

    @property
    def formats(self) -> list[tuple[str, int]]:
        """(wire, elements of a block) of each of `numbered_wires`. Wires without scales have a number, too."""
        return [(wire, _C.default_block_numel(wire)) for wire in self.numbered_wires]

    def number_of(self, wire: str) -> int:
        """The number of a wire that parameters may have, as csrc/engine/config.h defines it."""
        return self.numbered_wires.index(wire) if wire in self.numbered_wires else _C.EXACT_WIRE

    @property
    def rules(self) -> list[Rule]:
        """The patterns, in the order in which they are tried."""
        return self._rules_with(self.wire)

    def _rules_with(self, wire: str) -> list[Rule]:
        """The patterns, for parameters whose wire is `wire` where none matches."""
        # Biases and norms are a fraction of a percent of the elements, but cause most of the damage when quantized.
        has_default = wire in WITH_SCALES
        rules = [
            Rule("wires", pattern, wire, replaces_default=has_default and pattern == ONE_DIMENSIONAL)
            for pattern, wire in self.wires.items()
        ]
        if has_default and ONE_DIMENSIONAL not in self.wires:
            rules.insert(0, Rule("default", ONE_DIMENSIONAL, "fp32"))
        return rules

    @property
    def name_patterns(self) -> tuple[str, ...]:
        """The patterns that need the names of parameters."""
        return tuple(pattern for pattern in self.wires if pattern != ONE_DIMENSIONAL)

    def wire_number(self, name: str, parameter: torch.Tensor, other_names: Sequence[str] = ()) -> int:
        """The number of a parameter's wire.

        other_names: the other names of a tied parameter. Raises ValueError as :func:`patterns.rule_for` does.
        """
        rule = patterns.rule_for(self.rules, (name, *other_names), parameter)
        return 0 if rule is None else self.number_of(rule.wire)

    def gathers_exactly(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether a parameter of FSDP2 is gathered exactly, whatever `params` is."""
        rule = patterns.rule_for(self._rules_with(self.params), (name,), parameter)
        return rule is not None and rule.wire == "fp32"

    @property
    def wire_number_1d(self) -> int:
        """The number of the wire of a parameter with at most one dimension and an unknown name."""
        return self.wire_number("", torch.empty(0, dtype=torch.float32))

    def refuse_unsharded(self) -> None:
        """Raises ValueError if an option is set that only FSDP2's shards have."""
        combinations.refuse("gradients without shards", {"params": self.params})

    def check_patterns(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See :func:`fusedcomm.patterns.check`."""
        patterns.check(self.rules, parameters)

    # ---- the engine's configuration

    def native(
        self, chunks: Chunks, ranks_per_host: int = 1, own_host: OwnHost = _ALONE, keeps_messages: bool = False
    ) -> "_C.WireConfig":
        """The engine's configuration.

        Args:
            chunks: has both numbers; neither is None.
            ranks_per_host: more than one for sums on two levels.
            own_host: this rank's, on one level, too. Only the counts of bytes depend on it.
            keeps_messages: whether each bucket keeps its codes and means, so that its sum can be made again.

        Raises:
            ValueError: options that the engine cannot combine.
        """
        wire, *others = self.numbered_wires
        return _C.WireConfig(
            wire=wire,
            sum=self.sum,
            chunk_nbytes=chunks.nbytes,
            chunks_in_flight=chunks.in_flight,
            others=others,
            error_feedback=self.feedback is not None,
            ranks_per_host=ranks_per_host,
            local_wire=self.local_wire,
            ranks_on_host=own_host.num_ranks,
            links_of_host=own_host.num_links,
            keeps_messages=keeps_messages,
        )

    def is_one_shot(self, world_size: int) -> bool:
        """Whether buckets that the codec encodes are summed by one-shot, with sums on one level."""
        return _C.is_one_shot(self.native(_ANY_CHUNKS), world_size)

    def plan_of_large_buckets(self, world_size: int) -> "_C.BucketPlan":
        """The plan of a large bucket of fp32 gradients, all in `wire`, on one level."""
        like = torch.empty(0, dtype=torch.float32)
        return _C.plan_bucket(self.native(_ANY_CHUNKS), world_size, like, [(_C.SMALL_BUCKET_NBYTES, 0)])

    def record(self) -> dict[str, object]:
        """The whole configuration, JSON-serializable, for ranks to compare. Equivalent configurations are equal."""
        levels = self.two_levels
        return {
            **dataclasses.asdict(self),
            # A list, because order matters: the first pattern that matches counts, and the bytes of the wires follow
            # each other in this order.
            "wires": list(self.wires.items()),
            "hosts": None if levels is None else {"groups": levels.groups, "local_wire": self.local_wire},
        }
