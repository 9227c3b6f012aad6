"""The training of a reducer whose ranks come and go: a session for each view, and what leads from one to the next.

a rank is lost      the control thread stops the engine, and aborts collectives on a device: stop_step()
                    → the pass ends with an error, and the reducer asks recover()
                    → the members agree on a view, and on who has finished the step
  somebody has        its encoded means are fetched; the step is finished here, too
  nobody has          a new session of the survivors; the reducer hands the recovery codes over to it
a rank joins        at a boundary between two steps: before_pass()
"""

import contextlib
import time
import weakref
from collections.abc import Collection
from typing import Any

import torch

from fusedcomm.members.errors import MemberLostError
from fusedcomm.members.plane.view import Decision, Member
from fusedcomm.members.training.views import BUFFERS, ENDING_S, MAX_FAILURES, MODEL, POLL_S, Views
from fusedcomm.native import _C
from fusedcomm.session.compare import ParameterDifference
from fusedcomm.session.session import Mode

_MEANS = "means"


class Training(Views):
    """The passes of one reducer."""

    _native: "weakref.ref[_C.GradReducer]"  # it holds this object
    _pending: Decision | None = None  # the view that the step after one with fetched means begins in

    def begin(self, problem: Exception | None) -> None:
        """Makes the first session, or joins. problem: as for :class:`Session`."""
        self.members.plane.hooks.handlers[_MEANS] = self._serve_means
        if self.members.joins is None:
            self._found(problem)
            self._begin_step()
        elif problem is not None:
            raise problem
        else:
            self._take_state(self._join(self.members.joins))

    def start(self, native: "_C.GradReducer") -> None:
        """Call it when the native reducer is made."""
        self._native = weakref.ref(native)
        native.use(finish=self.finish, recover=self.recover)
        native.observer.watch(self.session.native_device, self.before_pass, times=False)

    # ---- what a handle asks of what runs behind it

    mode: Mode = "active"

    @property
    def weights(self) -> Any:
        return None if self.session.weights is None else self

    # ---- weights, of whichever session runs; see session/weights.py

    def __getattr__(self, name: str) -> Any:
        if name in ("set", "set_invalid", "of_sums", "note_pass", "has_noted", "forget_passes"):
            return getattr(self.session.weights, name)
        raise AttributeError(name)

    # ---- called by the control thread

    def _serve_means(self, header: dict) -> tuple[dict, list[memoryview]]:
        step, bucket = int(header["step"]), int(header["bucket"])
        with self._lock:
            finished = self._finished
        if finished is None or step != self.step - 1:
            raise LookupError(f"the means of step {step} are not kept, but those of step {self.step - 1}")
        return {}, [memoryview(finished.kept_means(bucket).cpu().numpy())]

    # ---- called on the main thread

    def before_pass(self) -> None:
        """Installs the view that begins with this step, if one does."""
        self._refuse_missing()
        self._synchronizer_step = self.session.synchronizer.step
        while True:
            decision = self._pending or self.members.plane.boundary(self.step)
            self._pending = None
            if decision is not None:
                self._go_over(decision)
            elif self._compare_places():
                return self._compare_when_due()

    def _compare_when_due(self) -> None:
        every = self._config.compare_every
        if every is not None and self.step and self.step % every == 0:
            self.compare_parameters()

    def compare_parameters(self) -> ParameterDifference | None:
        return self._compared([(p.name, p.tensor) for p in self._arguments[0]], self._config.compare)

    def _go_over(self, decision: Decision) -> None:
        """Enters the next view between two steps."""
        began, old = time.monotonic(), self.session.synchronizer
        old.wait_until_idle(ENDING_S)  # the optimizer, too: a rank that joins reads its parameters
        self._install_one(decision, began)
        self.session.synchronizer.take_over(old)
        self._hand_over()
        self._tell()

    def begin_equal(self, without: Collection[str]) -> None:
        """Gives the founders, before their first step, the first rank's parameters and buffers, but for those of these
        names.

        If the first rank is lost, the next one asks all others: what one of them has taken counts, else its own. A view
        is installed once all have come, so nobody takes anything meanwhile.
        """
        plane = self.members.plane
        with self._going_on():
            while not self._is_equal:
                view = self.members.current
                first, *others = view.members
                is_first = first.uid == plane.member.uid
                try:
                    sources = [first] if not is_first else others if view.number else []
                    taken = next(filter(None, map(self._taken_from, sources)), None)
                except MemberLostError:
                    self._go_over(plane.recover())
                    continue
                if taken is not None:
                    self._write({name: tensor for name, tensor in taken.items() if name not in without})
                self._is_equal = is_first or taken is not None
                if not self._is_equal and self._is_superseded(view):
                    self._go_over(plane.recover())
                elif not self._is_equal:
                    time.sleep(POLL_S)

    def _taken_from(self, source: Member) -> dict[str, torch.Tensor] | None:
        """The first rank's model by this rank; None if that has not taken it itself."""
        self._sources = [source]
        with contextlib.suppress(LookupError):
            return {**self._received(MODEL, first=True)[1], **self._received(BUFFERS, first=True)[1]}
        return None

    def _write(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._model[name].copy_(tensor)

    def _hand_over(self) -> "_C.Synchronizer":
        """Gives the reducer the present session."""
        native = self._native()
        assert native is not None
        native.set_ranks(self.session.synchronizer, self.session.store("reducer"))
        return self.session.synchronizer

    def finish(self) -> bool:
        """Notes that this rank has all means of the step. False if the members have begun to change before."""
        if not self.members.plane.barrier.finish_step(self.step):
            return False
        self._end_step()
        return True

    def recover(self, failure: str) -> "_C.Synchronizer | None":
        """Finishes the step although ranks are lost; see Membership in reducer.h."""
        with self._going_on():
            return self._recovered(failure)

    def _recovered(self, failure: str) -> "_C.Synchronizer | None":
        began = time.monotonic()
        self.session.synchronizer.wait_until_idle(ENDING_S)
        for _ in range(MAX_FAILURES):
            decision = self.members.plane.recover()
            ahead = self._ahead(decision, self.step)
            if ahead:
                if self._fetch(ahead) and self.members.plane.barrier.finish_step(self.step, decision.view.number):
                    self._pending = decision
                    self._end_step()
                    return None
            elif self._install(decision, began):
                return self._hand_over()
        raise RuntimeError(f"fusedcomm: step {self.step} failed {MAX_FAILURES} times, last with: {failure}")

    # ---- steps between views

    def _begin_step(self) -> None:
        self._num_shared = self.members.begin_step()
        if self.members.microbatches is not None:
            self.session.weights.set(float(self.members.weighs))

    def _end_step(self) -> None:
        with self._lock:
            self._finished = self.session.synchronizer
            self._finished.end_kept_pass()
            self.step += 1
        # Unless their number is kept, the step has had a batch more for each rank that joined after it was shared out.
        more = len(self._admitted) if self.members.microbatches is None else 0
        self.members.num_microbatches += self._num_shared + more
        self._admitted = set()
        self._begin_step()
        self._tell()

    def _fetch(self, ahead: list[Member]) -> bool:
        """Takes the means that this rank misses from members that have finished the step. False if all are lost."""
        synchronizer = self.session.synchronizer
        for bucket in synchronizer.missing_means():
            found = self._ask(ahead, _MEANS, {"step": self.step, "bucket": bucket})
            if found is None:
                return False
            synchronizer.complete_bucket(bucket, torch.frombuffer(bytearray(found[1]), dtype=torch.uint8))
        return True

    def _take_state(self, joined: list[str]) -> None:
        """Takes the others' state, in a rank that joins with the processes of these uids."""
        said, tensors = self._received(MODEL)
        self._write(tensors | self._received(BUFFERS)[1])
        self._missing = set(said["carries"])
        self.members.num_microbatches = said["microbatches"]
        self._num_shared = said["shared out"]
        if self.members.microbatches is None:
            self.members.portion = (said["shared out"] + joined.index(self.members.plane.member.uid), 1)
        else:
            self.members.portion = (0, 1)
            self.session.weights.set(0.0)
        self.session.synchronizer.step = said["synchronizer step"]
