"""The training of a reducer whose ranks come and go: a session for each view, and what leads from one to the next.

a rank is lost      the control thread stops the engine, and aborts collectives on a device: freeze()
                    → the pass ends with an error, and the reducer asks recover()
                    → the members agree on a view, and on who has finished the step
  somebody has        its encoded means are fetched; the step is finished here, too
  nobody has          a new session of the survivors; the reducer hands the kept codes over to it
a rank joins        at a boundary between two steps: before_pass()
"""

import contextlib
import dataclasses
import threading
import time
from typing import Any

import torch

from fusedcomm.config import Config, LocalOptions
from fusedcomm.members import state
from fusedcomm.members.errors import DamagedError, MemberLostError
from fusedcomm.members.keeping import KeepingSession, why_not, with_codes_kept
from fusedcomm.members.members import INSTALL_TIMEOUT_S, PROGRESS, Members
from fusedcomm.members.view import Decision, Member, View
from fusedcomm.native import _C
from fusedcomm.ranks import agreement
from fusedcomm.ranks.bounded_store import Errand
from fusedcomm.session.parameters import NamedParameter
from fusedcomm.session.plan import Plan
from fusedcomm.session.runs import Runs
from fusedcomm.session.session import Session
from fusedcomm.session.stats import Change, Stats

_MEANS = "means"
_CHANGING = "the ranks are changing"
_MODEL, _BUFFERS = "model", "buffers"
_POLL_S = 0.02
"""Seconds between two looks whether a view that is being connected is still the members' choice."""
_NOTICED_S = 5.0
"""Seconds within which the members notice that a rank is lost, before the first step."""
_ENDING_S = 60.0
"""Seconds that a member which has all means may take to say so."""
MAX_FAILURES = 5
"""Changes of views in one step, without a rank that is lost or joins, after which the step fails."""


