"""The timeline: what the coordinator of rank 0 did for each named tensor, in Chrome's format, for ui.perfetto.dev.

Each tensor has a process of its own, named `allreduce.<name>`, with the spans NEGOTIATE_ALLREDUCE, until the ranks
agreed, and ALLREDUCE, until its result was there. The file grows while the job runs, and is complete JSON when the
timeline or the job ends.
"""

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fusedcomm.horovod.environment as environment
import fusedcomm.horovod.world as worlds
from fusedcomm import files
from fusedcomm.horovod.world import World
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.trace.document import times

Event = tuple[str, str, int, int]
"""Name, phase, begin and end in µs. A mark has no name and no length."""

CYCLES = "cycles"

DRAIN_S = 0.02
"""How often events go into the file, in seconds. Only while there is a timeline."""

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
    _writer = Writer(Path(file_path), world.coordinator, mark_cycles)


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
    """Moves a coordinator's events into a file, on a thread of its own. Raises OSError if the file cannot be opened.

    If it cannot be written later, on a full disk for example, a warning says so once, and training goes on.
    """

    def __init__(self, path: Path, coordinator: Any, mark_cycles: bool) -> None:
        self._path = path
        self._file = path.open("w")
        self._is_broken = False
        self._coordinator = coordinator
        self._processes: dict[str, int] = {}
        self._separator = "[\n"
        self._is_ended = threading.Event()
        coordinator.start_events(mark_cycles)
        self._thread = threading.Thread(target=self._run, name="fusedcomm timeline", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_ended.wait(DRAIN_S):
            self._drain()

    def _drain(self) -> None:
        lines = []  # one event to a line, for grep
        for event in chrome_events(self._coordinator.take_events(), self._processes):
            lines.append(self._separator + json.dumps(event))
            self._separator = ",\n"
        self._write("".join(lines))

    def _write(self, text: str) -> None:
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
        """Writes the events that are left, and closes the file."""
        self._is_ended.set()
        self._thread.join()
        self._drain()
        self._write("\n]\n" if self._processes else "[]\n")
        with contextlib.suppress(OSError):  # has been told
            self._file.close()


def chrome_events(events: Sequence[Event], processes: dict[str, int]) -> list[dict[str, Any]]:
    """Chrome's events: a process for each name, one for the cycles' marks, and a span for each phase. `processes`: the
    numbers given so far, to which new names are added."""
    found: list[dict[str, Any]] = []
    for name, phase, begin_us, end_us in events:
        name = name or CYCLES
        if name not in processes:
            processes[name] = len(processes)
            about = {"ph": "M", "tid": 0, "name": "process_name", "args": {"name": name}}
            found.append({**about, "pid": processes[name]})
        place = {"name": phase, "pid": processes[name], "tid": 0}
        if name == CYCLES:
            found.append({"ph": "i", "s": "g", "ts": begin_us, **place})
        else:
            found.append({"ph": "X", "cat": "horovod", **times(begin_us * 1000, end_us * 1000), **place})
    return found
