"""Whether the sums of a session have one level or two, on which hosts, and why."""

import dataclasses
import warnings
from collections.abc import Sequence

from fusedcomm.config import Config, combinations
from fusedcomm.ranks import hosts
from fusedcomm.ranks.hosts import Hosts, OwnHost

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True)
class Levels:
    """The levels of a session's sums."""

    hosts: Hosts | None
    """None with ``hosts=None``, and if hosts have different numbers of ranks."""
    one_level_reason: str
    """Why sums have one level although `Config.hosts` is not None; empty if they have two, or with ``hosts=None``."""
    own_host: OwnHost
    """This rank's host, on one level, too."""

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each host if sums have two levels, else 1."""
        return 1 if self.hosts is None or self.one_level_reason else self.hosts.ranks_per_host

    def described(self, local_wire: str, device_type: str) -> str:
        """The hosts of sums on two levels and how these are sent, for people; empty if they have one level."""
        if self.hosts is None or self.one_level_reason:
            return ""
        return self.hosts.described(local_wire, device_type)

    @property
    def why_not_two(self) -> str:
        """`one_level_reason`, but empty on hosts where there is but one level: one host, or hosts of one rank each."""
        return "" if self.hosts is not None and self.hosts.flat_reason else self.one_level_reason

    def warn_of_more(self, config: Config, nbytes: int, torchs: str, torchs_nbytes: int, stacklevel: int) -> None:
        """Warns if sums on one level send more to other hosts than torch's own, which `torchs` names.

        nbytes, torchs_nbytes: what a host sends in a step.
        """
        if self.ranks_per_host == 1 and nbytes > torchs_nbytes:
            warnings.warn(
                f"fusedcomm: a host sends {nbytes / _MIB:.2f} MiB to others in a step in place of the "
                f"{torchs_nbytes / _MIB:.2f} MiB of {torchs}, because sums have one level, not two: "
                f"{self.one_level_reason or f'hosts={config.hosts!r}'}",
                stacklevel=stacklevel + 1,
            )

    def are_those_of(self, other: "Levels") -> bool:
        """Whether both need the same channels."""
        return self.ranks_per_host == other.ranks_per_host and (self.ranks_per_host == 1 or self.hosts == other.hosts)


def find(config: Config, host_names: Sequence[str], rank: int, of_rows: bool = False) -> Levels:
    """The levels for ranks on these hosts; the same on every rank, but for its own host.

    of_rows: whether these are the levels of reduce-scatters and all-gathers, which send shards in the order of ranks.

    Raises:
        ValueError: `config` needs two levels, and the hosts do not fit it.
    """
    found, reason = hosts.even_of_names(host_names)
    host_of: Sequence[object] = host_names
    if config.needs_two_levels:
        by_name = config.groups == hosts.AUTO
        found = hosts.of_names(host_names) if by_name else hosts.given(config.groups, len(host_names))
        host_of = [found.place(each)[1] for each in range(len(host_names))]
        reason = found.flat_reason
    if of_rows and not reason and (apart := found.apart):
        if config.needs_two_levels:
            raise ValueError(
                f"fusedcomm: hosts={config.hosts!r} does not fit the shards: two levels need those of a host one after "
                f"another, and ranks {apart} share one: order the ranks by host, or use hosts=None"
            )
        reason = f"shards must lie host by host, and ranks {apart} share one"
    if config.weighted is not None and config.feedback is not None and not reason:
        # On two levels a residual is of a host's ranks together, which have weights of their own.
        if config.needs_two_levels:
            given = {"hosts": config.hosts, "feedback": config.feedback, "weighted": config.weighted}
            combinations.refuse("sums on two levels", given)
        reason = "error feedback of weighted gradients has one"
    own_host = OwnHost.of(host_of, rank)
    if config.hosts is None:
        return Levels(None, "", own_host)
    return Levels(found, reason or config.one_level_reason, own_host)
