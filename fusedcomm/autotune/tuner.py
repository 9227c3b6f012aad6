"""A search on one rank: gives a front end one candidate after another and keeps the fastest."""

import dataclasses
import itertools
import math
import statistics
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fusedcomm import log
from fusedcomm.autotune.auto import name_of
from fusedcomm.autotune.turns import Turns, preferred
from fusedcomm.config import AUTO, OFF, Config, LocalOptions
from fusedcomm.native import _C
from fusedcomm.ranks.peers import PeerLostError, warn_alone
from fusedcomm.session.parameters import NamedParameter, numbered
from fusedcomm.session.plan import BucketsPlan
from fusedcomm.session.session import Mode, Session
from fusedcomm.session.state_dict import take_over

MAX_STEPS, MAX_TURNS = 40, 3
"""Most steps of a search, and most turns of a candidate."""
TIMED, UNTIMED = 2, 1
"""Steps of a turn that count, and steps before them. The first one still waits for what the candidate before sent."""
UNTIMED_FIRST = 4
"""Steps before those of a candidate's first turn. DDP rebuilds its buckets after the first or second step, and
connections and memory are used for the first time."""


def num_turns(num_candidates: int) -> int:
    """Turns of each candidate, as many as fit into MAX_STEPS; one at least."""
    later = (MAX_STEPS // num_candidates - UNTIMED_FIRST - TIMED) // (UNTIMED + TIMED)
    return min(1 + max(0, later), MAX_TURNS)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of a search. ``str()`` is for people. Equal on every rank."""

    finished: bool
    chosen: str | None
    """The candidate that is kept, "int8" for example, or "off"; None while the search goes on."""
    candidates: tuple[str, ...]
    """What is tried, in the order in which it is preferred."""
    step_ms: dict[str, float]
    """Milliseconds of a step by candidate: the median of its turns on the slowest rank; empty before the first turn."""
    num_steps: int
    """Training steps that the search has taken so far."""
    max_steps: int
    """Training steps that the search takes."""

    @property
    def line(self) -> str:
        """The choice, or how far the search is; never empty."""
        times = ", ".join(f"{name} {step_ms:.4g} ms" for name, step_ms in self.step_ms.items())
        if not self.finished:
            tried = ", ".join(self.candidates)
            return f"config='auto' tries {tried}, step {self.num_steps} of {self.max_steps}: {times or 'no times'}"
        return f"{self.chosen} chosen by config='auto' " + (
            f"in {self.num_steps} steps: {times}" if times else "at once"
        )

    def __str__(self) -> str:
        return f"fusedcomm: {self.line}"


class Target(Protocol):
    """The object that gives gradients to a candidate's engine: _C.HookSwitch for DDP, or a GradReducer."""

    def set(self, synchronizer: "_C.Synchronizer | None", process_group: dist.ProcessGroup) -> None:
        """Uses this engine from the next pass on; None: DDP's own all-reduce on that group."""

    def watch(self, device: "_C.Device", begin_pass: Callable[[], object]) -> None:
        """Calls `begin_pass` before each synchronized pass, and notes when each ends."""

    def unwatch(self) -> None:
        """Ends what :meth:`watch` began. Idempotent."""

    def take_pass_ends(self) -> list[float]:
        """When the last bucket of each pass since the last call was handed over, in ms since the first of them."""


class Tuner:
    """Keeps the sessions of all candidates and switches between them. They share the channels of the first session,
    which stands in for off where off is a candidate.

    Every rank makes its tuner at the same time. The target reports when a backward pass begins. A turn ends there,
    because nothing is under way then. The ranks share the largest of their times, so all go on and choose alike. A
    candidate that cannot be made is left out on all ranks. Only the running session is watched for stalls; DDP's own
    all-reduce is not.

    Args:
        configs: the candidates beside off, the preferred ones first.
        process_group, parameters, local, device, announce, also_agree, problem: as for :class:`Session`. `parameters`
            may have the wires of any candidate.
        has_off: whether DDP's own all-reduce is a candidate, before the others.
        caps: returns the present caps on buckets, in bytes; None when the module is gone.
        chosen: the candidate that an earlier tuner has kept, so that nothing is searched.

    Raises: as :class:`Session`, also if no candidate but off can be made.
    """

    weights = None
    """Candidates weigh all ranks alike."""

    def __init__(
        self,
        configs: Sequence[Config],
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
        chosen: str | None = None,
    ) -> None:
        self._configs = {name_of(config): config for config in configs}
        self._has_off, self._announce, self._caps = has_off, announce, caps
        self._target: Target | None = None
        first = Config("fp32") if has_off else configs[0]
        also_agree = {AUTO: {"candidates": list(self._configs), "chosen": chosen}, **also_agree}
        on = process_group, numbered(parameters, first), local, device, announce
        self._base = base = Session(first, *on, also_agree=also_agree, watched=False, problem=problem)
        base.is_off = has_off
        self._sessions = {OFF if has_off else name_of(base.config): base}
        self.session = base
        """Session of the running candidate. For off it only keeps the state that other candidates handed over."""
        self._failure: Exception | None = None
        self._delivering = False  # whether this pass sends the last wire's residuals, before off
        self._num_passes = self._num_steps = 0
        self._tuning: Tuning | None = None
        self._turns: Turns[str] | None = None
        self._running = next(iter(self._sessions)) if chosen is None else chosen
        try:
            if self._base.world_size == 1 or chosen is not None:
                self._make([name for name in self._configs if name == self._running])
                self.session = self._sessions[self._running]
                self._tuning = self._report(finished=True)
                self._free_losers()
            else:
                self._base.keeps_residuals = any(config.feedback is not None for config in configs)
                self._make(list(self._configs))
                self._turns = Turns(list(self._sessions), num_turns(len(self._sessions)), TIMED, UNTIMED, UNTIMED_FIRST)
        except BaseException:
            self.stop("attaching failed")
            raise

    @property
    def mode(self) -> Mode:
        """Searching until a choice has been made."""
        return "searching" if self._tuning is None else self.session.mode

    @property
    def _uses_engine(self) -> bool:
        """Whether this pass, or between two passes the last one, goes through the engine. It does once after off was
        chosen, if the engine has residuals to send."""
        return self._running != OFF or self._delivering

    @property
    def is_off_for_good(self) -> bool:
        """Whether off was chosen and no residuals are left to send, so that DDP needs no hook."""
        return self.mode == "off" and not self._uses_engine

    def start(self, target: Target) -> None:
        """Gives `target` the synchronizer of the running candidate, now and whenever that changes."""
        self._target = target
        self._set_target()
        if self._tuning is None:
            # Weak: the target must not keep the tuner, which keeps the target.
            begin = weakref.WeakMethod(self._begin_pass)
            target.watch(self._base.native_device, lambda: (method := begin()) and method())

    def stop(self, reason: str) -> None:
        """Ends the search and the engines; the target stays where it is. Idempotent."""
        if self._target is not None:
            self._target.unwatch()
        for session in {*self._sessions.values(), self.session}:
            session.stop(reason)

    def moved(self, process_group: dist.ProcessGroup, also_agree: Mapping[str, object]) -> "Tuner":
        """As :meth:`Session.moved`: with the same choice, or with a search that begins again."""
        base = self._base
        on = process_group, base.parameters, base.local, base.device, self._announce
        how: dict[str, Any] = {"has_off": self._has_off, "caps": self._caps, "also_agree": also_agree}
        new = Tuner(list(self._configs.values()), *on, **how, chosen=self._kept)
        if self._kept is not None:
            new._tuning = self._tuning
        take_over(new.session, self.session)
        self.stop("the module moved to another process group")
        return new

    @property
    def _kept(self) -> str | None:
        """The candidate that the search has kept; None before, and where there was nothing to search."""
        return self._running if self._tuning is not None and self._tuning.step_ms else None

    def tuning(self) -> Tuning:
        """See :meth:`fusedcomm.session.handle.CommHandle.tuning`."""
        return self._tuning or self._report(finished=False)

    # ---- called by the target before the first bucket of a pass, while the search lasts

    def _begin_pass(self) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            if self._delivering:
                self._delivering = False
                self._set_target()
            if self._tuning is not None:
                self._free_losers()
            else:
                self._count_pass()
        except Exception as error:
            self._failure = error
            raise

    def _count_pass(self) -> None:
        if self._num_passes == self._turns.num_steps:
            self._end_turn()
            self._num_passes = 0
        self._num_passes += 1
        self._num_steps += not self._turns.finished

    def _end_turn(self) -> None:
        ends = self._target.take_pass_ends()
        steps = [later - earlier for earlier, later in itertools.pairwise(ends)][-TIMED:]
        own_ms = statistics.mean(steps) if steps else math.inf
        what = f"the times of config='auto' trying {self._running}"
        self._turns.record([self.session.synchronizer.max_over_ranks(own_ms, what)])
        if not self._turns.finished:
            self._run(self._turns.candidate)
            return
        self._run(preferred(self._turns.medians()))
        self._tuning = self._report(finished=True)
        self._set_target()
        if not self._delivering:
            self._free_losers()
        if self._base.rank == 0:
            log.report(self._plan, quiet=not self._announce)

    def _run(self, candidate: str) -> None:
        old, self._running = self.session, candidate
        self.session = self._sessions[candidate]
        if self.session is not old:
            take_over(self.session, old)
        self._delivering = candidate == OFF and old is not self._base and old.config.feedback is not None
        self._set_target()

    def _set_target(self) -> None:
        # DDP's own all-reduce is not watched. At the end of its turn, however, ranks wait for each other.
        is_watched = self._uses_engine or self._tuning is None
        for session in {*self._sessions.values(), self.session}:
            if session is not self.session or not is_watched:
                session.unwatch()
        if is_watched:
            self.session.watch()
        self._target.set(self.session.synchronizer if self._uses_engine else None, self.session.process_group)

    def _free_losers(self) -> None:
        """Ends the search. Only the chosen session stays; if it stands in for off, only its state stays."""
        if self._target is not None:
            self._target.unwatch()
        for session in self._sessions.values():
            if session is not self.session or self._running == OFF:
                session.stop("config='auto' has chosen something else")
        if self._running == OFF:
            self.session.keeps_residuals = False
            self.session.synchronizer.engine.free_workspaces()
        self._sessions = {self._running: self.session}
        self._base = self.session

    # ---- sessions of candidates

    def _make(self, names: Sequence[str]) -> None:
        """Makes the sessions of these candidates that have none. Leaves out those that cannot be made. A collective
        call. Raises the first one's error if none but off is left."""
        errors: list[Exception] = []
        for name in names:
            if name in self._sessions:
                continue
            self._base.peers.doing(f"making {name} for config='auto'")
            try:
                self._sessions[name] = self._beside(self._configs[name])
            except PeerLostError:
                raise
            except Exception as error:  # on every rank: a session is made on all ranks or on none
                errors.append(error.with_traceback(None))  # a traceback keeps what was made
                if self._base.rank == 0:
                    why = str(error).removeprefix("fusedcomm: ")
                    warn_alone(f"fusedcomm: config='auto' cannot try {name}: {why}", stacklevel=5)
        if errors and not any(name in self._sessions for name in names):
            raise errors[0]

    def _beside(self, config: Config) -> Session:
        def has_in_common(other: Session) -> tuple[bool, bool]:
            # The channels between hosts; on an accelerator also the kernels, which depend on the wire.
            has_two_levels = other.ranks_per_host > 1
            return has_two_levels == (config.two_levels is not None), other.config.wire == config.wire

        base = self._base
        return Session(
            config,
            base.process_group,
            numbered(base.parameters, config),
            base.local,
            base.device,
            self._announce,
            beside=max(self._sessions.values(), key=has_in_common),
            watched=False,
        )

    # ---- for people

    def _plan(self) -> BucketsPlan:
        """The running candidate's plan, with what the search has found."""
        return dataclasses.replace(self.session.plan(self._caps()), tuning=self.tuning())

    def _report(self, finished: bool) -> Tuning:
        candidates = tuple(self._sessions) if self._turns is None else tuple(self._turns.seen)
        count = len(candidates)
        return Tuning(
            finished=finished,
            chosen=self._running if finished else None,
            candidates=candidates,
            step_ms=self._turns.medians() if self._turns is not None else {},
            num_steps=self._num_steps,
            max_steps=count * (UNTIMED_FIRST + TIMED + (num_turns(count) - 1) * (UNTIMED + TIMED)),
        )
