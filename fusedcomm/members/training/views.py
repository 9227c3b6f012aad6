"""The sessions of a reducer whose ranks come and go: one for each view, and what leads from one to the next.

What a view is, and who is in it, is agreement.py's; here a process connects with the others of a view, and one that
joins gets their state. passes.py says what happens to a pass that was under way.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fusedcomm.config import Config, LocalOptions
from fusedcomm.members.errors import DamagedError, MemberLostError
from fusedcomm.members.members import INSTALL_TIMEOUT_S, PROGRESS, Members
from fusedcomm.members.plane.view import Decision, Member, View
from fusedcomm.members.training import transfer
from fusedcomm.members.training.recovery import RecoverySession, why_refused, with_recovery_codes
from fusedcomm.native import _C
from fusedcomm.ranks import agreement, objects
from fusedcomm.ranks.errand import Errand
from fusedcomm.ranks.own_group import OwnGroup
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.session import compare
from fusedcomm.session.parameters import NamedParameter
from fusedcomm.session.stats import Change

MODEL, BUFFERS = "model", "buffers"
"""The names of what a rank that joins gets besides what the members carry."""

CHANGING = "the ranks are changing"
"""Why an engine stops that goes on in another view."""
POLL_S = 0.02
"""Seconds between two looks whether a view that is being connected is still the members' choice."""
_NOTICED_S = 5.0
"""Seconds within which the members notice that a rank is lost, before the first step."""
ENDING_S = 60.0
"""Seconds that a member which has finished a step may take to say so."""
MAX_FAILURES = 5
"""Changes of views in one step, without a rank that is lost or joins, after which the step fails."""


