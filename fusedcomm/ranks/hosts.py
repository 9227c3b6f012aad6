"""Which ranks share a host. A sum on two levels adds within hosts first, then between them."""

import dataclasses
from collections.abc import Iterable, Sequence

from fusedcomm.native import _C

AUTO = "auto"
"""Value of ``hosts=``: ranks with the same host name share a host. Sums have two levels where that is possible."""


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The ranks of each host, equally many on every host."""

    groups: tuple[tuple[int, ...], ...]
    """The ranks of each host in rank order, hosts in the order of their lowest ranks."""

    @property
    def num_hosts(self) -> int:
        return len(self.groups)

    @property
    def ranks_per_host(self) -> int:
        return len(self.groups[0])

    def described(self, local_wire: str, device_type: str) -> str:
        """The hosts of sums on two levels and how these are sent, for people. Never empty."""
        text = f"{self.num_hosts} hosts × {self.ranks_per_host} ranks, {local_wire} inside a host"
        return f"{text}, on three wire streams" if device_type == "cuda" else text

    @property
    def flat_reason(self) -> str:
        """Why sums have one level although hosts are given; empty if they have two."""
        if self.num_hosts == 1:
            number = self.ranks_per_host
            return f"all {number} ranks are on one host" if number > 1 else "there is one rank"
        return "every host has one rank" if self.ranks_per_host == 1 else ""

    @property
    def apart(self) -> list[int]:
        """The ranks of the first host whose ranks are not consecutive; empty if there is none."""
        return next((list(group) for group in self.groups if group[-1] - group[0] >= len(group)), [])

    def place(self, rank: int) -> tuple[int, int]:
        """Returns (the rank's number within its host, the host's number)."""
        return next((group.index(rank), host) for host, group in enumerate(self.groups) if rank in group)


@dataclasses.dataclass(frozen=True)
class OwnHost:
    """This rank's host, for counts of the bytes that go to others; without arguments one rank that is alone there."""

    num_ranks: int = 1
    num_links: int = 1
    """Links that lead to other hosts, of the ring that an all-reduce makes of all ranks in their order."""

    @classmethod
    def of(cls, hosts: Sequence[object], rank: int) -> "OwnHost":
        """That of `rank`. hosts: each rank's host, by name or number."""
        own = [each for each, host in enumerate(hosts) if host == hosts[rank]]
        return cls(len(own), sum(hosts[(each + 1) % len(hosts)] != hosts[rank] for each in own))

    def sent_nbytes(self, plans: Iterable["_C.BucketPlan"]) -> int:
        """Bytes that the ranks of this host send to other hosts in these sums."""
        return self.num_ranks * sum(plan.sent_between_hosts_nbytes(self.num_ranks, self.num_links) for plan in plans)


def ordered(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Sorts each host's ranks, and hosts by their lowest rank."""
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def checked(groups: tuple[tuple[int, ...], ...], world_size: int) -> Hosts:
    """The hosts by ordered `groups` of equal size. Raises ValueError if these do not hold each rank once."""
    ranks = sorted(rank for group in groups for rank in group)
    if ranks != list(range(world_size)):
        missing, unknown = sorted({*range(world_size)} - {*ranks}), sorted({*ranks} - {*range(world_size)})
        problem = f"rank(s) {missing} are missing" if missing else f"rank(s) {unknown} do not exist"
        given = [list(group) for group in groups]
        raise ValueError(f"hosts={given} is not possible with {world_size} ranks: {problem}: put each on one host")
    return Hosts(groups)


def by_number(ranks_per_host: int, world_size: int) -> Hosts:
    """Hosts of `ranks_per_host` consecutive ranks. ValueError if that does not divide `world_size`."""
    if world_size % ranks_per_host:
        raise ValueError(f"hosts={ranks_per_host} ranks on each host are not possible with {world_size} ranks")
    return Hosts(ordered(range(first, first + ranks_per_host) for first in range(0, world_size, ranks_per_host)))


def given(groups: int | tuple[tuple[int, ...], ...], world_size: int) -> Hosts:
    """The hosts that a user gave for `world_size` ranks. Raises ValueError if they do not fit the ranks."""
    return by_number(groups, world_size) if isinstance(groups, int) else checked(groups, world_size)


def uneven(sizes: dict[str, int]) -> str:
    """Names two hosts that have different numbers of ranks, "host a has 2 ranks, host b 1"; empty if none have."""
    first, size = next(iter(sizes.items()))
    for name, other in sizes.items():
        if other != size:
            return f"{first} has {size} rank{'s' if size > 1 else ''}, {name} {other}"
    return ""


def check_even(sizes: dict[str, int]) -> None:
    """Raises ValueError if hosts, by name, have different numbers of ranks."""
    if difference := uneven(sizes):
        raise ValueError(
            f"sums on two levels need as many ranks on every host, and {difference}: give all the same number of "
            "ranks, or use hosts='auto', which has one level there"
        )


def of_names(names: Sequence[str]) -> Hosts:
    """The hosts by the host name of each rank. Raises ValueError if hosts have different numbers of ranks."""
    groups = _by_name(names)
    check_even({name: len(ranks) for name, ranks in groups.items()})
    return Hosts(ordered(groups.values()))


def even_of_names(names: Sequence[str]) -> tuple[Hosts | None, str]:
    """(The hosts by the host name of each rank, None if they have different numbers of ranks; why sums on these hosts
    have one level, empty if they can have two)."""
    groups = _by_name(names)
    if difference := uneven({name: len(ranks) for name, ranks in groups.items()}):
        return None, f"{difference}, and two need as many on every host"
    hosts = Hosts(ordered(groups.values()))
    return hosts, hosts.flat_reason


def _by_name(names: Sequence[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        groups.setdefault(f"host {name}", []).append(rank)
    return groups
