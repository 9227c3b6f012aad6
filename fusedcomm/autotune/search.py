"""The search of ``config="auto"``: what it tries, for how many steps, and what it keeps. No ranks, no clock, no engine.

Steps 1 and 4 try DDP's own all-reduce only where DDP makes the buckets; :class:`fusedcomm.GradReducer` has none. Step 3
is made only where the sizes of buckets can be chosen.

1. The search tries DDP's own all-reduce ("off"), then every wire, the most exact first. A less exact wire is preferred
   only if it is faster by more than MARGIN, and any wire only if it is faster than off by more than MARGIN. If no wire
   comes NEAR to off, off is kept.
2. It tries the best wire with other sums; where hosts have several ranks also on one level, if it had two, or on two,
   if it had one; then with other chunks.
3. It tries the best candidate with larger buckets, as long as each next size is faster than all before, then in the
   same way with smaller ones. Another size is preferred only if it is faster by more than MARGIN.
4. It tries the finalists again, in case the machine was busy during step 1: off, or the exact candidate that beats it;
   the best candidate so far, and the same with the usual buckets; and the fastest other wire that came NEAR to the
   best. Finalists that are not FAR behind are tried once more. The winner of this step is kept.

"fp32" is as exact as off and can be faster, because it divides on a thread of its own. It, too, must be faster by more
than MARGIN: during the search off divides in a separate pass on the backward pass's thread, but once off is kept, DDP
divides while it copies, without a hook.

Each try is one trial: some steps to warm up, then TIMED steps.
"""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from fusedcomm import files

WARM_UP = 4
"""Steps at the beginning of a candidate's first trial that are not timed. DDP rebuilds its buckets after the first or
second step, connections and memory are used for the first time, and the third step is measured (``measure_every``)."""
WARM_UP_AGAIN = 2
"""The same for a later trial. Its first step still waits for what the trial before had sent."""
TIMED = 5
"""Timed steps of a trial. Each rank takes their median; the trial's time is the largest of the medians."""

MARGIN = 0.03
"""Share of a step by which a less exact candidate, or any candidate but off, must be faster."""
NEAR = 0.1
"""Share of a step. If a wire is slower than off by more, other chunks will not make it faster. If it is slower than
another wire by less, chance may have decided."""
FAR = 0.3
"""Share of a step. A finalist that is slower than the best by more is not tried once more."""
MAX_ROUNDS, MAX_FINALISTS = 2, 3
"""Most rounds of step 4, and most of its finalists with different wires."""

_FILE_VERSION = 2


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice of the search. For None in the chunks' fields see :class:`fusedcomm.Chunks`."""

    wire: str
    sum: str = "auto"
    chunk_nbytes: int | None = None
    chunks_in_flight: int | None = None
    by_host: bool = False
    """Sums on two levels, where hosts="auto" leaves that open: ranks with the same host name share a host."""
    bucket_mib: float | None = None
    """MiB at which a bucket is complete; None where the search does not choose that."""

    @property
    def is_exact(self) -> bool:
        """Whether it rounds nothing: gradients are those of DDP but for the order of addition."""
        return self.wire in ("off", "fp32")

    def __str__(self) -> str:
        name = self.wire if self.sum == "auto" else f"{self.wire} {self.sum}"
        if self.by_host:
            name += " by host"
        if self.chunk_nbytes is not None:
            name += f" in chunks of {self.chunk_nbytes / 1024:g} KiB"
        if self.chunks_in_flight is not None:
            name += f" × {self.chunks_in_flight}"
        if self.bucket_mib is not None:
            name += f" in buckets of {self.bucket_mib:g} MiB"
        return name


