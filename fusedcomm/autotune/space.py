"""The candidates of ``wire="auto"``: which ones the user's options allow, and the configuration of each."""

import dataclasses

from fusedcomm.autotune.auto import Auto, is_possible
from fusedcomm.autotune.search import OFF, Candidate
from fusedcomm.config import Checks, Chunks, Config
from fusedcomm.ranks import hosts

MAX_SUMS, MAX_CHUNKS = 3, 2
"""Most alternative sums, two levels included, and most alternative chunks that a search tries."""


class Space:
    """The candidates that the user lets the search choose from."""

    def __init__(self, auto: Auto) -> None:
        self._auto, self._base = auto, auto.common
        self.wires = auto.tried
        self.first = tuple(self._first(wire) for wire in self.wires)
        self.keeps_residuals = self._base.feedback is not None

    @property
    def config_of_off(self) -> Config:
        """Configuration of the session that stands in for DDP's own all-reduce."""
        levels = self._base.two_levels
        if levels is not None:
            levels = dataclasses.replace(levels, local_wire=None)  # an exact wire refuses one that rounds
        return Config("fp32", checks=Checks(measure_every=0), chunks=self._base.chunks, hosts=levels)

    def _first(self, wire: str) -> Candidate:
        """The candidate with which a wire is tried first."""
        chunks = self._base.chunks
        return Candidate(wire, self._base.sum, chunks.nbytes, chunks.in_flight)

    def config(self, candidate: Candidate) -> Config:
        """The candidate's configuration. Raises ValueError if it is not possible."""
        return dataclasses.replace(
            self._base,
            wire=candidate.wire,
            sum=candidate.sum,
            chunks=Chunks(candidate.chunk_nbytes, candidate.chunks_in_flight),
            hosts=hosts.AUTO if candidate.by_host else self._base.hosts,
        )

    def is_possible(self, candidate: Candidate) -> bool:
        return is_possible(lambda: self.config(candidate))

    def allows(self, candidate: Candidate) -> bool:
        """Whether a search may end with this candidate."""
        if candidate == OFF:
            return True
        base = self._base
        chosen = (candidate.sum, candidate.chunk_nbytes, candidate.chunks_in_flight)
        fixed = (base.sum, base.chunks.nbytes, base.chunks.in_flight)
        return (
            candidate.wire in self.wires
            and all(user in ("auto", None, found) for found, user in zip(chosen, fixed, strict=True))
            and not (candidate.by_host and base.hosts is not None)
            and self.is_possible(candidate)
        )

    def sums(self, best: Candidate, used: set[str], world_size: int, can_have_two_levels: bool) -> list[Candidate]:
        """Returns alternatives to `best` with other sums.

        Args:
            used: the sums that the buckets of `best` have now.
        """
        others = []
        if best.sum == "auto":
            # With two ranks a two-shot sends as much as a one-shot but takes longer. With more, a one-shot sends more.
            of_codes = "one-shot" if self.config(best).is_one_shot(world_size) else "two-shot"
            names = ("exact", "direct", of_codes)
            others = [dataclasses.replace(best, sum=name) for name in names if name not in used]
            others = [candidate for candidate in others if self.is_possible(candidate)][: MAX_SUMS - 1]
        by_host = dataclasses.replace(best, by_host=True)
        # On two levels other ranks keep the residuals, so the residuals so far would be lost.
        if can_have_two_levels and not self.keeps_residuals and self.allows(by_host):
            others.append(by_host)
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

    def record(self) -> dict:
        """What must be equal on all ranks, JSON-serializable."""
        return {"wires": self.wires, "base": self._base.record()}
