"""The timeline: what rank 0 did for each named tensor, in Chrome's format, for ui.perfetto.dev.

Each tensor has a process of its own, named `allreduce.<name>`, with the spans NEGOTIATE_ALLREDUCE, until the ranks
agreed, and ALLREDUCE, until its result was there. The file grows while the job runs, and is complete JSON when the
timeline or the job ends.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

import fusedcomm.horovod.world as worlds
from fusedcomm.horovod.order import Order, Request
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.trace import times

CYCLES = "cycles"


def start_timeline(file_path: str | os.PathLike, mark_cycles: bool = False) -> None:
    """Begins a timeline, which rank 0 writes until hvd.stop_timeline() or the end of the job; one that is being
    written ends. Every rank may call it. Raises ValueError before hvd.init(), OSError if the file cannot be written."""
    found = worlds.world()
    if found.rank == 0:
        found.end_timeline()
        found.timeline = Writer(Path(file_path), found.order, mark_cycles)


def stop_timeline() -> None:
    """Writes the timeline's file and ends it. Without effect if there is none. Raises ValueError before hvd.init()."""
    worlds.world().end_timeline()


class Writer:
    """Writes an order's operations into a file. Raises OSError if the file cannot be opened.

    If it cannot be written later, on a full disk for example, a warning says so once, and training goes on.
    """

    def __init__(self, path: Path, order: Order | None, mark_cycles: bool) -> None:
        self._path, self._order, self._marks_cycles = path, order, mark_cycles
        # Without a buffer a child of fork() has nothing to write.
        self._file = path.open("wb", buffering=0)
        self._is_broken, self._is_ended = False, False
        self._lock = threading.Lock()
        self._processes: dict[str, int] = {}
        self._began_s = time.perf_counter()
        if order is not None:
            order.watch(self)

    def issued(self, requests: list[Request]) -> None:
        """Notes the moment, and marks it as a cycle."""
        now_s = time.perf_counter()
        for request in requests:
            request.issued_s = now_s
        if self._marks_cycles:
            self._write(CYCLES, "CYCLE_START", now_s, now_s)

    def ended(self, requests: list[Request]) -> None:
        """Writes the requests' spans."""
        now_s = time.perf_counter()
        for request in requests:
            key, phase = request.signature.key, request.signature.kind.upper()
            self._write(key, f"NEGOTIATE_{phase}", request.submitted_s, request.issued_s)
            self._write(key, phase, request.issued_s, now_s)

    def _write(self, process: str, phase: str, begin_s: float, end_s: float) -> None:
        """One span to a line, for grep; before the first of a process what that is."""
        ends_ns = [round(max(0.0, moment_s - self._began_s) * 1e9) for moment_s in (begin_s, end_s)]
        with self._lock:
            if self._is_ended:
                return
            if process not in self._processes:
                number = self._processes[process] = len(self._processes)
                header = {"ph": "M", "tid": 0, "name": "process_name", "args": {"name": process}, "pid": number}
                self._say((",\n" if number else "[\n") + json.dumps(header))
            span = {"ph": "X", "cat": "horovod", "name": phase, **times(*ends_ns)}
            self._say(",\n" + json.dumps({"pid": self._processes[process], "tid": 0, **span}))

    def _say(self, text: str) -> None:
        if self._is_broken:
            return
        try:
            self._file.write(text.encode())
        except OSError as error:
            self._is_broken = True
            warn_alone(f"fusedcomm: {self._path}, the timeline, ends early and may be cut off: {error}", stacklevel=2)

    def end(self) -> None:
        """Completes the file. What has not ended is left out."""
        if self._order is not None:
            self._order.watch(None)
        with self._lock:
            self._is_ended = True
            self._say("\n]\n" if self._processes else "[]\n")
        with contextlib.suppress(OSError):  # has been told
            self._file.close()