OFF = Candidate("off")
"""DDP's own exact all-reduce."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate and the time of a step with it, in one of its trials."""

    candidate: Candidate
    step_ms: float
    """The largest of the ranks' median step times; infinite if the candidate could not be made."""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of a search. ``str()`` is for people. Equal on every rank."""

    finished: bool
    chosen: Candidate | None
    """None while the search goes on."""
    trials: tuple[Trial, ...]
    num_steps: int
    """Training steps that the search has taken so far."""
    max_steps: int
    """Most training steps that the search takes."""
    world_size: int
    device_type: str
    model: str
    """A digest of the parameters' names, shapes and dtypes."""
    loaded: bool = False
    """Whether :class:`fusedcomm.Auto` was given this result, so that no search was made."""
    wires: tuple[str, ...] = ()
    """The wires that the search may choose, beside DDP's own all-reduce; empty if that is not known."""
    more_wires: tuple[str, ...] = ()
    """Other wires that it may choose only if ``Auto(wires=…)`` names them."""
    option: str = "config='auto'"
    """The argument that asked for the search."""
    has_off: bool = True
    """Whether the search may choose DDP's own all-reduce."""

    @property
    def step_ms(self) -> dict[Candidate, float]:
        """Step time by candidate, in the order of first trials; of several trials, the mean of all but the first."""
        return {candidate: statistics.mean(times[1:] or times) for candidate, times in self._looks.items()}

    @property
    def _looks(self) -> dict[Candidate, list[float]]:
        """Times of each candidate's trials, in their order."""
        looks: dict[Candidate, list[float]] = {}
        for trial in self.trials:
            looks.setdefault(trial.candidate, []).append(trial.step_ms)
        return looks

    @property
    def has_tried_two_levels(self) -> bool:
        """Whether a candidate with sums on two levels had a trial."""
        return any(trial.candidate.by_host for trial in self.trials)

    @property
    def line(self) -> str:
        """The choice, or how far the search is; never empty."""
        looks = self._looks
        times = _times({candidate: seen[0] for candidate, seen in looks.items()})
        if again := {candidate: statistics.mean(seen[1:]) for candidate, seen in looks.items() if seen[1:]}:
            times += f"; once more: {_times(again)}"
        if not self.finished:
            return (
                f"{self.option} is searching, step {self.num_steps} of at most {self.max_steps}: {times or 'no times'}"
            )
        how = "chosen before by" if self.loaded else "chosen by"
        tried = f"from {len(self.step_ms)} candidates in {self.num_steps} steps: {times}" if times else "at once"
        return f"{self.chosen} {how} {self.option} {tried}"

    @property
    def wires_line(self) -> str:
        """Which wires it may choose, and how to let it choose others; empty if that is not known."""
        if not self.wires:
            return ""
        line = f"it may choose {', '.join((*([OFF.wire] if self.has_off else []), *self.wires))}"
        if not self.more_wires:
            return line
        example = (*self.wires, "int8" if "int8" in self.more_wires else self.more_wires[0])
        return f"{line}; {', '.join(self.more_wires)} only if named: fusedcomm.Auto(wires={example!r})"

    def __str__(self) -> str:
        lines = [f"fusedcomm: {self.line}"]
        if self.wires_line:
            lines.append(f"  {self.wires_line}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the result as JSON, for ``Auto(tuned=path)``. One rank is enough: all have the same result.

        Raises:
            RuntimeError: the search has not ended.
        """
        if not self.finished:
            raise RuntimeError(
                f"the search has not ended (step {self.num_steps} of at most {self.max_steps}): nothing to save yet"
            )
        fields = dataclasses.asdict(self)
        for trial in fields["trials"]:
            if trial["step_ms"] == math.inf:  # JSON has no infinity
                trial["step_ms"] = None
        files.write_text(path, json.dumps({"fusedcomm tuning": _FILE_VERSION, **fields}, indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tuning":
        """Reads what :meth:`save` wrote. Raises ValueError, naming the path, for anything else."""
        try:
            fields = json.loads(Path(path).read_text())
            if fields.pop("fusedcomm tuning") != _FILE_VERSION:
                raise ValueError("another version wrote it")
            fields["chosen"] = Candidate(**fields["chosen"])
            fields["trials"] = tuple(
                Trial(
                    Candidate(**trial["candidate"]), math.inf if trial["step_ms"] is None else float(trial["step_ms"])
                )
                for trial in fields["trials"]
            )
            for name in ("wires", "more_wires"):
                fields[name] = tuple(fields.get(name, ()))
            return cls(**fields)
        except OSError as error:
            raise ValueError(f"tuned={os.fspath(path)!r} cannot be read: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"tuned={os.fspath(path)!r} is not what Tuning.save() writes ({type(error).__name__}: {error}): save "
                "it again, or leave out tuned to search again"
            ) from error


def loaded(tuned: Tuning | str | os.PathLike | None) -> Tuning | None:
    """The result that ``Auto(tuned=…)`` was given. Raises ValueError if it is a path that cannot be read."""
    if isinstance(tuned, (str, os.PathLike)):
        tuned = Tuning.load(tuned)
    return None if tuned is None else dataclasses.replace(tuned, loaded=True)


def _times(step_ms: dict[Candidate, float]) -> str:
    return ", ".join(
        f"{candidate} {'could not be made' if ms == math.inf else f'{ms:.4g} ms'}" for candidate, ms in step_ms.items()
    )


class Search:
    """Says which candidate to try next, and records how long its steps took. The same times give the same choice.

    Args:
        wires: the candidates beside off, the most exact first.
        sums: returns alternatives to the best candidate so far with other sums, the preferred ones first.
        chunks: the same with other chunks.
        sizes: returns alternatives with larger buckets, and those with smaller ones, the nearest sizes first.
        has_off: whether DDP's own all-reduce is a candidate.
    """

    def __init__(
        self,
        wires: Sequence[Candidate],
        sums: Callable[[Candidate], Sequence[Candidate]],
        chunks: Callable[[Candidate], Sequence[Candidate]],
        sizes: Callable[[Candidate], Sequence[Sequence[Candidate]]] = lambda best: (),
        has_off: bool = True,
    ) -> None:
        self.trials: list[Trial] = []
        self.finished = False
        self._order = self._search(wires, (sums, chunks), sizes, has_off)
        self.candidate = next(self._order)
        """The candidate to try now; once finished, the choice."""

    @property
    def trial_steps(self) -> int:
        """Steps of the candidate's trial, those to warm up included."""
        again = any(trial.candidate == self.candidate for trial in self.trials)
        return (WARM_UP_AGAIN if again else WARM_UP) + TIMED

    def record(self, step_ms: float) -> None:
        """Records the candidate's time and goes on to the next candidate."""
        self.trials.append(Trial(self.candidate, step_ms))
        try:
            self.candidate = self._order.send(step_ms)
        except StopIteration as end:
            self.candidate, self.finished = end.value, True

    @staticmethod
    def _search(
        wires: Sequence[Candidate],
        refinements: Sequence[Callable[[Candidate], Sequence[Candidate]]],
        sizes: Callable[[Candidate], Sequence[Sequence[Candidate]]],
        has_off: bool,
    ) -> Generator[Candidate, float, Candidate]:
        off = {}
        if has_off:
            off[OFF] = yield OFF
        tried = {}
        for candidate in wires:
            tried[candidate] = yield candidate
        best = preferred(tried)
        if has_off and tried[best] > (1 + NEAR) * off[OFF]:
            return OFF
        near = (1 + NEAR) * min(tried.values())
        others = [c for c, ms in tried.items() if c != best and not c.is_exact and ms <= near]
        runner_up = sorted(others, key=tried.get)[:1]
        tried_exact = {**off, **{candidate: ms for candidate, ms in tried.items() if candidate.is_exact}}
        for alternatives in refinements:
            tried = {best: tried[best]}
            for candidate in alternatives(best):
                tried[candidate] = yield candidate
            best = preferred(tried)
        usual, tried = best, {best: tried[best]}
        for towards in sizes(usual):
            for candidate in towards:
                before = min(tried.values())
                tried[candidate] = yield candidate
                if tried[candidate] >= before:
                    break
        best = next(candidate for candidate, ms in tried.items() if (1 - MARGIN) * ms <= min(tried.values()))
        exact = off if best.is_exact else tried_exact
        rivals = [_in_buckets_of(best, candidate) for candidate in ([preferred(exact)] if exact else [])]
        names = [candidate.wire for candidate in wires]
        ours = [usual, best, *(_in_buckets_of(best, candidate) for candidate in runner_up)]
        ours.sort(key=lambda candidate: names.index(candidate.wire))
        again = dict.fromkeys([*rivals, *ours], 0.0)
        for _ in range(MAX_ROUNDS if len(again) > 1 else 0):
            for candidate in again:
                again[candidate] += yield candidate
            again = {candidate: ms for candidate, ms in again.items() if (1 - FAR) * ms <= min(again.values())}
            if len(again) == 1:
                break
        chosen = preferred(again)
        if chosen == best and (1 - MARGIN) * again.get(usual, math.inf) <= again[best]:
            return usual
        return chosen


def _in_buckets_of(best: Candidate, candidate: Candidate) -> Candidate:
    """The candidate with as large buckets as `best`: a size that suits one wire suits the others, too."""
    return candidate if candidate == OFF else dataclasses.replace(candidate, bucket_mib=best.bucket_mib)


def preferred(step_ms: dict[Candidate, float]) -> Candidate:
    """Of the candidates that none beats by more than MARGIN: off, else the fastest exact one, else the first."""
    enough = min(step_ms.values()) / (1 - MARGIN)
    near = [candidate for candidate, ms in step_ms.items() if ms <= enough]
    if OFF in near:
        return OFF
    return min((candidate for candidate in near if candidate.is_exact), key=step_ms.get, default=near[0])


def max_steps(num_wires: int, num_sums: int, num_chunks: int, num_sizes: int = 0, has_off: bool = True) -> int:
    """Most steps of a search with these numbers of wires and alternatives."""
    num_candidates = has_off + num_wires + num_sums + num_chunks + num_sizes
    num_finalists = min(has_off + num_wires, MAX_FINALISTS) + (num_sizes > 0)
    return num_candidates * (WARM_UP + TIMED) + num_finalists * MAX_ROUNDS * (WARM_UP_AGAIN + TIMED)
