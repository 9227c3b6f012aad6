"""Notices that an engine has waited too long or has failed, and finds the rank it waits for with a roll call:

    a rank's oldest bucket has not moved for stall_after, or not for 5 s while a host acknowledges nothing, or a
    transfer failed
      ──► the rank opens a roll call in the store
      ──► every rank's watch sees the call at its next poll and answers with what it has under way
      ──► each rank that waits as well reads the answers. A rank that has not answered in time is missing; one that has
          not handed over what others wait for is slow (roll_call.py)
      ──► this becomes a warning or, after a failure, the end of the error's text

No rank waits for another one's conclusion: a rank that has called the roll may leave before it has one.

A watch is a thread of Python's. While another thread of its process holds the interpreter it does not answer, and the
other ranks say so. The engine's threads need no interpreter: they note on the engine's board what is under way, and
wait for an explanation without it, within a limit (csrc/engine/watched.h).

Load on the store: each rank makes one small request at each poll. With p ranks these are p requests a second, and at
most 500 a second (more only if stall_after is below 4 s). A roll call takes about six requests from each rank, and ten
times the logarithm of p more for each rank that is missing. While it lasts, ranks poll up to five times as often.
"""

import contextlib
import dataclasses
import datetime
import sys
import threading
import time
from collections.abc import Mapping

from fusedcomm.native import _C
from fusedcomm.ranks.answers import collect, name_absent
from fusedcomm.ranks.bounded_store import BoundedStore, OwnClient, StoreError
from fusedcomm.ranks.connections import MAX_LISTED, Traffic, connections
from fusedcomm.ranks.peers import Peers
from fusedcomm.ranks.roll_call import (
    CUT,
    FAILED,
    STALLED,
    Began,
    Finding,
    Opening,
    RollCall,
    State,
    conclude,
    decode,
    encode,
    opening_text,
)

_POLLS_PER_S = 500
"""All watches together poll the store at most this many times a second."""
_MAX_POLL_S = 1.0
"""Seconds between two polls, unless _POLLS_PER_S makes them longer."""
_PAUSE_S = 0.5
"""A wait that takes this much longer than twice the time asked for shows that the process or machine was stopped."""
_CUT_S = 5.0
"""A job that has not moved for this long is looked at: does a host no longer acknowledge what it gets?"""
_END_S = 0.2
_MAX_FAILURE = 300
"""Characters of a failure's text that an answer keeps, because a report gives it one line."""

_OF_BOARD = {field.name for field in dataclasses.fields(State)} - {field.name for field in dataclasses.fields(Traffic)}


class _EndedError(Exception):
    """The watch has to end."""


@dataclasses.dataclass(frozen=True)
class _Known:
    """The last finding, and the job that was the oldest then."""

    finding: Finding
    job: int
    num_handed: int
    at: float


