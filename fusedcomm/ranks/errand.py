"""A call that may never return, on a thread that can be left behind."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Errand(Generic[T]):
    """Runs a function on a daemon thread; at once, on this thread, if the system has no thread left: a rank that lacks
    threads has to tell the others so.

    Attributes:
        future: of what the function returns or raises.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()  # nobody cancels it from here on

        def run() -> None:
            try:
                self.future.set_result(function())
            except BaseException as error:
                self.future.set_exception(error)

        try:
            threading.Thread(target=run, name="fc-errand", daemon=True).start()
        except RuntimeError:
            run()

    def has_ended_within(self, seconds: float) -> bool:
        return bool(concurrent.futures.wait([self.future], seconds).done)

    def result(self) -> T:
        return self.future.result(0)
