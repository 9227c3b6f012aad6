"""A search on one rank: gives a front end one candidate after another and keeps the fastest."""

import dataclasses
import itertools
import math
import statistics
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fusedcomm import log
from fusedcomm.autotune.turns import Turns, preferred
from fusedcomm.config import AUTO, OFF, Config, LocalOptions
from fusedcomm.native import _C
from fusedcomm.session.parameters import NamedParameter, numbered
from fusedcomm.session.plan import BucketsPlan, Tuning
from fusedcomm.session.session import Mode, Session
from fusedcomm.session.state_dict import take_over

EXACT, CANDIDATES = Config("fp32"), (Config("bf16"), Config("int8"))
"""What is tried in place of DDP's own all-reduce where there is none; and after it, the preferred one first."""
NUM_TURNS = 3
"""Turns of a candidate."""
TIMED, UNTIMED = 2, 1
"""Steps of a turn that count, and steps before them. The first one still waits for what the candidate before sent."""
UNTIMED_FIRST = 4
"""Steps before those of a candidate's first turn. DDP rebuilds its buckets after the first or second step, and
connections and memory are used for the first time."""
MAX_STEPS = (1 + len(CANDIDATES)) * (UNTIMED_FIRST + TIMED + (NUM_TURNS - 1) * (UNTIMED + TIMED))


class Target(Protocol):
    """The object that gives gradients to a candidate's engine: _C.HookSwitch for DDP, or a GradReducer."""

    def set(self, synchronizer: "_C.Synchronizer | None", process_group: dist.ProcessGroup) -> None:
        """Uses this engine from the next pass on; None: DDP's own all-reduce on that group."""

    @property
    def observer(self) -> "_C.PassObserver":
        """Tells when synchronized passes begin and end."""


