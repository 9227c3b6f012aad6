"""The costs of single operations on a cluster: the inputs from which cost_model.py predicts a step.

An operation on n units takes  fixed + n · per unit  seconds (:class:`Cost`). A collective takes α + β · bytes sent. A
codec stage takes its own fixed part + γ · elements. ``fusedcomm plan`` assumes these costs.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time of one operation, linear in its units: bytes sent, or gradient elements. All fields are seconds."""

    fixed_s: float
    per_unit_s: float

    def __call__(self, units: float) -> float:
        """Seconds for `units` units."""
        return self.fixed_s + units * self.per_unit_s


@dataclasses.dataclass(frozen=True)
class Network:
    """The costs of one level of the network while all its ranks use it at once.

    Units are bytes that one rank sends. For the network between hosts with several ranks each, units are bytes that one
    host sends.
    """

    all_reduce: Cost
    """An all-reduce. For n bytes among p ranks each rank sends 2(p−1)/p · n."""
    exchange: Cost
    """An all-to-all, or an all-gather if `gather` is None. For a message of n bytes each rank sends (p−1)/p · n."""
    cpu_s_per_byte: float = 0.0
    """Core seconds for each byte that a rank sends."""
    tree: Cost | None = None
    """A tree all-reduce that sends as many bytes; the model uses it where it is faster. None: there is no tree."""
    gather: Cost | None = None
    """An all-gather around a ring that leaves each host once. None: `exchange` applies."""


@dataclasses.dataclass(frozen=True)
class TwoLevels:
    """The networks of sums on two levels. They replace the cluster's, because these collectives have fewer ranks."""

    network: Network
    """Between hosts. A collective has one rank of each host; all ranks of a host run such collectives at once."""
    local: Network
    """Within a host. A collective has all ranks of the host."""


COSTS_OF_OPERATIONS = {
    "scale": "pack",
    "pack": "pack",
    "local reduce": "reduce",
    "reduce": "reduce",
    "unpack": "unpack",
    "sum": "sum",
}
"""The :class:`Codec` field with the cost of each codec operation. Only sums of gradients in their own memory have a
"scale"; the "fp32" codec's `pack` is its cost."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """The costs of one wire's codec stages. None: the cost is unknown.

    Units are gradient elements. For pack, unpack and sum they are the elements of the chunk. For reduce, which decodes
    one part from each rank, they are the elements of all these parts together.
    """

    pack: Cost
    reduce: Cost | None = None
    unpack: Cost | None = None
    sum: Cost | None = None
    """Unpacks the messages of all ranks and adds them."""

    def seconds(self, stage: str, numel: float) -> float:
        """Seconds of one stage on `numel` elements.

        Raises:
            ValueError: the cost of the stage is unknown.
        """
        cost: Cost | None = getattr(self, stage)
        if cost is None:
            raise ValueError(f"how long the codec's {stage!r} takes is not known: choose a sum without this stage")
        return cost(numel)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Ranks, their networks and their processors.

    Raises:
        ValueError: a field is out of range, or `local` is missing; names the values and what to change.
    """

    world_size: int
    network: Network
    codecs: Mapping[str, Codec]
    """By wire. The pack of "fp32" scales a bucket in its own memory, which is the only codec stage of an exact sum."""
    copy_s_per_byte: float
    """Seconds per byte of DDP's copies into and out of its buckets."""
    cores: float | None = None
    """Cores that each rank has for all its work. None: ranks compute on accelerators, which do not move bytes."""
    timed_s_per_byte: float | None = None
    """Seconds per byte as attach would time the link; it sets the size of chunks. None: that of 1 Gbit/s."""
    ranks_per_host: int = 1
    """If more than one, the ranks of a host share `network`, and its costs are for bytes that a host sends."""
    local: Network | None = None
    """The network within a host; required if hosts have several ranks."""
    two_levels: TwoLevels | None = None
    """The networks of sums on two levels. None: `network` and `local` serve them, too."""
    slowdown: float = 0.0
    """How much communication slows an accelerator down: collectives and codec stages that run for t seconds during the
    backward pass make it longer by slowdown · t."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.ranks_per_host < 1 or self.world_size % self.ranks_per_host:
            raise ValueError(
                f"{self.world_size} ranks, {self.ranks_per_host} on each host, are not possible: "
                "world_size must be a positive multiple of ranks_per_host"
            )
        if self.ranks_per_host > 1 and self.local is None:
            raise ValueError(f"ranks_per_host={self.ranks_per_host} needs the network within a host: set local")
        if self.cores is not None and self.cores <= 0:
            raise ValueError(f"cores={self.cores} is not possible: use a positive number, or None for accelerators")

    @property
    def num_hosts(self) -> int:
        """Hosts, each with `ranks_per_host` ranks."""
        return self.world_size // self.ranks_per_host

    def codec(self, wire: str) -> Codec:
        """The codec costs of `wire`. Raises ValueError if they are unknown."""
        if wire not in self.codecs:
            raise ValueError(f"no codec costs of wire {wire!r} are known, only of {', '.join(sorted(self.codecs))}")
        return self.codecs[wire]