class Training(Runs):
    """The sessions of one reducer.

    Args:
        config, parameters, local, device, also_agree, problem: as for :class:`Session`.
        model: by name, what a rank that joins gets: parameters and buffers.
    """

    def __init__(
        self,
        members: Members,
        config: Config,
        parameters: list[NamedParameter],
        local: LocalOptions,
        device: torch.device,
        also_agree: dict[str, object],
        model: dict[str, torch.Tensor],
        problem: Exception | None,
    ) -> None:
        if members.training is not None:
            raise ValueError(
                "fusedcomm: these members belong to another reducer already: one Members is for one DataParallel or "
                "GradReducer"
            )
        self.members, self._model = members, model
        self._config = with_codes_kept(config, local, members, device)
        self._arguments = (parameters, local, device)
        self._also_agree = also_agree = {
            **also_agree,
            "members": {"microbatches": members.microbatches, "min_ranks": members.min_ranks},
        }
        self._check = {
            **agreement.versions(),
            "config": self._config.record(),
            "parameters": [[p.name, list(p.tensor.shape), str(p.tensor.dtype)] for p in parameters],
            "model": sorted(model),
            **also_agree,
        }
        self.step = 0
        self._has_tried = False  # whether the first session was made, or could not be
        self.session: Any = None  # set below, and by each change
        self._native: _C.GradReducer | None = None
        self._pending: Decision | None = None
        self._changes: list[Change] = []
        self._lock = threading.Lock()  # guards session, _kept and step against other threads
        self._kept: _C.Synchronizer | None = None  # has the means of the last step
        self._missing: set[str] = set()  # what the others carry and this rank has not received
        self._why_not_built = RuntimeError("fusedcomm: the members have changed before the first step")
        self._noise_step = 0  # the synchronizer's number of the step under way
        self._weight_sum = 0.0  # of the ranks' weights in the last step
        self._to_tell: list[Decision] = []
        self._sources: list[Member] = []  # from which a rank that joins gets the state
        self._num_shared = 0  # microbatches of this step when it began
        self._admitted: set[str] = set()  # the ranks that joined at its beginning, with a batch more each
        plane = members.plane
        plane.on_freeze = self.freeze
        plane.handlers[_MEANS] = self._serve_means
        plane.handlers[PROGRESS] = lambda header: ({"finished": self.step - 1 if self._has_tried else -2}, [])
        plane.handlers[state.KIND] = state.serve(self._find_state)
        plane.check_join = lambda joiner: why_not(joiner, self._record(), members)
        members.training = self
        if members.joins is None:
            plane.start(members.current)
            self.session = self._build(members.current, problem)
            if problem is not None:  # the members have changed before they had compared anything
                raise problem
            while self.session is None:  # a rank was lost before the first step
                self._install(plane.recover(), time.monotonic())
            self._begin_step()
        elif problem is not None:
            raise problem
        else:
            self._join(members.joins)

    def start(self, native: "_C.GradReducer") -> None:
        """Call it when the native reducer is made."""
        self._native = native
        native.use(finish=self.finish, recover=self.recover)
        native.observe(self.session.native_device, self.before_pass)

    # ---- Runs

    @property
    def weights(self) -> Any:  # type: ignore[override]
        return None if self.session.weights is None else self

    def stats(self) -> Stats:
        return dataclasses.replace(self.session.stats(), changes=tuple(self._changes))

    def plan(self, bucket_nbytes_caps: list[int] | None) -> Plan:
        found = self.session.plan(bucket_nbytes_caps)
        # A rank sends (p-1)/p of its codes and, p-1 times, its part of the means: as much as (p-1)/p of both.
        ranks = found.world_size
        kept_nbytes = found.sent_nbytes * ranks // (ranks - 1) if ranks > 1 else 0
        if self.session.device.type != "cpu":  # the means of two passes; see KeptMessages in job.h
            kept_nbytes = kept_nbytes * 3 // 2
        return dataclasses.replace(found, kept_nbytes=kept_nbytes)

    def stop(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the plane has failed, and nobody needs this rank's means
            self.members.wait_for_others(_ENDING_S)
        self.session.synchronizer.abort(reason)
        self.session.stop(reason)
        self.members.plane.leave(reason)

    # ---- weights, of whichever session runs; see session/weights.py

    def __getattr__(self, name: str) -> Any:
        if name in ("set", "set_invalid", "note_pass", "forget_passes", "in_pass"):
            return getattr(self.session.weights, name)
        raise AttributeError(name)

    # ---- called by the control thread

    def freeze(self) -> None:
        """Stops the engine: no step finishes until the members have another view. On a device collectives under way end
        then, and nothing that they have written counts."""
        with self._lock:
            session = self.session
        if session is not None:
            session.synchronizer.abort(_CHANGING)

    def _record(self) -> dict[str, object]:
        """What this process and one that joins must have in common."""
        return {**self._check, "trained": [p.name for p in self._arguments[0] if p.tensor.requires_grad]}

    def _serve_means(self, header: dict) -> tuple[dict, list[memoryview]]:
        step, bucket = int(header["step"]), int(header["bucket"])
        with self._lock:
            kept = self._kept
        if kept is None or step != self.step - 1:
            raise LookupError(f"the means of step {step} are not kept, but those of step {self.step - 1}")
        return {"weights": self._weight_sum}, [memoryview(kept.kept_means(bucket).cpu().numpy())]

    def _find_state(self, header: dict) -> tuple[dict[str, object], Any]:
        name, step = str(header["name"]), int(header["step"])
        if step != self.step:
            raise LookupError(f"the state of step {step} is gone: this member is at step {self.step}")
        said = {
            "carries": sorted(self.members.carried),
            "microbatches": self.members.num_microbatches,
            "shared out": self._num_shared,
            "noise step": self._noise_step,
        }
        if name in (_MODEL, _BUFFERS):
            return said, {
                key: value for key, value in self._model.items() if key.startswith("buffer ") == (name == _BUFFERS)
            }
        if name not in self.members.carried:
            raise LookupError(f"the members carry no {name!r}, but {sorted(self.members.carried)}")
        return said, self.members.carried[name].state_dict()

    # ---- called on the main thread

    def before_pass(self) -> None:
        """Installs the view that begins with this step, if one does."""
        if self._missing:
            raise RuntimeError(
                f"fusedcomm: the members carry {sorted(self._missing)}, which this rank has not received: name the "
                "same objects with members.carry() before the first backward pass"
            )
        while True:
            decision = self._pending or self.members.plane.boundary(self.step)
            self._pending = None
            if decision is None:
                return
            began, old = time.monotonic(), self.session.synchronizer
            old.wait_until_idle(_ENDING_S)  # the optimizer, too: a rank that joins reads its parameters
            self._install_one(decision, began)
            self.session.synchronizer.take_over(old)
            self._hand_over()
            self._tell()

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
        for decision in decisions:
            self.members.tell(decision)

    def _hand_over(self) -> "_C.Synchronizer":
        """Gives the reducer the present session."""
        assert self._native is not None
        self._native.set_ranks(self.session.synchronizer, self.session.store("reducer"))
        return self.session.synchronizer

    def finish(self) -> bool:
        """Notes that this rank has all means of the step. False if the members have begun to change before."""
        if not self.members.plane.finish_step(self.step):
            return False
        self._end_step()
        return True

    def recover(self, failure: str) -> "_C.Synchronizer | None":
        """Finishes the step although ranks are lost; see Membership in reducer.h."""
        try:
            return self._recovered(failure)
        except BaseException as error:
            self.members.plane.leave(f"it cannot go on: {error}")
            raise

    def _recovered(self, failure: str) -> "_C.Synchronizer | None":
        began = time.monotonic()
        self._refuse_damage(failure)
        self.session.synchronizer.wait_until_idle(_ENDING_S)
        for _ in range(MAX_FAILURES):
            decision = self.members.plane.recover()
            ahead = [m for m in self._old_members(decision) if decision.finished.get(m.uid, -1) >= self.step]
            if ahead:
                if self._fetch(ahead) and self.members.plane.has_finished(self.step, decision.view):
                    self._pending = decision
                    self._end_step()
                    return None
            elif self._install(decision, began):
                return self._hand_over()
        raise RuntimeError(f"fusedcomm: step {self.step} failed {MAX_FAILURES} times, last with: {failure}")

    def _refuse_damage(self, failure: str) -> None:
        """Raises DamagedError if bits of the step before have changed on the way, on each rank that they have reached.

        If only the means differ between ranks, those that most ranks have are right, and a rank with others leaves.
        """
        found = self.session.synchronizer.last_digests()
        if found is None or found.agrees:
            return
        if found.outvoted and len(found.outvoted) < len(found.means):
            if self.session.rank not in found.outvoted:
                return  # the others leave
            self.members.plane.leave("its means of a step were not those of most ranks")
            failure += ". This rank has left, and the others go on"
        raise DamagedError(failure)

    def receive(self, name: str, carried: Any) -> None:
        """Loads the others' state of a carried object, in a rank that joins; else does nothing."""
        if self.members.joins is None:
            return
        if name not in self._missing:
            raise RuntimeError(f"fusedcomm: the members carry {sorted(self._missing)}, and not {name!r}")
        carried.load_state_dict(self._received(name)[1])
        self._missing.discard(name)

    # ---- steps between views

    def _begin_step(self) -> None:
        self._num_shared = self.members.begin_step()
        self._noise_step = self.session.synchronizer.step
        if self.members.microbatches is not None:
            self.session.weights.set(float(self.members.weighs))

    def _admit(self, decision: Decision) -> None:
        """A step that has begun has a batch more for each rank that joins, unless their number is kept."""
        if self.members.microbatches is None:
            self._admitted |= {member.uid for member in decision.joined}

    def _end_step(self) -> None:
        with self._lock:
            self._kept = self.session.synchronizer
            self.step += 1
        if self.session.weights is not None:
            self._weight_sum = self.session.weights.last[0]
        self.members.num_microbatches += self._num_shared + len(self._admitted)
        self._admitted = set()
        self._begin_step()
        self._tell()

    def _old_members(self, decision: Decision) -> list[Member]:
        own = self.members.plane.member.uid
        return [member for member in (*decision.view.members, *decision.lost) if member.uid != own]

    def _fetch(self, ahead: list[Member]) -> bool:
        """Takes the means that this rank misses from members that have finished the step. False if all are lost."""
        synchronizer = self.session.synchronizer
        for bucket in synchronizer.missing_means():
            for member in ahead:
                with contextlib.suppress(MemberLostError):
                    said, content = self._ask_for_means(member, bucket)
                    if self.session.weights is not None:
                        self.session.weights.finish_last(said["weights"])
                    means = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                    synchronizer.complete_bucket(bucket, means)
                    break
            else:
                return False
        return True

    def _ask_for_means(self, member: Member, bucket: int) -> tuple[dict, memoryview]:
        """Asks again while the member is still ending the step. Raises MemberLostError, and LookupError at last."""
        until = time.monotonic() + _ENDING_S
        while True:
            try:
                return self.members.plane.request(member, _MEANS, {"step": self.step, "bucket": bucket})
            except LookupError:
                if time.monotonic() > until:
                    raise
            time.sleep(_POLL_S)

    def _install(self, decision: Decision, began: float) -> bool:
        """Makes the session of the decision's view. False if the members have agreed on another one meanwhile."""
        plane = self.members.plane
        if not plane.install(decision.view, INSTALL_TIMEOUT_S):
            return False
        self._admit(decision)
        session: Any = self._build(decision.view)
        if session is None:
            return False
        with self._lock:
            old, self.session = self.session, session
        if plane.is_superseded(decision.view):  # freeze() may have stopped the session before this one
            session.synchronizer.abort(_CHANGING)
        self.members.enter(decision.view)
        plane.installed(decision.view)
        if old is not None:
            old.synchronizer.abort(_CHANGING)
            old.synchronizer.leave(_CHANGING)
            if self._kept is not old.synchronizer:
                old.synchronizer.engine.free_workspaces()
            lost, joined = (tuple(m.address for m in some) for some in (decision.lost, decision.joined))
            pause_s = time.monotonic() - began
            size = len(decision.view.members)
            self._changes.append(Change(decision.view.number, self.step, size, lost, joined, pause_s))
            self._to_tell.append(decision)
        return True

    def _build(self, view: View, problem: Exception | None = None) -> Session | None:
        """The session of a view; None if the members have agreed on another one meanwhile."""

        def make() -> Any:
            group = self.members.group(view, self._arguments[2])
            session: Any = KeepingSession(
                self._config, group, *self._arguments, also_agree=self._also_agree, problem=problem
            )
            # Fixed, because a rank that joins has not seen the first weights.
            session.synchronizer.weights.set_unit(1.0)
            return session

        errand = Errand(make)
        while not errand.has_ended_within(_POLL_S):
            if self.members.plane.is_superseded(view):
                return None
        self._has_tried = True
        try:
            return errand.result()
        except Exception as error:
            if error is problem or isinstance(error, agreement.DisagreementError):
                # To the others, a rank that leaves before they have the verdict is only a lost one.
                self.members.wait_for_others(_NOTICED_S)
                raise
            if problem is not None:
                raise problem from error
            if not isinstance(error, RuntimeError):
                raise
            self._why_not_built = error
        until = time.monotonic() + _NOTICED_S  # perhaps a rank is lost, and the members have not noticed yet
        while self.session is None and not self.members.plane.is_superseded(view):
            if time.monotonic() > until:
                raise self._why_not_built
            time.sleep(_POLL_S)
        return None

    def _join(self, address: str) -> None:
        plane = self.members.plane
        began = time.monotonic()
        decision = plane.join(address, self._record())
        own, joined = plane.member.uid, list(decision.joined)
        while not self._install(decision, began):
            decision = plane.recover()
            if own in [member.uid for member in decision.joined]:  # else it has joined with the view before
                joined = list(decision.joined)
        self.step = decision.view.step
        uids = [member.uid for member in joined]  # these have no state to give
        self._sources = [member for member in decision.view.members if member.uid not in uids]
        said, tensors = self._received(_MODEL)
        tensors |= self._received(_BUFFERS)[1]
        with torch.no_grad():
            for name, tensor in self._model.items():
                tensor.copy_(tensors[name])
        self._missing = set(said["carries"])
        self.members.num_microbatches = said["microbatches"]
        self._num_shared = said["shared out"]
        if self.members.microbatches is None:
            self.members.portion = (said["shared out"] + uids.index(own), 1)
        else:
            self.members.portion = (0, 1)
            self.session.weights.set(0.0)
        self.session.synchronizer.step = said["noise step"]

    def _received(self, name: str) -> tuple[dict, Any]:
        transfer = state.Transfer(self.members.plane, self._sources, {"name": name, "step": self.step})
        said, skeleton = transfer.skeleton()
        value, tensors = state.unpack(skeleton)
        # Of the same bits on all members; buffers, and what else is carried, may differ between them.
        is_common = name == _MODEL or isinstance(self.members.carried.get(name), torch.optim.Optimizer)
        state.fill(tensors, transfer.content(said["nbytes"], len(self._sources) if is_common else 1))
        return said, value