class Tuner:
    """Keeps the sessions of all candidates and switches between them. They share the channels of the first session,
    which sends nothing where it stands in for off.

    Every rank makes its tuner at the same time. The target reports when a backward pass begins. A turn ends there,
    because nothing is under way then. The ranks share the largest of their times, so all go on and choose alike. Only
    the running session is watched for stalls; DDP's own all-reduce is not.

    Args:
        process_group, parameters, local, device, announce, also_agree, problem: as for :class:`Session`. `parameters`
            may have the wires of any candidate.
        has_off: whether DDP's own all-reduce is the first candidate, and not "fp32".
        caps: returns the present caps on buckets, in bytes; None when the module is gone.

    Raises: as :class:`Session`.
    """

    weights = None
    """Candidates weigh all ranks alike."""

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        parameters: Sequence[NamedParameter],
        local: LocalOptions,
        device: torch.device,
        announce: bool,
        *,
        has_off: bool,
        caps: Callable[[], list[int] | None],
        also_agree: Mapping[str, object],
        problem: Exception | None = None,
    ) -> None:
        self._announce, self._caps = announce, caps
        self._target: Target | None = None
        first = EXACT
        on = process_group, numbered(parameters, first), local, device, announce
        self.session = Session(first, *on, also_agree={AUTO: True, **also_agree}, watched=False, problem=problem)
        """Session of the running candidate. For off it only keeps the state that other candidates handed over."""
        self.session.is_off = has_off
        self._running = OFF if has_off else first.wire
        self._sessions = {self._running: self.session}
        self._failure: Exception | None = None
        self._num_passes = self._num_steps = 0
        self._tuning: Tuning | None = None
        names = [self._running, *(each.wire for each in CANDIDATES)]
        self._turns = Turns(names, NUM_TURNS, TIMED, UNTIMED, UNTIMED_FIRST)
        try:
            if self.session.world_size == 1:
                self._tuning = Tuning(self._running, (self._running,), {}, 0, 0)
                self._free_losers()
            else:
                for config in CANDIDATES:
                    self.session.peers.doing(f"making {config.wire} for config='auto'")
                    self._sessions[config.wire] = self._beside(config)
        except BaseException:
            self.stop("attaching failed")
            raise

    @property
    def mode(self) -> Mode:
        """Searching until a choice has been made."""
        return "searching" if self._tuning is None else self.session.mode

    @property
    def is_off_for_good(self) -> bool:
        """Whether off was chosen, so that DDP needs no hook."""
        return self.mode == "off"

    def start(self, target: Target) -> None:
        """Gives `target` the synchronizer of the running candidate, now and whenever that changes."""
        self._target = target
        self._set_target()
        if self._tuning is None:
            # Weak: the target must not keep the tuner, which keeps the target.
            begin = weakref.WeakMethod(self._begin_pass)
            target.observer.watch(self.session.native_device, lambda: (method := begin()) and method(), times=True)

    def stop(self, reason: str) -> None:
        """Ends the search and the engines; the target stays where it is. Idempotent."""
        if self._target is not None:
            self._target.observer.unwatch()
        for session in {*self._sessions.values(), self.session}:
            session.stop(reason)

    def tuning(self) -> Tuning:
        """See :meth:`fusedcomm.session.handle.CommHandle.tuning`."""
        return self._tuning or Tuning(None, tuple(self._sessions), self._turns.medians(), self._num_steps, MAX_STEPS)

    # ---- called by the target before the first bucket of a pass, while the search lasts

    def _begin_pass(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._count_pass()
        except Exception as error:
            self._failure = error
            raise

    def _count_pass(self) -> None:
        if self._num_passes == self._turns.num_steps:
            self._end_turn()
            self._num_passes = 0
        self._num_passes += 1
        self._num_steps += self._tuning is None

    def _end_turn(self) -> None:
        ends = self._target.observer.take_pass_ends()
        steps = [later - earlier for earlier, later in itertools.pairwise(ends)][-TIMED:]
        own_ms = statistics.mean(steps) if steps else math.inf
        what = f"the times of config='auto' trying {self._running}"
        self._turns.record([self.session.synchronizer.max_over_ranks(own_ms, what)])
        if not self._turns.finished:
            self._run(self._turns.candidate)
            return
        medians = self._turns.medians()
        self._run(preferred(medians))
        self._tuning = Tuning(self._running, tuple(self._sessions), medians, self._num_steps, MAX_STEPS)
        self._set_target()
        self._free_losers()
        if self.session.rank == 0:
            log.report(self._plan, quiet=not self._announce)

    def _run(self, candidate: str) -> None:
        old, self._running = self.session, candidate
        self.session = self._sessions[candidate]
        if self.session is not old:
            take_over(self.session, old)
        self._set_target()

    def _set_target(self) -> None:
        # DDP's own all-reduce is not watched. At the end of its turn, however, ranks wait for each other.
        is_watched = self._running != OFF or self._tuning is None
        for session in self._sessions.values():
            if session is not self.session or not is_watched:
                session.unwatch()
        if is_watched:
            self.session.watch()
        self._target.set(self.session.synchronizer if self._running != OFF else None, self.session.process_group)

    def _free_losers(self) -> None:
        """Only the chosen session stays; if it stands in for off, only its state stays."""
        if self._target is not None:
            self._target.observer.unwatch()
        for session in self._sessions.values():
            if session is not self.session or self._running == OFF:
                session.stop("config='auto' has chosen something else")
        if self._running == OFF:
            self.session.synchronizer.engine.free_workspaces()
        self._sessions = {self._running: self.session}

    def _beside(self, config: Config) -> Session:
        """The session of a candidate, on the channels of those before it. A collective call."""
        first, last = self.session, list(self._sessions.values())[-1]
        on = first.process_group, numbered(first.parameters, config), first.local, first.device, self._announce
        return Session(config, *on, beside=last, watched=False)

    def _plan(self) -> BucketsPlan:
        """The running candidate's plan, with what the search has found."""
        return dataclasses.replace(self.session.plan(self._caps()), tuning=self.tuning())