class Views:
    """The sessions, one for each view.

    Args:
        config, parameters, local, device, also_agree: as for :class:`Session`.
        model: by name, what a rank that joins gets: parameters and buffers.

    Attributes:
        session: of the present view; None before the first.
        step: synchronized backward passes that have ended.
    """

    session: Any

    def __init__(
        self,
        members: Members,
        config: Config,
        parameters: list[NamedParameter],
        local: LocalOptions,
        device: torch.device,
        also_agree: dict[str, object],
        model: dict[str, torch.Tensor],
    ) -> None:
        if members.training is not None:
            raise ValueError("fusedcomm: these members belong to another reducer: make another Members")
        self.members, self.device, self.step, self.session = members, device, 0, None
        self._config = with_recovery_codes(config, members, device)
        self._arguments, self._model = (parameters, local, device), model
        of_members = {"microbatches": members.microbatches, "min_ranks": members.min_ranks}
        self._also_agree = {**also_agree, "members": of_members}
        self._has_tried = False  # whether the first session was made, or could not be
        self._changes: list[Change] = []
        self._lock = threading.Lock()  # guards session, _finished and step against other threads
        self._finished: _C.Synchronizer | None = None  # has the means of the last step
        self._synchronizer_step = 0  # its number of the step under way
        self._num_shared = 0  # microbatches of this step when it began
        self._missing: set[str] = set()  # what the others carry and this rank has not received
        self._published: dict[str, list] = {}  # see _of_all()
        self._has_compared = members.joins is not None
        self._has_differed = False
        self._why_not_built: Exception = RuntimeError("fusedcomm: the members have changed before the first step")
        self._is_equal = False  # whether this rank, a founder, has the first rank's state
        self._admitted: set[str] = set()  # the ranks that have joined since the last step
        self._to_tell: list[Decision] = []
        self._has_told = threading.Event()  # cleared from a change by which ranks join until its callbacks have ended
        self._has_told.set()
        self._sources: list[Member] = []  # from which a rank that joins gets the state
        hooks = members.plane.hooks
        hooks.stop_step = self.stop_step
        hooks.handlers[PROGRESS] = lambda header: (
            {"finished": self._progress(), "published": dict(self._published)},
            [],
        )
        hooks.handlers[transfer.KIND] = transfer.serve(self._find_state)
        hooks.check_join = lambda joiner: why_refused(joiner, self._record(), members)
        members.training = self

    @property
    def changes(self) -> tuple[Change, ...]:
        """The changes of this rank's views, oldest first."""
        return tuple(self._changes)

    # ---- called by the control thread

    def _record(self) -> dict[str, object]:
        """What this process and one that joins must have in common."""
        parameters = self._arguments[0]
        return {
            **agreement.versions(),
            "config": self._config.record(),
            "parameters": [[p.name, list(p.tensor.shape), str(p.tensor.dtype)] for p in parameters],
            "model": sorted(self._model),
            **self._also_agree,
            "trained": [p.name for p in parameters if p.tensor.requires_grad],
        }

    def _progress(self) -> int:
        """The last step that has ended; -2 before this rank could begin one."""
        return self.step - 1 if self._has_tried and not self._missing else -2

    def stop_step(self) -> None:
        """Stops the engine: no step finishes until the members have another view. On a device collectives under way end
        then, and nothing that they have written counts."""
        with self._lock:
            session = self.session
        if session is not None:
            session.synchronizer.abort(CHANGING)

    def _find_state(self, header: dict) -> tuple[dict[str, object], Any]:
        name, step = str(header["name"]), int(header["step"])
        self._has_told.wait(INSTALL_TIMEOUT_S)  # callbacks may change what a rank that joins gets
        if step != self.step:
            raise LookupError(f"the state of step {step} is gone: this member is at step {self.step}")
        if header.get("first") and not self._is_equal:
            raise LookupError("this member has not taken the first rank's state")
        carried = self.members.carried
        if name in (MODEL, BUFFERS):
            value: Any = {key: t for key, t in self._model.items() if key.startswith("buffer ") == (name == BUFFERS)}
        elif name in carried:
            value = carried[name].state_dict()
        else:
            raise LookupError(f"the members carry no {name!r}, but {sorted(carried)}")
        said = {
            "carries": sorted(carried),
            "first step": self.members.first_step,
            "microbatches": self.members.num_microbatches,
            "shared out": self._num_shared,
            "synchronizer step": self._synchronizer_step,
        }
        return said, value

    # ---- called on the main thread

    def stop(self, reason: str) -> None:
        """Leaves the members, once they have finished this rank's last step."""
        self.members.leave(reason)

    def close(self, reason: str) -> None:
        """Ends the session, once this rank has left. Its channels end with whoever holds the reducer."""
        with self._lock:
            session = self.session
        self._has_told.set()
        if session is not None:
            session.synchronizer.abort(reason)
            session.synchronizer.leave(reason)
            session.synchronizer.engine.free_workspaces()

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Leaves the members if an error ends what is done in it."""
        try:
            yield
        except BaseException as error:
            self.members.plane.leave(f"it cannot go on: {error}")
            raise

    def _found(self, problem: Exception | None) -> None:
        """Makes the founders' session. problem: what keeps this rank from taking part; the others are told."""
        plane = self.members.plane
        plane.start(self.members.current)
        self.session = self._build(self.members.current, problem)
        if problem is not None:  # the members have changed before they had compared anything
            raise problem
        while self.session is None:  # a rank was lost before the first step
            self._install(plane.recover(), time.monotonic())

    def _join(self, address: str) -> list[str]:
        """Becomes a member. Returns the uids of those that join with this view, which have no state to give."""
        plane, began = self.members.plane, time.monotonic()
        self._missing = {"the state"}  # until it is known what the others carry
        decision = plane.join(address, self._record())
        joined = list(decision.joined)
        while not self._install(decision, began):
            decision = plane.recover()
            if plane.member.uid in [
                member.uid for member in decision.joined
            ]:  # else it has joined with the view before
                joined = list(decision.joined)
        self.step = decision.view.step
        uids = [member.uid for member in joined]
        self._sources = [member for member in decision.view.members if member.uid not in uids]
        return uids

    def receive(self, name: str, carried: Any) -> None:
        """Loads the others' state of a carried object, in a rank that joins; else does nothing."""
        if self.members.joins is None:
            return
        if name not in self._missing:
            raise RuntimeError(f"fusedcomm: the members carry {sorted(self._missing)}, and not {name!r}")
        carried.load_state_dict(self._received(name)[1])
        self._missing.discard(name)

    def _received(self, name: str, **more: object) -> tuple[dict, Any]:
        fetched = transfer.Transfer(self.members.plane, self._sources, {"name": name, "step": self.step, **more})
        said, skeleton = fetched.skeleton()
        self.members.first_step = said["first step"]
        value, tensors = objects.unpack(skeleton)
        # Only what has the same bits on all members can come from several.
        is_common = name == MODEL or isinstance(self.members.carried.get(name), torch.optim.Optimizer)
        num_parts = len(self._sources) if is_common else 1
        objects.fill(tensors, fetched.content(said["nbytes"], num_parts))
        return said, value

    def _refuse_missing(self) -> None:
        if self._missing:
            raise RuntimeError(
                f"fusedcomm: the members carry {sorted(self._missing)}, which this rank has not received: name the "
                "same objects with members.carry() before the first step"
            )

    def _of_all(self, name: str, moment: list[int], value: object) -> dict[str, Any]:
        """The values that all members publish by this name, by uid, once all have published theirs of this moment.
        Those of lost members are missing. It ends early if the members leave this view. Every member makes the same
        calls, with later moments each time; a call that has ended early may be made again."""
        view, uid = self.members.current, self.members.plane.member.uid
        self._published[name], found = [moment, uid, value], {uid: value}

        def has_come(told: dict) -> bool:
            then, whose, other = told["published"].get(name, [[], "", None])
            if then == moment:
                found[whose] = other
            return then >= moment

        self.members.wait_for_others(INSTALL_TIMEOUT_S, has_come, in_view=True)
        if not self._is_superseded(view):
            self._published[f"{name}, read"] = [moment]
        return found

    def _wait_until_read(self, name: str, moment: list[int]) -> None:
        """Waits until the others have the values of _of_all(), before this rank ends: else it would only be lost."""
        read = f"{name}, read"
        self.members.wait_for_others(
            ENDING_S, lambda told: told["published"].get(read, [[]])[0] >= moment, in_view=True
        )

    def _compare_places(self) -> bool:
        """Raises RuntimeError, on every founder, if they have not loaded the same state of Members. Call it as a step
        begins; it does something before the first. False if the members leave the view: call it again in the next."""
        if self._has_compared:
            return True
        members = self.members
        own = [members.rank, members.step, members.num_microbatches]
        places = sorted(self._of_all("place", [0], own).values())
        if self._is_superseded(members.current):
            return False
        self._has_compared = True
        if any(place[1:] != own[1:] for place in places):
            self._wait_until_read("place", [0])
            told = ", ".join(f"rank {rank} at step {step} after {count}" for rank, step, count in places)
            raise RuntimeError(
                f"fusedcomm: the ranks begin at different places, steps and microbatches: {told}. Load the same "
                "members.state_dict() on every rank, or on none"
            )
        return True

    def _compared(self, named: compare.Named, kind: str) -> compare.ParameterDifference | None:
        """Compares the members' parameters, between two steps; None if they are equal, or if members are lost.
        Every member makes the same calls between two steps.

        Raises DamagedError if those of this rank are not those of most ranks: it leaves, and the others go on.
        """
        members = self.members
        sums = compare.checksums([tensor for _, tensor in named], self.device)
        step, call = self._published.get("checksum", [[-1, 0]])[0]
        here = [self.step, call + 1 if step == self.step else 0]
        found = self._of_all("checksum", here, int(compare.checksums([sums], self.device)))
        those = members.current.members
        ranks = compare.outvoted([found[m.uid] for m in those]) if all(m.uid in found for m in those) else ()
        if not ranks:
            return None
        text = f"fusedcomm: ahead of step {self.step} {compare.text_of_ranks(ranks, members.size)}. {compare.CAUSES}"
        if members.rank in ranks:
            self._wait_until_read("checksum", here)
        if len(ranks) < members.size and members.rank in ranks:
            members.plane.leave("its parameters were not those of most ranks")
            raise DamagedError(f"{text}. This rank has left, and the others go on")
        if kind == "raise" and len(ranks) == members.size:
            raise DamagedError(text)
        if not self._has_differed and members.rank == min(set(range(members.size)) - set(ranks), default=0):
            warn_alone(text, stacklevel=4)
        self._has_differed = True
        return compare.ParameterDifference(ranks, (), {}, text)

    # ---- from one view to the next

    def _install_one(self, decision: Decision, began: float) -> None:
        """Installs that decision's view, or a later one."""
        for _ in range(MAX_FAILURES):
            if self._install(decision, began):
                return
            decision = self.members.plane.recover()
        raise self._why_not_built

    def _tell(self) -> None:
        """Tells the user of the changes since the last call."""
        decisions, self._to_tell = self._to_tell, []
        try:
            for decision in decisions:
                self.members.tell(decision)
        finally:
            self._has_told.set()

    def _is_superseded(self, view: View) -> bool:
        """Whether the members have left the view, or are about to."""
        return self.members.plane.barrier.is_superseded(view.number)

    def _ahead(self, decision: Decision, step: int) -> list[Member]:
        """The others that have finished the step, also those that the decision leaves out."""
        own, finished = self.members.plane.member.uid, decision.finished
        others = (member for member in (*decision.view.members, *decision.lost) if member.uid != own)
        return [member for member in others if finished.get(member.uid, -1) >= step]

    def _install(self, decision: Decision, began: float) -> bool:
        """Makes the session of the decision's view. False if the members have agreed on another one meanwhile."""
        plane = self.members.plane
        if decision.joined and self.session is not None:
            self._has_told.clear()
        if not plane.install(decision.view, INSTALL_TIMEOUT_S):
            return False
        self._admitted |= {member.uid for member in decision.joined}
        session: Any = self._build(decision.view)
        if session is None:
            return False
        with self._lock:
            old, self.session = self.session, session
        if self._is_superseded(decision.view):  # stop_step() may have stopped the session before this one
            session.synchronizer.abort(CHANGING)
        self.members.enter(decision.view)
        plane.barrier.install(decision.view)
        if old is not None:
            old.synchronizer.abort(CHANGING)
            old.synchronizer.leave(CHANGING)
            if self._finished is not old.synchronizer:  # else others may need its means
                old.synchronizer.engine.free_workspaces()
            lost, joined = (tuple(m.address for m in some) for some in (decision.lost, decision.joined))
            pause_s = time.monotonic() - began
            size = len(decision.view.members)
            self._changes.append(Change(decision.view.number, self.step, size, lost, joined, pause_s))
            self._to_tell.append(decision)
        return True

    def _make_session(self, group: OwnGroup, problem: Exception | None) -> Any:
        """The session of a view's group. It is made on another thread."""
        session: Any = RecoverySession(
            self._config, group, *self._arguments, also_agree=self._also_agree, problem=problem
        )
        weights = session.synchronizer.weights
        # Fixed, because a rank that joins has not seen the first weights.
        weights.fix_unit(1.0)
        # The means of microbatches, which weigh 1 each, add up as sums do.
        if self.members.microbatches is not None:
            weights.use(of_sums=True)
        return session

    def _build(self, view: View, problem: Exception | None = None) -> Any:
        """The session of a view; None if the members have agreed on another one meanwhile.

        Raises `problem`, and before the first session what another rank cannot do. Later that is the other rank's end.
        """
        errand = Errand(lambda: self._make_session(self.members.group(view, self.device), problem))
        while not errand.has_ended_within(POLL_S):
            if self._is_superseded(view):
                errand.leave()
                return None
        self._has_tried = True
        try:
            return errand.result()
        except Exception as error:
            is_verdict = isinstance(error, agreement.DisagreementError) and not self._is_superseded(view)
            if error is problem or (is_verdict and self.session is None):
                if self.members.joins is None:
                    # To the others, a rank that leaves before they have the verdict is only a lost one.
                    self.members.wait_for_others(_NOTICED_S)
                raise
            if problem is not None:
                raise problem from error
            if not isinstance(error, RuntimeError):
                raise
            self._why_not_built = error
        until = time.monotonic() + _NOTICED_S  # perhaps a rank is lost, and the members have not noticed yet
        while self.session is None and not self._is_superseded(view):
            if time.monotonic() > until:
                raise self._why_not_built
            time.sleep(POLL_S)
        return None

    def _ask(self, members: Sequence[Member], kind: str, header: dict) -> tuple[dict, memoryview] | None:
        """The answer of one of them, each asked again while it is still ending the step. None if all are lost. Raises
        LookupError at last."""
        until = time.monotonic() + ENDING_S
        for member in members:
            with contextlib.suppress(MemberLostError):
                while True:
                    try:
                        return self.members.plane.request(member, kind, header)
                    except LookupError:
                        if time.monotonic() > until:
                            raise
                    time.sleep(POLL_S)
        return None
