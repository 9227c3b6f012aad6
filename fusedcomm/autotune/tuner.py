"""A search on one rank: gives a front end one candidate after another and keeps the search's choice."""

import dataclasses
import hashlib
import itertools
import json
import math
import statistics
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from fusedcomm import log
from fusedcomm.autotune import search as autotune
from fusedcomm.autotune.search import OFF, Candidate, Search, Tuning
from fusedcomm.autotune.space import Space
from fusedcomm.config import AUTO, LocalOptions
from fusedcomm.native import _C
from fusedcomm.ranks.peers import PeerLostError, warn_alone
from fusedcomm.session.parameters import NamedParameter, numbered, trainable
from fusedcomm.session.plan import Plan
from fusedcomm.session.runs import Runs
from fusedcomm.session.session import Session
from fusedcomm.session.state_dict import take_over
from fusedcomm.session.stats import Stats

_MIB = 1 << 20
_FIRST_BUCKET_MIB = 1


class Target(Protocol):
    """What gives gradients to a candidate's engine: _C.HookSwitch for DDP, or a GradReducer."""

    def set(self, synchronizer: "_C.Synchronizer | None", process_group: dist.ProcessGroup) -> None:
        """Uses this engine from the next pass on; None: DDP's own all-reduce on that group."""

    def set_bucket_mib(self, mib: float) -> None:
        """Cuts buckets of this size from the next pass on. Called only if the search chooses it."""

    def watch(self, device: "_C.Device", begin_pass: Callable[[], object]) -> None:
        """Calls `begin_pass` before each synchronized pass, and notes when each ends."""

    def unwatch(self) -> None:
        """Ends what :meth:`watch` began. Idempotent."""

    def take_pass_ends(self) -> list[float]:
        """When the last bucket of each pass since the last call was handed over, in ms since the first of them."""


