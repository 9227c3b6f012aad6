"""The timeline: what the coordinator of rank 0 did for each named tensor, in Chrome's format, for ui.perfetto.dev.

Each tensor has a process of its own, named `allreduce.<name>`, with the spans NEGOTIATE_ALLREDUCE, until the ranks
agreed, and ALLREDUCE, until its result was there. The file is written when the timeline or the job ends.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fusedcomm.horovod.environment as environment
import fusedcomm.horovod.world as worlds
from fusedcomm.horovod.world import World
from fusedcomm.trace.document import times

Event = tuple[str, str, int, int]
"""Name, phase, begin and end in µs. A mark has no name and no length."""

CYCLES = "cycles"

_path: Path | None = None
_coordinator: Any = None


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
    global _path, _coordinator
    path = Path(file_path)
    path.write_text("[]\n")  # a file that cannot be written is an error now, not at the end of the job
    world.coordinator.start_events(mark_cycles)
    _path, _coordinator = path, world.coordinator


def stop() -> None:
    global _path, _coordinator
    if _path is None:
        return
    path, coordinator = _path, _coordinator
    _path = _coordinator = None
    write(path, coordinator.take_events())


def write(path: Path, events: Sequence[Event]) -> None:
    import json

    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    # One event to a line, for grep.
    lines = ",\n".join(json.dumps(event) for event in chrome_events(events))
    unfinished.write_text(f"[\n{lines}\n]\n")
    unfinished.replace(path)


def chrome_events(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Chrome's events: a process for each name, one for the cycles' marks, and a span for each phase."""
    processes: dict[str, int] = {}
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