class Watch:
    """The watch of one engine, from now until :meth:`end`, or the engine's stop.

    Args:
        peers: the ranks.
        store: has a prefix that only the ranks of this engine use.
        explains: whether errors wait for a roll call. With few ranks that takes up to 1 s, 3 s if a rank is missing
            that is not lost, and 18 s at most; with 1,000 ranks 2 s, 5 s and 34 s.

    Raises RuntimeError if the system has no thread left.
    """

    def __init__(
        self,
        synchronizer: "_C.Synchronizer",
        peers: Peers,
        store: BoundedStore,
        explains: bool = True,
    ) -> None:
        self._rank, self._who, self._world_size, self._lost = peers.rank, peers.who, peers.world_size, peers.lost
        self._store_text, self._stall_after_s = store.about, peers.stall_after_s
        world_size, timeout_s = peers.world_size, peers.timeout.total_seconds()
        least_poll_s = world_size / _POLLS_PER_S
        self._poll_s = max(least_poll_s, min(_MAX_POLL_S, peers.stall_after_s / 4, timeout_s / 12))
        # Within which every rank has polled once or twice and has answered, whatever its stall_after is.
        slowest_poll_s, margin_s = max(least_poll_s, min(_MAX_POLL_S, timeout_s / 12)), min(1.0, timeout_s / 6)
        self._late_s, self._answer_s = slowest_poll_s + margin_s, 2 * slowest_poll_s + margin_s
        self._request_s = 1 + world_size / 1e3
        self._store = OwnClient(store.native, datetime.timedelta(seconds=self._request_s), store.about)

        self._awake_since = time.monotonic()  # earlier waits do not count: the process was stopped
        self._next_call = 1
        self._known: _Known | None = None
        # The last jobs for which a stall, a cut, and a silent store were reported.
        self._reported_job = self._cut_job = self._silent_job = -1
        # The slow ranks that have been named, and the first job that was not yet handed over then: jobs before it wait
        # for the same delay, which is news only once.
        self._named: set[int] = set()
        self._named_until = 0
        self._has_explained = self._has_warned_of_loss = False

        # Enough for a roll call under way and one more. A watch that cannot run must not hold back the error.
        limit_s = 2 * (self._answer_s + 6 * self._request_s)
        self._engine = synchronizer.watch(limit_s if explains else 0.0)
        self._thread = threading.Thread(target=self._run, name="fc-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the watch, and waits for its thread: not for long, because one that waits for a silent store ends later.
        Idempotent."""
        self._engine.end()
        if threading.current_thread() is not self._thread:  # which may collect garbage
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            with contextlib.suppress(RuntimeError):  # it only avoids disturbing other threads
                self._engine.enter_thread()
            with contextlib.suppress(StoreError):  # reports then do not tell what this rank's process is
                self._store.set(f"began/{self._rank}", encode(Began(sorted(connections().own), self._who)))
            while True:
                began = time.monotonic()
                self._sleep(self._poll_s, for_failure=True)
                if time.monotonic() - began > 2 * self._poll_s + _PAUSE_S:
                    self._awake_since = time.monotonic()
                self._look()
        except _EndedError:
            pass
        except Exception as error:  # nothing above is expected to raise: only the watch ends
            self._engine.answer(f"The other ranks could not be asked: {type(error).__name__}: {error}")

    def _look(self) -> None:
        self._answer_others()
        failure = self._engine.failure()
        if failure is None or self._has_explained:
            self._report_stall()
        else:
            self._explain(failure)
        self._warn_of_loss()

    def _sleep(self, seconds: float, for_failure: bool = False) -> None:
        """Raises _EndedError as soon as the watch has to end. for_failure: an unexplained failure ends it, too."""
        if not self._engine.wait(seconds, for_failure):
            raise _EndedError

    # ---- this rank

    def _stalled_s(self, view: "_C.BoardView") -> float:
        """Seconds since the oldest job has moved; 0.0 without one."""
        return min(view.stalled_s, time.monotonic() - self._awake_since) if view.label else 0.0

    def _state(self) -> State:
        """This rank's answer."""
        view, own = self._engine.view(0.0), connections()
        state = State(**{name: getattr(view, name) for name in _OF_BOARD - {"failure"}})
        state.failure = (self._engine.failure() or "")[:_MAX_FAILURE]
        state.own, state.unacked_s = sorted(own.own), _largest(own.unacked_s)
        return state

    def _report_stall(self) -> None:
        """Opens a roll call if this rank's oldest job stalls, or stands still while a host acknowledges nothing."""
        view = self._engine.view(self._stall_after_s)  # asks the device only about a job that has not moved for so long
        if not view.label or self._reported_job == view.num_ended:
            return
        stalled_s = self._stalled_s(view)
        if stalled_s >= self._stall_after_s:
            why = STALLED
        elif self._cut_job != view.num_ended and stalled_s >= _CUT_S and _sees_a_cut():
            why = CUT
        else:
            return
        text = f"where nothing has moved for {stalled_s:.1f} s"
        if why == CUT:
            text += " and a host no longer acknowledges what it gets"
        known = self._keep(self._call_roll(why, text, 2 * self._request_s), view)
        self._warn_of_stall(known)
        if why == CUT and not known.finding.store_is_silent:
            self._cut_job = view.num_ended
            # The link may recover. If the job then still does not move, that has another reason, and is reported.
            if not known.finding.is_conclusive:
                self._reported_job = -1

    def _explain(self, failure: str) -> None:
        """Answers the engine's failure, after a roll call unless the last report explains the failure already."""
        view, known = self._engine.view(0.0), self._known
        # A conclusive report on this job's stall explains its failure. A new roll call would also miss the ranks that
        # have left since.
        if not (known and known.finding.is_conclusive and known.job == view.num_ended):
            silence_s = 0.0 if self._silent_job == view.num_ended else 2 * self._request_s
            finding = self._call_roll(FAILED, f"after a failure: {failure}", silence_s)
            known = self._keep(finding, view)
        age_s = time.monotonic() - known.at
        age = f"\n  ({age_s:.1f} s before this error)" if age_s > self._answer_s else ""
        self._has_explained = True
        self._engine.answer(known.finding.text + age)

    # ---- roll calls

    def _answer_others(self) -> None:
        """Answers the roll calls that other ranks have opened. If this rank waits as well, it also warns."""
        while not self._store.loss:
            number = self._next_call
            try:
                if not self._store.check([f"call/{number}"]):
                    return
                is_over, said = self._store.check([f"over/{number}"]), self._store.get(f"call/{number}")
                self._store.set(f"answer/{number}/{self._rank}", encode(self._state()))
            except StoreError:
                return
            self._next_call += 1
            opening = _opening(said)
            # A call that is over says nothing about the present: this rank itself may have been stopped during it.
            if is_over or opening is None:
                continue
            view = self._engine.view(0.0)
            has_failed = self._engine.failure() is not None
            if not concerns(opening.why, has_failed, bool(view.label), self._stalled_s(view), self._stall_after_s):
                continue
            known = self._keep(self._collect(number, opening), view)
            if not has_failed and self._reported_job != view.num_ended:
                self._warn_of_stall(known)

    def _call_roll(self, why: str, text: str, silence_s: float) -> Finding:
        """Opens a roll call, or takes part in one that another rank has just opened. If the store is silent, tries
        again for `silence_s`. text: the reason for people."""
        number, had_failed = self._next_call, self._engine.failure() is not None
        own, opening = encode(self._state()), encode(Opening(self._rank, why, text))
        until = time.monotonic() + silence_s
        while True:
            try:
                opened = self._store.compare_set(f"call/{number}", "", opening)
                self._store.set(f"answer/{number}/{self._rank}", own)
                break
            except StoreError as error:
                must_explain = not had_failed and self._engine.failure() is not None
                if not error.is_silence or time.monotonic() >= until or must_explain:
                    return self._without_store(error, text)
            self._sleep(self._poll_s / 5)
        self._next_call += 1
        return self._collect(number, _opening(opened))

    def _collect(self, number: int, opening: Opening | None) -> Finding:
        """Reads the answers, and draws the conclusion."""
        call = RollCall(number, self._world_size, opening)
        limits = self._late_s, self._answer_s, self._request_s
        problem = collect(self._store, call, *limits, lambda: self._sleep(self._poll_s / 5), self._lost)
        call.answers[self._rank] = self._state()
        for others in (call.absent, call.unreadable, call.late_s):
            others.pop(self._rank, None)
        call.unread = [rank for rank in call.unread if rank != self._rank]
        if problem is not None:
            if len(call.answers) == 1:
                return self._without_store(problem, opening_text(opening))
            what = "was silent" if problem.is_silence else "failed"
            call.store_problem = f"then the store {what}: {problem}. The store is {self._store_text}"
        with contextlib.suppress(StoreError):
            self._store.set(f"over/{number}", "")
            name_absent(self._store, call)
        finding = conclude(call)
        finding.store_is_silent = problem is not None and problem.is_silence
        return finding

    def _without_store(self, problem: StoreError, why: str) -> Finding:
        """The finding of a call that the store did not serve. why: its reason, for people."""
        state, own, is_silent = self._state(), f"rank {self._rank}", problem.is_silence
        text = (
            f"fusedcomm: {own} of {self._world_size} cannot call the roll ({why}): the store "
            f"{'is silent' if is_silent else 'fails'} ({problem}). The store is {self._store_text}. The process that "
            f"hosts it is stopped, was killed, has left, or is cut off{', or very slow' if is_silent else ''}"
        )
        if state.label:
            text += f"\n  {own} waits in step {state.step} for {state.doing}, handed over {state.waits_s:.1f} s ago"
        for end, seconds in state.unacked_s.items():
            text += f"\n  {end} has not acknowledged for {seconds:.1f} s what this rank sent"
        return Finding(text, not is_silent, set(), is_silent)

    # ---- warnings

    def _keep(self, finding: Finding, view: "_C.BoardView") -> _Known:
        """Remembers a finding about the oldest job in `view`."""
        self._known = _Known(finding, view.num_ended, view.num_handed, time.monotonic())
        return self._known

    def _warn_of_stall(self, known: _Known) -> None:
        """Warns with the text of the finding, unless it only says again which ranks are slow."""
        if not known.finding.store_is_silent:
            self._reported_job = known.job
        elif self._silent_job == known.job:
            return  # a silent store is reported once for each job; when it answers again, the next poll finds out more
        else:
            self._silent_job = known.job
        if known.job >= self._named_until:
            self._named, self._named_until = set(), known.num_handed
        has_named = bool(known.finding.slow) and known.finding.slow <= self._named
        self._named |= known.finding.slow
        if not has_named:
            _warn(known.finding.text)

    def _warn_of_loss(self) -> None:
        """Warns once that no more requests are made. After a failure the error has said what is known."""
        if not self._store.loss or self._has_warned_of_loss:
            return
        self._has_warned_of_loss = True
        if self._engine.failure() is None:
            _warn(
                f"fusedcomm: rank {self._rank} of {self._world_size} has lost the store and could not reconnect to it "
                f"({self._store.loss}). From now on this rank does not answer roll calls, and it reports its own "
                "stalls without the other ranks' states. Training goes on. The store is "
                f"{self._store_text}"
            )


def concerns(why: str, has_failed: bool, has_job: bool, stalled_s: float, stall_after_s: float) -> bool:
    """Whether a roll call that another rank has opened concerns this rank: it stands still as well, or has failed. If
    not, it answers and does not warn.

    A wait counts from half of `stall_after_s` on. If the opener has failed or is cut off, any job under way counts.
    """
    return has_failed or (has_job and (why in (FAILED, CUT) or stalled_s > stall_after_s / 2))


def _opening(said: bytes) -> Opening | None:
    """None if it cannot be read."""
    with contextlib.suppress(ValueError):
        return decode(Opening, said)
    return None


def _sees_a_cut() -> bool:
    """Whether a host has acknowledged nothing that this process sent it for about as long as the job has not moved."""
    return any(seconds >= _CUT_S - _MAX_POLL_S for seconds in connections().unacked_s.values())


def _largest(values: Mapping[str, float]) -> dict:
    """The MAX_LISTED largest values."""
    return dict(sorted(values.items(), key=lambda item: -item[1])[:MAX_LISTED])


def _warn(text: str) -> None:
    """Writes to stderr, as torch's own threads do: filters of warnings are the main thread's, which may be changing
    them."""
    with contextlib.suppress(Exception):
        sys.stderr.write(time.strftime("[W%m%d %H:%M:%S fusedcomm] Warning: ") + text + "\n")
        sys.stderr.flush()
