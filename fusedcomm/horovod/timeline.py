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

import fusedcomm.horovod.environment as environment
import fusedcomm.horovod.world as worlds
from fusedcomm import files
from fusedcomm.horovod.order import Order, Request
from fusedcomm.horovod.world import World
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.trace.document import times

CYCLES = "cycles"

_writer: "Writer | None" = None


def start_timeline(file_path: str | os.PathLike, mark_cycles: bool = False) -> None:
    """Begins a timeline, which rank 0 writes to the file at hvd.stop_timeline() or at the end of the job. Every rank
    may call it. Raises ValueError before hvd.init() and without HOROVOD_TIMELINE=DYNAMIC, OSError if the file cannot
    be written."""
    found = worlds.world()
    if environment.text("HOROVOD_TIMELINE") != "DYNAMIC":
        raise ValueError(
            f"start_timeline({str(file_path)!r}) needs HOROVOD_TIMELINE=DYNAMIC in the environment before hvd.init(); "
            f"it is {os.environ.get('HOROVOD_TIMELINE')!r}"
        )
    if found.rank == 0:
        stop()
        start(found, file_path, mark_cycles)


def stop_timeline() -> None:
    """Writes the timeline's file and ends it. Without effect if there is none. Raises ValueError before hvd.init()."""
    worlds.world()
    stop()


def start(world: World, file_path: str | os.PathLike, mark_cycles: bool) -> None:
    """Begins a timeline of `world` in a file. Raises OSError if the file cannot be written."""
    global _writer
    _writer = Writer(Path(file_path), world.order, mark_cycles)


def stop() -> None:
    """Ends the timeline, if there is one, and completes its file."""
    global _writer
    if _writer is not None:
        ended, _writer = _writer, None
        ended.end()


def leave_to_parent() -> None:
    """In a child of fork(): what the file still holds back is written by the parent alone."""
    global _writer
    if _writer is not None:
        _writer.leave_file()
        _writer = None


class Writer:
    """Writes an order's operations into a file. Raises OSError if the file cannot be opened.

    If it cannot be written later, on a full disk for example, a warning says so once, and training goes on.
    """

    def __init__(self, path: Path, order: Order | None, mark_cycles: bool) -> None:
        self._path, self._order, self._marks_cycles = path, order, mark_cycles
        self._file = path.open("w")
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
            self._write([self._event(CYCLES, "CYCLE_START", now_s)])

    def ended(self, requests: list[Request]) -> None:
        """Writes the requests' spans."""
        now_s, events = time.perf_counter(), []
        for request in requests:
            key, phase = request.signature.key, request.signature.kind.upper()
            events.append(self._event(key, f"NEGOTIATE_{phase}", request.submitted_s, request.issued_s))
            events.append(self._event(key, phase, request.issued_s, now_s))
        self._write(events)

    def _event(self, name: str, phase: str, begin_s: float, end_s: float | None = None) -> dict:
        """A span of a name, or without an end a mark."""
        about = {"name": phase, "pid": name, "tid": 0}
        begin, end = (round(max(0.0, each - self._began_s) * 1e9) for each in (begin_s, end_s or begin_s))
        if end_s is None:
            return {"ph": "i", "s": "g", "ts": begin / 1e3, **about}
        return {"ph": "X", "cat": "horovod", **times(begin, end), **about}

    def _write(self, events: list[dict]) -> None:
        """One event to a line, for grep; before the first of a name what that is."""
        with self._lock:
            for event in events if not self._is_ended else ():
                name, separator = event["pid"], ",\n" if self._processes else "[\n"
                if name not in self._processes:
                    event["pid"] = self._processes[name] = len(self._processes)
                    header = {"ph": "M", "tid": 0, "name": "process_name", "args": {"name": name}, "pid": event["pid"]}
                    self._say(separator + json.dumps(header))
                    separator = ",\n"
                self._say(separator + json.dumps({**event, "pid": self._processes[name]}))

    def _say(self, text: str) -> None:
        if self._is_broken:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            self._is_broken = True
            where = files.told(error, self._path)
            warn_alone(f"fusedcomm: the timeline ends early, and may be cut off: {where}", stacklevel=2)

    def leave_file(self) -> None:
        """In a child of fork(): nothing that its buffer still holds goes into the parent's file."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)

    def end(self) -> None:
        """Completes the file. What has not ended is left out."""
        if self._order is not None:
            self._order.watch(None)
        with self._lock:
            self._is_ended = True
            self._say("\n]\n" if self._processes else "[]\n")
        with contextlib.suppress(OSError):  # has been told
            self._file.close()