class Tuner(Runs):
    """Keeps the sessions of all candidates and switches between them. They share the channels of the first session,
    which stands in for off where off is a candidate. Candidates that differ in the size of buckets share a session.

    Every rank makes its tuner at the same time. The target reports when a backward pass begins. A trial ends
    there, because nothing is under way then. The ranks share the largest of their times, so all go on with the same
    candidate. A candidate that cannot be made loses on all ranks. Only the running session is watched for stalls; DDP's
    own all-reduce is not.

    Args:
        announce: whether rank 0 may print.
        caps: returns the present caps on buckets, in bytes; None when the module is gone.
        also_agree, problem: as for :class:`Session`.
        tuned: the result of an earlier search, which then is not made again.

    Raises: as :class:`Session`, also if no wire can be made, or if the choice of `tuned` cannot.
    """

    def __init__(
        self,
        space: Space,
        process_group: dist.ProcessGroup,
        parameters: list[NamedParameter],
        local: LocalOptions,
        device: torch.device,
        *,
        announce: bool,
        caps: Callable[[], list[int] | None],
        also_agree: Mapping[str, object] | None = None,
        tuned: Tuning | None = None,
        problem: Exception | None = None,
    ) -> None:
        self._space = space
        self._announce = announce
        self._caps = caps
        self._also_agree = also_agree or {}
        self._target: Target | None = None
        self._model = model_digest(parameters)
        misfit = None if tuned is None else self._misfit(tuned, process_group.size(), device)
        if misfit is not None:
            tuned = None
        wanted = None if tuned is None else dataclasses.asdict(tuned.chosen)
        auto = {AUTO: {**space.record(), "tuned": wanted, "misfit": misfit}} if space.chooses_wire else {}
        config = space.config_of_base()
        self._base = Session(
            config,
            process_group,
            numbered(parameters, config),
            local,
            device,
            announce,
            also_agree={**auto, **self._also_agree},
            watched=False,
            problem=problem,
        )
        self._sessions = {_of_session(space.base): self._base}
        can_have_two_levels = self._base.levels.can_be_two
        space.use_hosts(can_have_two_levels)
        if tuned is not None and tuned.chosen.by_host and not can_have_two_levels:
            tuned, misfit = None, "its sums have two levels, which need several hosts with several ranks each"
        self.session = self._base
        """Session of the running candidate. For off it only keeps the state that other candidates handed over."""
        if misfit is not None and self._base.rank == 0:
            warn_alone(f"fusedcomm: tuned does not fit, {misfit}: config='auto' searches again", stacklevel=6)
        self._impossible: dict[Candidate, Exception] = {}
        self._failure: Exception | None = None
        self._delivering = False  # whether this pass sends the last wire's residuals, before off
        self._num_passes = self._num_steps = 0
        self._tuning = tuned
        self._search: Search | None = None
        try:
            if self._base.world_size == 1 or tuned is not None:
                alone = OFF if space.has_off else space.first[0]
                self._running = alone if tuned is None else tuned.chosen
                self._tuning = tuned or self._report(finished=True)
                self.session = self._sessions.get(_of_session(self._running)) or self._make(self._running)
                self._free_losers()
            else:
                self._base.keeps_residuals = space.keeps_residuals
                if not any([self._can_be_had(candidate) for candidate in space.first]):
                    raise self._impossible[space.first[0]]
                self._search = Search(space.first, self._sums, self._chunks, self._sizes, space.has_off)
                self._running = self._search.candidate
                self.session = self._sessions[_of_session(self._running)]
        except BaseException:
            self.stop("attaching failed")
            raise

    @property
    def is_off(self) -> bool:
        """Whether gradients go through DDP's own all-reduce."""
        return self._running == OFF

    @property
    def uses_engine(self) -> bool:
        """Whether this pass, or between two passes the last one, goes through the engine. It does once after off was
        chosen, if the engine has residuals to send."""
        return not self.is_off or self._delivering

    @property
    def is_searching(self) -> bool:
        """Whether no choice has been made yet."""
        return self._tuning is None

    @property
    def is_off_for_good(self) -> bool:
        """Whether off was chosen and no residuals are left to send, so that DDP needs no hook."""
        return self.is_off and self._tuning is not None and not self._delivering

    def start(self, target: Target) -> None:
        """Gives `target` the synchronizer of the running candidate, now and whenever that changes."""
        self._target = target
        self._set_target()
        if self._search is not None and not self._search.finished:
            # Weak: the target must not keep the tuner, which keeps the target.
            begin = weakref.WeakMethod(self._begin_pass)
            target.watch(self._base.native_device, lambda: (method := begin()) and method())

    def stop(self, reason: str) -> None:
        """Ends the search and the engines; the target stays where it is. Idempotent."""
        if self._target is not None:
            self._target.unwatch()
        for session in {*self._sessions.values(), self.session}:
            session.stop(reason)

    def moved(self, process_group: dist.ProcessGroup) -> "Tuner":
        """Returns a tuner on another group, with the same choice, or with a search that begins again."""
        tuned = None
        if self._tuning is not None and self._tuning.trials:
            tuned = dataclasses.replace(self._tuning, world_size=process_group.size())
        old = self.session
        new = Tuner(
            self._space,
            process_group,
            old.parameters,
            old.local,
            old.device,
            announce=self._announce,
            caps=self._caps,
            also_agree=self._also_agree,
            tuned=tuned,
        )
        take_over(new.session, old)
        return new

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
            if self._search.finished:
                self._free_losers()
            else:
                self._count_pass()
        except Exception as error:
            self._failure = error
            raise

    def _count_pass(self) -> None:
        if self._num_passes == self._search.trial_steps:
            self._end_trial()
            self._num_passes = 0
        self._num_passes += 1
        self._num_steps += not self._search.finished

    def _end_trial(self) -> None:
        ends = self._target.take_pass_ends()
        steps = [later - earlier for earlier, later in itertools.pairwise(ends)][-autotune.TIMED :]
        own_ms = statistics.median(steps) if steps else math.inf
        step_ms = self.session.max_over_ranks(own_ms, f"the times of {self._space.option} trying {self._running}")
        self._search.record(step_ms)
        while not self._search.finished and not self._can_be_had(self._search.candidate):
            self._search.record(math.inf)
        self._run(self._search.candidate)
        if self._search.finished:
            self._tuning = self._report(finished=True)
            if not self._delivering:
                self._free_losers()
            if self._base.rank == 0:
                log.report(lambda: self.plan(self._caps()), quiet=not self._announce)

    def _can_be_had(self, candidate: Candidate) -> bool:
        """Makes the candidate's session if there is none. Returns whether it has one. A collective call."""
        if candidate in self._impossible:
            return False
        if _of_session(candidate) not in self._sessions:
            self._base.peers.doing(f"making {candidate} for {self._space.option}")
            try:
                self._make(candidate)
            except PeerLostError:
                raise
            except Exception as error:  # on every rank: a session is made on all ranks or on none
                self._impossible[candidate] = error.with_traceback(None)  # a traceback keeps what was made
                if self._base.rank == 0:
                    why = str(error).removeprefix("fusedcomm: ")
                    warn_alone(f"fusedcomm: {self._space.option} cannot try {candidate}: {why}", stacklevel=4)
                return False
        return True

    def _run(self, candidate: Candidate) -> None:
        old, self._running = self.session, candidate
        self.session = self._sessions[_of_session(candidate)]
        if self.session is not old:
            take_over(self.session, old)
        self._delivering = candidate == OFF and old is not self._base and self._space.keeps_residuals
        self._set_target()

    def _set_target(self) -> None:
        # DDP's own all-reduce is not watched. At the end of its trial, however, ranks wait for each other.
        is_watched = self.uses_engine or (self._search is not None and not self._search.finished)
        for session in {*self._sessions.values(), self.session}:
            if session is not self.session or not is_watched:
                session.unwatch()
        if is_watched:
            self.session.watch()
        self._target.set(self.session.synchronizer if self.uses_engine else None, self.session.process_group)
        if self._running.bucket_mib is not None:
            self._target.set_bucket_mib(self._running.bucket_mib)

    def _free_losers(self) -> None:
        """Ends the search. Only the chosen session stays; if it stands in for off, only its state stays."""
        if self._target is not None:
            self._target.unwatch()
        for session in self._sessions.values():
            if session is not self.session or self.is_off:
                session.stop(f"{self._space.option} has chosen something else")
        if self.is_off:
            self.session.keeps_residuals = False
            self.session.is_off = True
            self.session.synchronizer.engine.free_workspaces()
        self._sessions = {_of_session(self._running): self.session}
        self._base = self.session

    # ---- what the search asks for

    def _make(self, candidate: Candidate) -> Session:
        config = self._space.config(candidate)

        def has_in_common(other: Candidate) -> tuple[bool, bool]:
            # The channels between hosts; on an accelerator also the kernels, which depend on the wire.
            return other.by_host == candidate.by_host, other.wire == candidate.wire

        beside = self._sessions[max(self._sessions, key=has_in_common)]
        session = Session(
            config,
            self._base.process_group,
            numbered(self._base.parameters, config),
            self._base.local,
            self._base.device,
            self._announce,
            beside=beside,
            watched=False,
        )
        self._sessions[_of_session(candidate)] = session
        return session

    def _sums(self, best: Candidate) -> list[Candidate]:
        records = self._sessions[_of_session(best)].synchronizer.buckets()
        used = {record.plan.sum for record in records if not record.passthrough}
        return self._space.sums(best, used, self._base.world_size, self._base.levels.can_be_two)

    def _chunks(self, best: Candidate) -> list[Candidate]:
        if self._base.device.type != "cpu":
            return []
        session = self._sessions[_of_session(best)]
        plans = [record.plan for record in session.synchronizer.buckets() if not record.passthrough]
        num_chunks = [plan.num_chunks for plan in plans if not plan.in_place]
        return self._space.chunks(best, session.effective_config, max(num_chunks, default=0))

    def _sizes(self, best: Candidate) -> list[list[Candidate]]:
        return self._space.sizes(best, lambda mib: _cut(self._base.parameters, bucket_caps(mib)))

    # ---- for people

    def stats(self) -> Stats:
        """The running candidate's statistics, which begin again at each change."""
        return dataclasses.replace(self.session.stats(), off=self.is_off)

    def plan(self, bucket_nbytes_caps: list[int] | None) -> Plan:
        """The running candidate's plan, with what the search has found."""
        plan = self.session.plan(bucket_nbytes_caps, off=self.is_off)
        return dataclasses.replace(plan, tuning=self.tuning())

    def _report(self, finished: bool) -> Tuning:
        trials = tuple(self._search.trials) if self._search is not None else ()
        return Tuning(
            finished=finished,
            chosen=self._running if finished else None,
            trials=trials,
            num_steps=self._num_steps,
            max_steps=self._space.max_steps,
            world_size=self._base.world_size,
            device_type=self._base.device.type,
            model=self._model,
            wires=self._space.wires if self._space.chooses_wire else (),
            more_wires=self._space.more_wires if self._space.chooses_wire else (),
            option=self._space.option,
            has_off=self._space.has_off,
        )

    def _misfit(self, tuned: Tuning, world_size: int, device: torch.device) -> str | None:
        """Why `tuned` does not fit these ranks, this model or these wires; None if it does."""
        if not tuned.finished:
            return "its search had not ended"
        if tuned.world_size != world_size:
            return f"it is for {tuned.world_size} ranks and these are {world_size}"
        if tuned.device_type != device.type:
            return f"it is for gradients on {tuned.device_type} and these are on {device.type}"
        if tuned.model != self._model:
            return "it is for a model with other parameters"
        if not self._space.allows(tuned.chosen):
            return (
                f"it has chosen {tuned.chosen}, which wires={self._space.wires!r} and the other arguments do not allow"
            )
        return None


def model_digest(parameters: Sequence[NamedParameter]) -> str:
    """16 hexadecimal digits that depend on names, shapes and dtypes of the parameters that require gradients."""
    described = [[p.name, list(p.tensor.shape), str(p.tensor.dtype)] for p in trainable(parameters)]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


def bucket_caps(mib: float) -> list[int]:
    """Bytes at which the first bucket and the others are complete, if a bucket is to have `mib` MiB. As in DDP, the
    first has 1 MiB at most, so that sending begins early."""
    return [int(min(_FIRST_BUCKET_MIB, mib) * _MIB), int(mib * _MIB)]


def _of_session(candidate: Candidate) -> Candidate:
    """The candidate without what its session does not depend on."""
    return dataclasses.replace(candidate, bucket_mib=None)


def _cut(parameters: Sequence[NamedParameter], caps: list[int]) -> list[int]:
    """Bytes of the buckets that these caps, in bytes, make in backward order. The last cap holds for all others."""
    backwards = [p.tensor for p in trainable(parameters)][::-1]
    indices, _ = dist._compute_bucket_assignment_by_size(backwards, caps)
    return [sum(backwards[index].nbytes for index in bucket) for bucket in indices]
