"""What ranks, their network and their codec take: the costs that cost_model.py puts together into a step.

Each operation takes  fixed + units · per unit  seconds (:class:`Cost`): a collective α + β · bytes that a rank sends, a
codec stage its own fixed part + γ · elements. What these are for a cluster is measured (``fusedcomm probe``) or assumed
(``fusedcomm plan``).
"""

import dataclasses
import math
from collections.abc import Mapping

from fusedcomm.native import _C


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of an operation on so many units."""

    fixed_s: float
    per_unit_s: float
    occupied_s: float = 0.0
    """Of the fixed part of a collective: the network is taken for so long, however few bytes the message has."""
    cpu_s_per_unit: float | None = None
    """Of a core, for a collective; None: the network's `cpu_s_per_byte`."""
    cpu_fixed_s: float = 0.0
    """Of a core, for each message of a collective beside its bytes."""

    def __call__(self, units: float) -> float:
        return self.fixed_s + units * self.per_unit_s


@dataclasses.dataclass(frozen=True)
class Network:
    """One level of the network, as all ranks see it that use it at once. Units are bytes that one rank sends."""

    all_reduce: Cost
    """Of n bytes among p ranks, each sends 2(p−1)/p · n."""
    exchange: Cost
    """An all-to-all, or an all-gather, of a message of n bytes: each rank sends (p−1)/p · n."""
    cpu_s_per_byte: float = 0.0
    """Of a core, for each byte that a rank sends."""
    tree: Cost | None = None
    """Another all-reduce, of as many bytes, which is taken where it is faster."""
    direct: Cost | None = None
    """An all-reduce in a 16-bit wire; None: as `all_reduce` of as many bytes."""
    gather: Cost | None = None
    """An all-gather round a ring, which leaves each host once; None: it is an exchange."""


@dataclasses.dataclass(frozen=True)
class TwoLevels:
    """What sums on two levels find in place of a cluster's networks: their collectives have fewer ranks."""

    network: Network
    """Among ranks of which each is on another host; all ranks of a host at once."""
    local: Network
    """Among the ranks of a host."""


def kind_of_all_reduce(wire: str) -> str:
    """The field of :class:`Network` that has its cost."""
    return "all_reduce" if wire == "fp32" else "direct"


COSTS_OF_OPERATIONS = {
    "scale": "pack",
    "pack": "pack",
    "local reduce": "reduce",
    "reduce": "reduce",
    "unpack": "unpack",
    "sum": "sum",
}
"""By which of the costs of :class:`Codec` each of the codec's operations goes. Gradients in their own memory are scaled
by the "fp32" codec's pack."""


def codec_costs(plan: "_C.BucketPlan") -> list[str]:
    """Of a chunk that travels by this plan, in the order of its steps."""
    return [COSTS_OF_OPERATIONS[step.operation] for step in plan.steps if not step.is_collective]


@dataclasses.dataclass(frozen=True)
class Codec:
    """The stages of one wire; None: not known. Units are gradient elements: of the chunk for pack, unpack and sum, and
    for reduce, which decodes one part of each rank, of all its parts together."""

    pack: Cost
    reduce: Cost | None = None
    unpack: Cost | None = None
    sum: Cost | None = None
    """Unpack where all ranks' messages are there."""

    def seconds(self, stage: str, numel: float) -> float:
        """Of one stage. ValueError if it is not known: what was measured are the stages that "auto" has there."""
        cost: Cost | None = getattr(self, stage)
        if cost is None:
            raise ValueError(f"how long the codec's {stage!r} takes is not known: predict a sum that does without it")
        return cost(numel)

    def whole_s(self, plan: "_C.BucketPlan", numel: float) -> float:
        """Of all stages of a chunk that travels by this plan, on one level."""
        return math.fsum(self.seconds(cost, numel) for cost in codec_costs(plan))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Ranks, their network and their processors."""

    world_size: int
    network: Network
    codecs: Mapping[str, Codec]
    """By wire; "fp32" has what an exact sum does to a bucket in its own memory."""
    copy_s_per_byte: float
    """Of DDP's copies into and out of its buckets."""
    cores: float | None = None
    """That each rank has for everything; None: ranks compute on accelerators, which do not move bytes."""
    timed_s_per_byte: float | None = None
    """As attach would time the link, by which it chooses the size of chunks; None: of 1 Gbit/s."""
    ranks_per_host: int = 1
    """More than one: `network` is a host's, shared by its ranks, and its costs are for bytes that a host sends."""
    local: Network | None = None
    """Within a host; needed if hosts have several ranks."""
    two_levels: TwoLevels | None = None
    """None: sums on two levels find what others do."""
    link_bytes_s: float = math.inf
    """What `network` has been seen to carry at most."""
    slowdown: float = 0.0
    """Of an accelerator's computing by what runs beside it: collectives and codec stages that take t during the
    backward pass make that longer by slowdown · t."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.ranks_per_host < 1 or self.world_size % self.ranks_per_host:
            raise ValueError(
                f"{self.world_size} ranks, {self.ranks_per_host} on each host, are not possible: use a multiple of the "
                "ranks of a host"
            )
        if self.ranks_per_host > 1 and self.local is None:
            raise ValueError(f"ranks_per_host={self.ranks_per_host} needs the network within a host: set local")
        if self.cores is not None and self.cores <= 0:
            raise ValueError(f"cores={self.cores} is not possible: use a positive number, or None for accelerators")

    @property
    def num_hosts(self) -> int:
        return self.world_size // self.ranks_per_host

    def codec(self, wire: str) -> Codec:
        if wire not in self.codecs:
            raise ValueError(f"no codec costs of wire {wire!r} are known, only of {', '.join(sorted(self.codecs))}")
        return self.codecs[wire]
