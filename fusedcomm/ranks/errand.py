"""A call that may never return, on a thread that can be left behind."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_of_thread = threading.local()


class Errand(Generic[T]):
    """Runs a function on a daemon thread; at once, on this thread, if the system has no thread left: a rank that lacks
    threads has to tell the others so.

    Attributes:
        future: of what the function returns or raises.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()  # nobody cancels it from here on
        self._is_left = threading.Event()

        def run() -> None:
            around, _of_thread.errand = getattr(_of_thread, "errand", None), self
            try:
                self.future.set_result(function())
            except BaseException as error:
                self.future.set_exception(error)
            finally:
                _of_thread.errand = around

        try:
            threading.Thread(target=run, name="fc-errand", daemon=True).start()
        except RuntimeError:
            run()

    def has_ended_within(self, seconds: float) -> bool:
        return bool(concurrent.futures.wait([self.future], seconds).done)

    def result(self) -> T:
        return self.future.result(0)

    def leave(self) -> None:
        """Tells the function that nobody waits for its end any more, if it asks :func:`is_left`."""
        self._is_left.set()


def is_left() -> bool:
    """Whether this thread is on an errand that was left behind."""
    errand = getattr(_of_thread, "errand", None)
    return errand is not None and errand._is_left.is_set()
