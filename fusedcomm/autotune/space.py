"""What ``wire="auto"`` may choose from: the candidates that a user's options allow, and the configuration of each."""

import dataclasses
from collections.abc import Mapping, Sequence

from fusedcomm.autotune.search import OFF, Candidate
from fusedcomm.config import WIRES, Config
from fusedcomm.native import _C
from fusedcomm.ranks import hosts

DEFAULT_WIRES = ("fp32", "bf16")
"""Of these, what the other options allow."""

MAX_SUMS, MAX_CHUNKS = 3, 2
"""Alternatives that a search tries."""

_OFF_OPTIONS = ("hosts", "chunk_nbytes", "chunks_in_flight")
"""Options that the session has which stands for DDP's own all-reduce."""


class Space:
    """What the user lets the search choose from.

    Args:
        wires: what may travel, beside DDP's own all-reduce. None: DEFAULT_WIRES.
        options: the other fields of :class:`Config`.

    Raises:
        ValueError: an option is not possible with one of the wires, or `wires` itself is not.
    """

    def __init__(self, wires: Sequence[str] | None, options: Mapping[str, object]) -> None:
        self._options = dict(options)
        if wires is None:
            wires = [wire for wire in DEFAULT_WIRES if self.is_possible(self._first(wire))] or DEFAULT_WIRES[-1:]
        if isinstance(wires, str):
            raise ValueError(f"wires={wires!r} is one string: pass a tuple, wires=({wires!r},)")
        if not isinstance(wires, Sequence):
            raise ValueError(f"wires={wires!r} is not possible: pass a tuple of {', '.join(map(repr, WIRES))}")
        if not wires:
            raise ValueError(f"wires={wires!r} leaves nothing to try: name some of {', '.join(map(repr, WIRES))}")
        for wire in wires:
            if wire not in WIRES:
                hint = "; DDP's own all-reduce is always tried" if wire == OFF.wire else ""
                raise ValueError(
                    f"wires={tuple(wires)!r}: {wire!r} is not known: use {', '.join(map(repr, WIRES))}{hint}"
                )
        self.wires = tuple(sorted(dict.fromkeys(wires), key=lambda wire: (-_C.exactness(wire), WIRES.index(wire))))
        self.first = tuple(self._first(wire) for wire in self.wires)
        for candidate in self.first:
            try:
                self.config(candidate)
            except ValueError as error:
                raise ValueError(
                    f"wire='auto' cannot try {candidate.wire!r} of wires={self.wires!r}: {error}"
                ) from error
        of_off = {name: self._options[name] for name in _OFF_OPTIONS}
        self.config_of_off = Config(wire="fp32", measure_every=0, **of_off)
        self.keeps_residuals = self.config(self.first[0]).error_feedback is not None

    def _first(self, wire: str) -> Candidate:
        """How a wire is tried first."""
        return Candidate(wire, *(self._options[name] for name in ("sum", "chunk_nbytes", "chunks_in_flight")))

    def config(self, candidate: Candidate) -> Config:
        """Raises ValueError if it is not possible."""
        options = {**self._options, **dataclasses.asdict(candidate)}
        if options.pop("by_host"):
            options["hosts"] = hosts.AUTO
        return Config(**options)

    def is_possible(self, candidate: Candidate) -> bool:
        try:
            self.config(candidate)
        except ValueError:
            return False
        return True

    def allows(self, candidate: Candidate) -> bool:
        """Whether a search may end with it."""
        if candidate == OFF:
            return True
        fixed = [
            name for name in ("sum", "chunk_nbytes", "chunks_in_flight") if self._options[name] not in ("auto", None)
        ]
        return (
            candidate.wire in self.wires
            and all(getattr(candidate, name) == self._options[name] for name in fixed)
            and not (candidate.by_host and self._options["hosts"])
            and self.is_possible(candidate)
        )

    def sums(self, best: Candidate, used: set[str], world_size: int, can_have_two_levels: bool) -> list[Candidate]:
        """With other sums than those that `best` uses for its buckets now."""
        others = []
        if best.sum == "auto":
            # Of two ranks a two-shot sends what a one-shot does, later; of more a one-shot sends more.
            of_codes = "one-shot" if self.config(best).is_one_shot(world_size) else "two-shot"
            names = ("exact", "direct", of_codes)
            others = [dataclasses.replace(best, sum=name) for name in names if name not in used]
            others = [candidate for candidate in others if self.is_possible(candidate)][: MAX_SUMS - 1]
        by_host = dataclasses.replace(best, by_host=True)
        # Residuals on two levels are other ranks': what is left out until then would be lost.
        if can_have_two_levels and not self.keeps_residuals and self.allows(by_host):
            others.append(by_host)
        return others

    def chunks(self, best: Candidate, running: Config, num_chunks: int) -> list[Candidate]:
        """With smaller, more chunks, and with larger ones than `best` has in `running`, its effective configuration;
        `num_chunks`: most that one of its buckets has now."""
        if best.chunk_nbytes is not None or num_chunks <= 1:
            return []
        nbytes, in_flight = running.chunk_nbytes, running.chunks_in_flight
        tried = [(max(4096, nbytes // 2), min(64, 2 * in_flight)), (4 * nbytes, max(1, in_flight // 2))][:MAX_CHUNKS]
        if best.chunks_in_flight is not None:  # of the user
            tried = [(nbytes, best.chunks_in_flight) for nbytes, _ in tried]
        return [dataclasses.replace(best, chunk_nbytes=nbytes, chunks_in_flight=number) for nbytes, number in tried]

    def record(self) -> dict:
        """What all ranks must share, JSON-serialisable."""
        options = {**self._options, "wire_for": list((self._options["wire_for"] or {}).items())}
        return {"wires": self.wires, "options": options}
