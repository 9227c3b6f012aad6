"""What the main thread and the control thread tell each other."""

import threading
import time

from .errors import InstallTimeoutError
from .view import Decision, View


class Gate:
    """The main thread's side of a change of views. All methods may be called on any thread.

    The main thread writes `entered` and then reads `_pending`; the control thread sets `_pending` and then reads
    `entered`. At least one of them sees the other, so no step begins that was promised to wait, and a step with nothing
    pending costs one read.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending = False
        self._frozen_by = 0  # the highest number of an immediate change that was promised
        self._hold: tuple[int, int] | None = None  # a boundary change that was promised: its number and step
        self._decision: Decision | None = None
        self._immediate = False
        self._returned = -1  # number of the last decision that the main thread was given
        self._gone = -1
        self._put_off = self._is_in = False  # _is_in: the main thread runs in a view, or was told that it may
        self.installed = -1
        self.finished: int | None = None
        self.entered = -1
        self.failure: RuntimeError | None = None

    # The control thread's.

    def start(self, view: View) -> None:
        """Founders begin in this view."""
        with self._changed:
            self.installed = self._returned = self._gone = view.number
            self._is_in = True
            self.finished, self.entered = view.step - 1, view.step - 1

    def freeze(self, number: int) -> None:
        """From now on no step finishes, until a view of that number or a later one is installed."""
        with self._changed:
            self._frozen_by = max(self._frozen_by, number)
            self._notify()

    def hold(self, number: int, step: int) -> bool:
        """False if the step has begun."""
        with self._changed:
            self._hold, self._pending = (number, step), True
            if self.entered >= step:
                self._hold = None
            self._notify()
            return self._hold is not None

    def release(self, number: int) -> None:
        with self._changed:
            if self._hold is not None and self._hold[0] == number:
                self._hold = None
                self._notify()

    def commit(self, decision: Decision, immediate: bool) -> None:
        with self._changed:
            self._decision, self._immediate, self._put_off = decision, immediate, False
            if self._hold is not None and self._hold[0] <= decision.view.number:
                self._hold = None
            self._notify()

    def set_gone(self, number: int) -> None:
        with self._changed:
            self._gone = max(self._gone, number)
            self._notify()

    def put_off(self) -> bool:
        """A joiner's decision does not count any more. False if the main thread has acted on it."""
        with self._changed:
            if not self._is_in:
                self._decision, self._put_off = None, True
                self._notify()
            return not self._is_in

    def fail(self, error: RuntimeError) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._notify()

    # The main thread's.

    def finish_step(self, step: int) -> bool:
        with self._changed:
            if self.is_stopped:
                return False
            self.finished = step
            return True

    def begin(self, step: int) -> bool:
        """Whether the step may begin at once."""
        self.entered = step
        return not self._pending

    def boundary(self, step: int) -> Decision | None:
        """After begin() was False. None: nothing is to be waited for any more, or the gate is stopped."""
        with self._changed:
            while not self.is_stopped:
                decision = self._new()
                if decision is not None and not self._immediate and decision.view.step <= step:
                    return self._hand_over(decision)
                if self._hold is None or self._hold[1] > step:
                    return None
                self._changed.wait()
            return None

    def wanted(self) -> int:
        """The main thread waits for a view with a higher number than this."""
        with self._changed:
            # A change at a boundary does not help a step that has failed.
            held = self._decision.view.number if self._decision is not None and not self._immediate else -1
            return max(self.installed, self._returned, self._frozen_by - 1, held)

    def recover(self) -> Decision:
        with self._changed:
            while True:
                self._raise()
                decision = self._new()
                if decision is not None and (self._immediate or self.installed < 0):
                    if decision.view.number >= self._frozen_by:
                        return self._hand_over(decision)
                self._changed.wait()

    def wait_installed(self, number: int, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise()
                if self._frozen_by > number or self._put_off:
                    return False
                if self._gone >= number:
                    self._is_in = True
                    return True  # a later decision, if there is one, is for a later step
                if self._decision is not None and self._decision.view.number > number:
                    return False
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise InstallTimeoutError(
                        f"fusedcomm: not all members of view {number} were ready for it within {timeout_s:g} s"
                    )
                self._changed.wait(left_s)

    def is_superseded(self, number: int) -> bool:
        """Whether the members have left that view, or have agreed to."""
        with self._changed:
            return self.failure is not None or self._is_left(number)

    def has_finished(self, step: int, number: int) -> bool:
        """Notes a step whose last means came from another member, after the decision for view `number`.

        False if this member has promised a later change meanwhile: it has said there that the step is not finished.
        """
        with self._changed:
            if self.failure is not None or self._frozen_by > number:
                return False
            self.finished = step
            return True

    def _is_left(self, number: int) -> bool:
        """Whether the members leave that view at once, and not at a boundary that is still to come."""
        later = self._decision is not None and self._decision.view.number > number and self._immediate
        return later or self._frozen_by > number

    def install(self, view: View) -> None:
        with self._changed:
            self.installed = max(self.installed, view.number)
            self.finished = max(-1 if self.finished is None else self.finished, view.step - 1)
            self._notify()

    def _notify(self) -> None:
        self._pending = self.is_stopped or self._hold is not None or self._new() is not None
        self._changed.notify_all()

    @property
    def is_stopped(self) -> bool:
        """Whether a change, or a failure, keeps steps from finishing."""
        return self.failure is not None or self._frozen_by > self.installed

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
