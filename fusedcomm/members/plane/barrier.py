"""Where the main thread waits, between two steps and after a failed one, for what the members agree on."""

import threading
import time

from fusedcomm.members.errors import InstallTimeoutError
from fusedcomm.members.plane.view import Decision, View


class StepBarrier:
    """The main thread's side of a change of views. All methods may be called on any thread.

    The main thread writes `entered` and then reads `_is_pending`; the control thread sets `_is_pending` and then reads
    `entered`. At least one of them sees the other, so no step begins that was promised to wait, and a step with nothing
    pending costs one read.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_pending = False
        self._suspended_by = 0  # the highest number of an immediate change that was promised
        self._boundary: tuple[int, int] | None = None  # a boundary change that was promised: its number and step
        self._decision: Decision | None = None
        self._immediate = False
        self._returned = -1  # number of the last decision that the main thread was given
        self._active = -1
        self._is_deferred = False
        self._runs = False  # the main thread runs in a view, or was told that it may
        self.installed = -1
        self.finished: int | None = None
        self.entered = -1
        self.failure: RuntimeError | None = None

    # ---- the control thread's

    def start(self, view: View) -> None:
        """Founders begin in this view."""
        with self._changed:
            self.installed = self._returned = self._active = view.number
            self._runs = True
            self.finished, self.entered = view.step - 1, view.step - 1

    def suspend(self, number: int) -> None:
        """From now on no step finishes, until a view of that number or a later one is installed."""
        with self._changed:
            self._suspended_by = max(self._suspended_by, number)
            self._notify()

    def hold(self, number: int, step: int) -> bool:
        """The main thread waits at the beginning of that step. False if the step has begun."""
        with self._changed:
            self._boundary, self._is_pending = (number, step), True
            if self.entered >= step:
                self._boundary = None
            self._notify()
            return self._boundary is not None

    def resume(self, number: int) -> None:
        """Undoes hold()."""
        with self._changed:
            if self._boundary is not None and self._boundary[0] == number:
                self._boundary = None
                self._notify()

    def commit(self, decision: Decision, immediate: bool) -> None:
        with self._changed:
            self._decision, self._immediate, self._is_deferred = decision, immediate, False
            if self._boundary is not None and self._boundary[0] <= decision.view.number:
                self._boundary = None
            self._notify()

    def set_active(self, number: int) -> None:
        """The view of that number is active: all its members are ready for it."""
        with self._changed:
            self._active = max(self._active, number)
            self._notify()

    def defer(self) -> bool:
        """A joiner's decision does not count any more. False if the main thread has acted on it."""
        with self._changed:
            if not self._runs:
                self._decision, self._is_deferred = None, True
                self._notify()
            return not self._runs

    def fail(self, error: RuntimeError) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._notify()

    # ---- the main thread's

    def finish_step(self, step: int, number: int | None = None) -> bool:
        """Notes that the step has finished. False if this member has acknowledged a change after view `number`: it has
        said there that the step is not finished. number: of the decision before which another member had finished it;
        None: of the view in which this one has."""
        with self._changed:
            if self.failure is not None or self._suspended_by > (self.installed if number is None else number):
                return False
            self.finished = step
            return True

    def begin(self, step: int) -> bool:
        """Whether the step may begin at once."""
        self.entered = step
        return not self._is_pending

    def boundary(self, step: int) -> Decision | None:
        """After begin() was False. None: nothing is to be waited for any more, or the barrier is stopped."""
        with self._changed:
            while not self.is_stopped:
                decision = self._new()
                if decision is not None and not self._immediate and decision.view.step <= step:
                    return self._hand_over(decision)
                if self._boundary is None or self._boundary[1] > step:
                    return None
                self._changed.wait()
            return None

    def wanted(self) -> int:
        """The main thread waits for a view with a higher number than this."""
        with self._changed:
            # A change at a boundary does not help a step that has failed.
            held = self._decision.view.number if self._decision is not None and not self._immediate else -1
            return max(self.installed, self._returned, self._suspended_by - 1, held)

    def recover(self) -> Decision:
        with self._changed:
            while True:
                self._raise()
                decision = self._new()
                if decision is not None and (self._immediate or self.installed < 0):
                    if decision.view.number >= self._suspended_by:
                        return self._hand_over(decision)
                self._changed.wait()

    def wait_active(self, number: int, timeout_s: float) -> bool:
        """Waits until the view of that number is active. False: it has been superseded."""
        until = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise()
                if self._suspended_by > number or self._is_deferred:
                    return False
                if self._active >= number:
                    self._runs = True
                    return True  # a later decision, if there is one, is for a later step
                if self._decision is not None and self._decision.view.number > number:
                    return False
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise InstallTimeoutError(f"fusedcomm: view {number} was not ready everywhere in {timeout_s:g} s")
                self._changed.wait(left_s)

    def is_superseded(self, number: int) -> bool:
        """Whether the members have left that view at once, and not at a boundary that is still to come, or have agreed
        to."""
        with self._changed:
            later = self._decision is not None and self._decision.view.number > number and self._immediate
            return self.failure is not None or later or self._suspended_by > number

    def install(self, view: View) -> None:
        """The main thread runs in the view."""
        with self._changed:
            self.installed = max(self.installed, view.number)
            self.finished = max(-1 if self.finished is None else self.finished, view.step - 1)
            self._notify()

    @property
    def is_stopped(self) -> bool:
        """Whether a change, or a failure, keeps steps from finishing."""
        return self.failure is not None or self._suspended_by > self.installed

    def _notify(self) -> None:
        self._is_pending = self.is_stopped or self._boundary is not None or self._new() is not None
        self._changed.notify_all()

    def _new(self) -> Decision | None:
        """The last decision, if the main thread has not been given it."""
        decision = self._decision
        is_new = decision is not None and decision.view.number > max(self.installed, self._returned)
        return decision if is_new else None

    def _hand_over(self, decision: Decision) -> Decision:
        self._returned = decision.view.number
        return decision

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure
