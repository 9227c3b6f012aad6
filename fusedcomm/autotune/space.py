"""The candidates of ``config="auto"``: which ones the user's options allow, and the configuration of each."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from fusedcomm.autotune.auto import Auto, is_possible
from fusedcomm.autotune.search import OFF, Candidate, max_steps
from fusedcomm.config import WIRES, Checks, Chunks, Config, TwoLevels
from fusedcomm.ranks import hosts

MAX_SUMS, MAX_CHUNKS = 3, 2
"""Most alternative sums, two levels included, and most alternative chunks that a search tries."""
USUAL_BUCKET_MIB = 25
"""MiB at which a bucket is complete if nobody chooses, as in DDP. Sizes are compared with it."""
OTHER_BUCKETS_MIB = ((50, 100), (10, 5, 1))
"""Larger and smaller sizes that are tried, the nearest first."""


class Space:
    """The candidates that the user lets the search choose from.

    Args:
        has_off: whether DDP's own all-reduce is a candidate.
        has_sizes: whether the search chooses the size of buckets.
    """

    option = "config='auto'"
    """The argument that asks for the search."""
    chooses_wire = True

    def __init__(self, auto: Auto, *, has_off: bool = True, has_sizes: bool = False) -> None:
        self._auto, self._base = auto, auto.common
        self.has_off, self._has_sizes = has_off, has_sizes
        self.wires = auto.tried
        self.keeps_residuals = self._base.feedback is not None
        self.first = tuple(self._first(wire) for wire in self.wires)
        """The candidates with which the wires are tried first; see :meth:`use_hosts`."""

    def use_hosts(self, can_have_two_levels: bool) -> None:
        """Tells whether sums can have two levels on the hosts. If so, and if the user leaves that open, each wire is
        tried first with as many levels as hosts="auto" has without a search."""
        self.first = tuple(
            dataclasses.replace(first, by_host=can_have_two_levels and self._prefers_two_levels(first))
            for first in self.first
        )

    def _prefers_two_levels(self, candidate: Candidate) -> bool:
        # On two levels other ranks keep the residuals, so a change of levels would lose them.
        if self._base.hosts != hosts.AUTO or self.keeps_residuals:
            return False
        return dataclasses.replace(self.config(candidate), hosts=hosts.AUTO).two_levels is not None

    @property
    def max_steps(self) -> int:
        """Most steps of a search."""
        num_sizes = sum(map(len, OTHER_BUCKETS_MIB)) if self._has_sizes else 0
        return max_steps(len(self.first), *self._max_refinements, num_sizes, self.has_off)

    @property
    def _max_refinements(self) -> tuple[int, int]:
        return MAX_SUMS, MAX_CHUNKS

    @property
    def base(self) -> Candidate:
        """The candidate whose session is made first. The others share its channels."""
        return OFF if self.has_off else self.first[0]

    def config_of_base(self) -> Config:
        """The configuration of that session."""
        return self._config_of_off() if self.has_off else self.config(self.base)

    def _config_of_off(self) -> Config:
        """Configuration of the session that stands in for DDP's own all-reduce."""
        levels = None
        if self._base.needs_two_levels:
            # An exact wire refuses a local one that rounds.
            levels = dataclasses.replace(self._base.two_levels, local_wire=None)
        checks = Checks(measure_every=0, digest=self._base.checks.digest)
        return Config("fp32", checks=checks, chunks=self._base.chunks, hosts=levels)

    def _first(self, wire: str) -> Candidate:
        """The candidate with which a wire is tried first."""
        chunks = self._base.chunks
        bucket_mib = USUAL_BUCKET_MIB if self._has_sizes else None
        return Candidate(wire, self._base.sum, chunks.nbytes, chunks.in_flight, bucket_mib=bucket_mib)

    def config(self, candidate: Candidate) -> Config:
        """The candidate's configuration. Raises ValueError if it is not possible."""
        return dataclasses.replace(
            self._base,
            wire=candidate.wire,
            sum=candidate.sum,
            chunks=Chunks(candidate.chunk_nbytes, candidate.chunks_in_flight),
            hosts=TwoLevels() if candidate.by_host else None if self._base.hosts == hosts.AUTO else self._base.hosts,
        )

    def is_possible(self, candidate: Candidate) -> bool:
        """Whether :meth:`config` can make the candidate's configuration."""
        return is_possible(lambda: self.config(candidate))

    def allows(self, candidate: Candidate) -> bool:
        """Whether a search may end with this candidate."""
        if candidate == OFF:
            return self.has_off
        base = self._base
        chosen = (candidate.sum, candidate.chunk_nbytes, candidate.chunks_in_flight)
        fixed = (base.sum, base.chunks.nbytes, base.chunks.in_flight)
        return (
            candidate.wire in self.wires
            and all(user in ("auto", None, found) for found, user in zip(chosen, fixed, strict=True))
            and (candidate.bucket_mib is not None) == self._has_sizes
            and not (candidate.by_host and base.hosts != hosts.AUTO)
            and self.is_possible(candidate)
        )

    def sums(self, best: Candidate, used: set[str], world_size: int, can_have_two_levels: bool) -> list[Candidate]:
        """Returns alternatives to `best` with other sums, and with the other number of levels.

        Args:
            used: the sums that the buckets of `best` have now.
        """
        others = []
        if best.sum == "auto":
            # With two ranks a two-shot sends as much as a one-shot but takes longer. With more, a one-shot sends more.
            of_codes = "one-shot" if self.config(best).is_one_shot(world_size) else "two-shot"
            names = ("exact", "direct", of_codes)
            others = [
                dataclasses.replace(best, sum=name, by_host=best.by_host and name == "two-shot")
                for name in names
                if name not in used
            ]
            others = [candidate for candidate in others if self.is_possible(candidate)][: MAX_SUMS - 1]
        other_levels = dataclasses.replace(best, by_host=not best.by_host)
        is_open = self._base.hosts == hosts.AUTO and not self.keeps_residuals
        if can_have_two_levels and is_open and self.allows(other_levels):
            others.append(other_levels)
        return others

    def chunks(self, best: Candidate, running: Config, num_chunks: int) -> list[Candidate]:
        """Returns alternatives to `best` with smaller and with larger chunks; none if the user has set their bytes or
        no bucket is cut.

        Args:
            running: the effective configuration of `best`.
            num_chunks: most chunks that a bucket of `best` has now.
        """
        if best.chunk_nbytes is not None or num_chunks <= 1:
            return []
        nbytes, in_flight = running.chunks.nbytes, running.chunks.in_flight
        tried = [(max(4096, nbytes // 2), min(64, 2 * in_flight)), (4 * nbytes, max(1, in_flight // 2))][:MAX_CHUNKS]
        if best.chunks_in_flight is not None:  # set by the user
            tried = [(nbytes, best.chunks_in_flight) for nbytes, _ in tried]
        return [dataclasses.replace(best, chunk_nbytes=nbytes, chunks_in_flight=number) for nbytes, number in tried]

    def sizes(self, best: Candidate, cut: Callable[[float], Sequence[int]]) -> list[list[Candidate]]:
        """Returns alternatives to `best` with larger buckets, and those with smaller ones; none if the search does not
        choose the size.

        Args:
            cut: returns the bytes of the buckets that a number of MiB makes. Of several sizes with the same buckets the
                nearest to the usual one is tried.
        """
        if not self._has_sizes:
            return []
        alternatives = []
        for sizes in OTHER_BUCKETS_MIB:
            cuts = {mib: list(cut(mib)) for mib in (best.bucket_mib, *sizes)}
            others = [mib for before, mib in itertools.pairwise(cuts) if cuts[mib] != cuts[before]]
            alternatives.append([dataclasses.replace(best, bucket_mib=mib) for mib in others])
        return alternatives

    def record(self) -> dict:
        """What must be equal on all ranks, JSON-serializable."""
        return {"wires": self.wires, "base": self._base.record()}

    @property
    def more_wires(self) -> tuple[str, ...]:
        """The wires that the user could name beside those that are tried."""
        return tuple(w for w in WIRES if w not in self.wires and is_possible(lambda w=w: self._auto.config(w)))


class BucketSpace(Space):
    """One configuration, with buckets of several sizes."""

    option = "bucket_mib='auto'"
    chooses_wire = False

    def __init__(self, config: Config) -> None:
        self._config = config
        super().__init__(Auto((config.wire,), config), has_off=False, has_sizes=True)

    def use_hosts(self, can_have_two_levels: bool) -> None:
        """Does nothing: the configuration has as many levels as without a search."""

    def config(self, candidate: Candidate) -> Config:
        """The given configuration: only the size of buckets is searched."""
        return self._config

    def sums(self, best: Candidate, used: set[str], world_size: int, can_have_two_levels: bool) -> list[Candidate]:
        """None: the sum is given."""
        return []

    def chunks(self, best: Candidate, running: Config, num_chunks: int) -> list[Candidate]:
        """None: chunks are as given."""
        return []

    @property
    def _max_refinements(self) -> tuple[int, int]:
        return 0, 0
