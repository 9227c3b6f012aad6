"""A roll call: what ranks tell each other when one of them has waited too long or has failed, and what follows from
their answers. Ranks exchange JSON. No code decides anything by the words of a label, a failure or a report."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from fusedcomm.ranks.connections import MAX_LISTED, Network, Traffic, ranks_text

Said = TypeVar("Said", "Opening", "State", "Began")

_BUSY_S = 0.5
"""A running rank spends short times in stages of its own. A rank that stays in one for this long keeps others
waiting."""

STALLED, FAILED, CUT = "stalled", "failed", "cut"
"""Why a roll is called: the opener's oldest job does not move; one of its stages threw; it does not move, and some host
acknowledges nothing."""


@dataclasses.dataclass
class Opening:
    """The rank that called the roll, and its reason."""

    rank: int = 0
    why: str = STALLED
    text: str = ""
    """The reason for people: "where nothing has moved for 2.5 s"."""


@dataclasses.dataclass
class State(Traffic):
    """A rank's answer. Every rank hands over the same jobs in the same order, so the counts tell which one is
    behind."""

    num_handed: int = 0
    num_ended: int = 0
    last_step: int = -1
    """The last step that has ended; -1: none."""
    idle_s: float = 0.0
    """Seconds since the last job ended, or since this rank attached."""
    failure: str = ""
    """Empty if this rank has not failed."""

    label: str = ""
    """The oldest job under way, for people; empty: there is none, and what follows means nothing."""
    step: int = 0
    num_chunks: int = 0
    """0: a collective call between steps, such as state_dict()."""
    waits_s: float = 0.0
    """Seconds since the hand-over."""
    at: str = "queue"
    """Where the job is: in "queue" for a stage, in a "stage", or on "stream", with all its work enqueued there."""
    stage: str = ""
    is_on_wire: bool = False
    chunk: int = 0
    stage_s: float = 0.0

    @property
    def is_call(self) -> bool:
        return self.num_chunks == 0

    @property
    def is_at_work(self) -> bool:
        """Whether the job is in a stage that needs no other rank: pack, reduce or unpack."""
        return self.at == "stage" and not self.is_on_wire

    @property
    def doing(self) -> str:
        """ "the all-to-all of chunk 1/4 of bucket 0 (…)", "the others in state_dict()"."""
        label = one_line(self.label)
        if self.is_call:
            return f"the others in {label}"
        if self.at != "stage":
            return ("the next stage of " if self.at == "queue" else "work on the device's streams of ") + label
        return f"the {self.stage} of chunk {self.chunk + 1}/{self.num_chunks} of {label}"

    def since(self, seconds: float) -> str:
        """ "handed over 3.0 s ago"."""
        return f"{'called' if self.is_call else 'handed over'} {seconds:.1f} s ago"


@dataclasses.dataclass
class Began:
    """What a rank says when its watch begins: its addresses, and its process and host for people."""

    own: list[str] = dataclasses.field(default_factory=list)
    who: str = ""


def encode(said: Opening | State | Began) -> str:
    return json.dumps(dataclasses.asdict(said))


def decode(kind: type[Said], text: bytes) -> Said:
    """Raises ValueError, which says why, if the text is cut off, garbled or of another kind."""
    fields = json.loads(text)
    expected = dataclasses.asdict(kind())
    if not isinstance(fields, dict) or {name: type(value) for name, value in fields.items()} != {
        name: type(value) for name, value in expected.items()
    }:
        raise ValueError(f"it is no {kind.__name__}: {text[:40]!r}")
    return kind(**fields)


@dataclasses.dataclass
class RollCall:
    """The answers, as far as they are known."""

    number: int
    world_size: int
    opening: Opening | None
    """None if it cannot be read."""
    waited_s: float = 0.0
    """Seconds spent collecting answers."""
    answers: dict[int, State] = dataclasses.field(default_factory=dict)
    late_s: dict[int, float] = dataclasses.field(default_factory=dict)
    """By rank: seconds until its answer was read, only for late ones."""
    absent: dict[int, str] = dataclasses.field(default_factory=dict)
    """By rank that has not answered: what its process is and where; empty if it has no watch."""
    began: dict[int, Began] = dataclasses.field(default_factory=dict)
    """By absent rank: what it said when its watch began."""
    unreadable: dict[int, str] = dataclasses.field(default_factory=dict)
    """By rank: why its answer cannot be decoded."""
    unread: list[int] = dataclasses.field(default_factory=list)
    """Ranks whose answers were not read from the store in time."""
    store_problem: str = ""


@dataclasses.dataclass
class Finding:
    """What follows from the answers."""

    text: str
    """For people."""
    is_conclusive: bool
    """Whether another roll call would tell no more: every answer is known, and a rank is missing or has failed."""
    slow: set[int]
    """The slow ranks, if nothing else was found."""
    store_is_silent: bool = False
    """Whether the store fell silent, so that another call may find more."""


def conclude(call: RollCall) -> Finding:
    """What follows from the answers. The text has one line for the call, and one indented line for each finding."""
    answers = call.answers
    jobs = {rank: state for rank, state in answers.items() if state.label}
    # The oldest job of all ranks holds up all later ones.
    awaited = min(jobs.values(), key=lambda state: state.num_ended, default=None)
    failed = {} if call.absent else {rank: state for rank, state in answers.items() if state.failure}
    missing = _missing(call)
    late = [
        (rank, f"rank {rank} is slow: it took {seconds:.1f} s to answer, as if its process had been stopped")
        for rank, seconds in call.late_s.items()
    ]
    slow: list[tuple[int, str]] = []
    at_work: list[tuple[int, State]] = []
    waiting: list[tuple[int, State]] = []
    for rank, state in answers.items():
        # A rank that works on a later job, or that has failed, does not hold up the others by this work.
        is_oldest = awaited is not None and state.num_ended == awaited.num_ended
        holds_up = is_oldest and state.is_at_work and not state.failure
        if not state.label:
            if awaited and state.num_handed <= awaited.num_ended and not state.failure:
                slow.append((rank, f"rank {rank} is slow: {_behind_text(state, awaited)}"))
        elif holds_up and state.stage_s >= _BUSY_S:
            busy = f"in step {state.step} busy with {state.doing}, {state.since(state.waits_s)}"
            slow.append((rank, f"rank {rank} is slow: {busy}"))
        else:
            (at_work if holds_up else waiting).append((rank, state))
    cuts = Network(answers).cuts()
    lines = _Lines(f"fusedcomm: roll call {call.number} of {call.world_size} ranks, {opening_text(call.opening)}")
    lines.add(missing, "missing")
    lines.add(
        [f"rank {rank} answered, but its answer cannot be read: {why}" for rank, why in call.unreadable.items()],
        "giving answers that cannot be read",
    )
    if call.unread:
        answers_text = "1 answer" if len(call.unread) == 1 else f"{len(call.unread)} answers"
        slow_store = "" if call.store_problem else ": the store is slow"
        lines.add([f"{answers_text} not read in time, of {ranks_text(call.unread)}{slow_store}"])
    lines.add([call.store_problem] if call.store_problem else [])
    lines.add([f"rank {rank} has failed: {one_line(state.failure)}" for rank, state in failed.items()], "failed")
    lines.add([text for _, text in [*late, *slow]], "slow")
    lines.add([_cut_text(*cut) for cut in cuts], "without a link")
    if not (missing or slow or failed or call.unreadable or call.unread):
        lines.add(_reason(call, awaited, jobs, bool(at_work), bool(cuts)))
    lines.add_groups(at_work, ("is busy", "are busy", "with"), "at work")
    lines.add_groups(waiting, ("waits", "wait", "for"), "waiting elsewhere")
    is_all_read = not (call.unread or call.unreadable)
    is_conclusive = is_all_read and bool(missing or failed)
    named = set() if missing or failed or cuts else {rank for rank, _ in [*late, *slow]}
    return Finding(lines.text, is_conclusive, named)


def _missing(call: RollCall) -> list[str]:
    """A text for each missing rank."""
    found = []
    for rank, who in call.absent.items():
        unacked_s = 0.0
        for address in call.began.get(rank, Began()).own:
            if not any(address in state.own for state in call.answers.values()):
                unacked_s = max([unacked_s, *(state.unacked_s.get(address, 0.0) for state in call.answers.values())])
        head = f"rank {rank} ({who or 'which has no watch'}) is missing: no answer within {call.waited_s:.1f} s"
        if unacked_s:
            why = f"has not acknowledged for {unacked_s:.1f} s what was sent to it. That host is down or cut off"
            found.append(f"{head}, and its host {why}")
        else:
            why = "It is stopped, was killed, has left, is cut off, or is in a call that holds Python's interpreter"
            found.append(f"{head}. {why}")
    return found


def _behind_text(state: State, awaited: State) -> str:
    label = one_line(awaited.label)
    what = f"called {label}, as every rank has to" if awaited.is_call else f"handed over {label} of step {awaited.step}"
    since = "since it attached" if state.last_step < 0 else f"since step {state.last_step}"
    return f"it has not {what}; nothing under way for {state.idle_s:.1f} s, {since}"


def _cut_text(one: list[int], other: list[int], by_one_s: float, by_other_s: float) -> str:
    unacked = " and ".join(
        f"what {ranks_text(sender)} sent has not been acknowledged for {seconds:.1f} s"
        for sender, seconds in ((one, by_one_s), (other, by_other_s))
        if seconds
    ).replace(" and what", ", and what")
    return f"the link between {ranks_text(one)} and {ranks_text(other)} carries nothing: {unacked}"


def _reason(call: RollCall, awaited: State | None, jobs: Mapping[int, State], works: bool, is_cut: bool) -> list[str]:
    """Why ranks wait although no rank is missing, failed, behind or busy; empty if a late rank may be the reason."""
    network = "they wait for the network"
    if call.late_s:  # the network is named only if a link is cut as well
        return [network] if is_cut else []
    if awaited is None:
        return ["every rank answered, and none waits any more"]
    if any(state.num_ended == awaited.num_ended and state.is_call != awaited.is_call for state in jobs.values()):
        return ["the ranks are at different places, and wait for each other"]
    if awaited.is_call:
        return ["every rank answered and none is behind"]
    why = network if is_cut or not works else "some are at work, and the others wait for them"
    return [f"every rank answered and none is behind: {why}"]


class _Lines:
    """A report: its head, and indented lines. At most MAX_LISTED lines of a kind are listed, and the others counted."""

    def __init__(self, head: str) -> None:
        self.text = head

    def add(self, lines: Sequence[str], what: str = "", sizes: Sequence[int] = ()) -> None:
        """what: "missing", for the line that counts the ranks left out. sizes: ranks of each line, 1 if not given."""
        self.text += "".join(f"\n  {line}" for line in lines[:MAX_LISTED])
        left = sum((sizes or [1] * len(lines))[MAX_LISTED:])
        if left:
            self.text += f"\n  {left} more {'rank is' if left == 1 else 'ranks are'} {what}"

    def add_groups(self, states: Iterable[tuple[int, State]], words: tuple[str, str, str], what: str) -> None:
        """Adds a line for all ranks at the same place of the same job, in the order of jobs. words: "waits", "wait",
        "for"."""
        places: dict[tuple, list[tuple[int, State]]] = {}
        for rank, state in states:
            stage = (state.stage, state.chunk) if state.at == "stage" else ("", 0)
            places.setdefault((state.step, state.label, state.num_chunks, state.at, *stage), []).append((rank, state))
        one, more, of = words
        lines, sizes = [], []
        for _, group in sorted(places.items()):
            ranks, state = [rank for rank, _ in group], group[-1][1]
            longest_s = max(each.waits_s for _, each in group)
            does = one if len(ranks) == 1 else more
            lines.append(
                f"{ranks_text(ranks)} {does} in step {state.step} {of} {state.doing}, {state.since(longest_s)}"
            )
            sizes.append(len(ranks))
        self.add(lines, what, sizes)


def opening_text(opening: Opening | None) -> str:
    """ "opened by rank 1, where nothing has moved for 2.5 s"."""
    return (
        f"opened by rank {opening.rank}, {opening.text}" if opening else "opened by a rank whose reason is unreadable"
    )


def one_line(text: str) -> str:
    """A label may contain line breaks, but each finding has one line."""
    return text.replace("\n", " ")
