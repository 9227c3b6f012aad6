"""A call that may never return, on a thread that can be left behind."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Errand(Generic[T]):
    """Runs a function on a daemon thread; at once, on this thread, if the system has no thread left: a rank that lacks
    threads has to tell the others so."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._value: T | None = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._value = function()
            except BaseException as error:
                self._error = error

        self._thread: threading.Thread | None = threading.Thread(target=run, name="fc-errand", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
            run()

    def has_ended_within(self, seconds: float) -> bool:
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return cast("T", self._value)
