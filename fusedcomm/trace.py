"""A timeline of buckets and stages in the Chrome trace format, which ui.perfetto.dev and chrome://tracing read."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusedcomm import files
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.version import __version__

if TYPE_CHECKING:
    from fusedcomm.native import _C

RANK_FIELD = "{rank}"
"""In a path it is replaced by the rank, so that every rank writes a file of its own."""

LANE = " #"
"""Before the number of a track's further lanes, as in "wire #2"."""

# The tracks from top to bottom. Tracks of sums on two levels are shown only if there are any.
_TRACKS = ("exposed", "bucket", "pack", "local wire", "local reduce", "wire", "reduce", "unpack")
_LOCAL_TRACKS = ("local wire", "local reduce")
_TRACK_OF_STAGE = {
    **dict.fromkeys(("all-to-all", "all-gather", "all-reduce"), "wire"),
    **dict.fromkeys(("local all-to-all", "local all-gather"), "local wire"),
}


@contextlib.contextmanager
def record(synchronizer: "_C.Synchronizer", path: str | os.PathLike, rank: int, world_size: int) -> Iterator[None]:
    """See :meth:`fusedcomm.ddp.handle.Handle.trace`."""
    own_path = path_for(path, rank)
    if own_path is None:
        yield
        return
    files.check_writable(own_path)
    synchronizer.engine.start_trace()
    try:
        yield
    finally:
        spans = synchronizer.engine.stop_trace()
    try:
        write(own_path, document(spans, rank, world_size))
    except OSError as error:  # a full disk, for example, must not end this rank's training
        warn_alone(f"fusedcomm: the trace was not written: {error}", stacklevel=4)


def path_for(path: str | os.PathLike, rank: int) -> Path | None:
    """The file that `rank` writes. None if it writes none: without ``{rank}`` in the path only rank 0 writes."""
    if RANK_FIELD in str(path):
        return Path(str(path).replace(RANK_FIELD, str(rank)))
    return Path(path) if rank == 0 else None


def document(spans: Sequence["_C.TraceSpan"], rank: int, world_size: int) -> dict[str, object]:
    """One rank's trace: the spans as Chrome's complete events, in microseconds since this rank's trace began.

    Perfetto leaves out complete events that overlap others on their track. A track on which spans overlap, like that of
    the buckets, therefore has several lanes, each a thread of Chrome's format. (Perfetto cannot name the tracks of
    asynchronous events.)
    """
    by_track: dict[str, list[dict]] = {track: [] for track in _TRACKS}
    for span in spans:
        args = {"bucket": span.text, "stage": span.stage, "step": span.step, "chunk": span.chunk}
        begin, end = (round(ms * 1e6) for ms in (span.begin_ms, span.end_ms))
        track = _TRACK_OF_STAGE.get(span.stage, span.stage)
        by_track[track].append({"ph": "X", "name": _name(span), "cat": "fusedcomm", **times(begin, end), "args": args})
    name = f"fusedcomm rank {rank} of {world_size}"
    headers = [_header(0, "process_name", name=name), _header(0, "process_sort_index", sort_index=rank)]
    events = []
    # A thread with the number of its process is its main thread, which Perfetto does not sort among the others. Process
    # numbers are ranks.
    thread = world_size
    for track, on_track in by_track.items():
        if track in _LOCAL_TRACKS and not on_track:
            continue
        in_lanes = lanes(on_track)
        for index, lane in enumerate(in_lanes):
            headers.append(_header(thread, "thread_name", name=f"{track}{LANE}{index + 1}" if index else track))
            headers.append(_header(thread, "thread_sort_index", sort_index=thread))
            events += [{**event, "tid": thread} for event in lane]
            thread += 1
    for event in headers + events:
        event["pid"] = rank
    about = {"version": __version__, "rank": rank, "world_size": world_size}
    return {"traceEvents": headers + events, "displayTimeUnit": "ms", "otherData": {"fusedcomm": about}}


def _header(thread: int, event: str, **args: object) -> dict:
    return {"ph": "M", "tid": thread, "name": event, "args": args}


def times(begin_ns: int, end_ns: int) -> dict[str, float]:
    """An event's times in microseconds, of whole nanoseconds: all that Perfetto keeps."""
    return {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}


def lanes(events: Sequence[dict]) -> list[list[dict]]:
    """The events in lanes within which they do not even touch, in the order of time; at least one lane, maybe empty.

    Each event is in the first lane that is free.
    """

    def times_ns(event: dict) -> tuple[int, int]:
        return round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)

    in_lanes: list[list[dict]] = [[]]
    ends = [-math.inf]
    for event in sorted(events, key=times_ns):
        begin, end = times_ns(event)
        lane = next((index for index, before in enumerate(ends) if before < begin), len(ends))
        if lane == len(ends):
            in_lanes.append([])
            ends.append(-math.inf)
        in_lanes[lane].append(event)
        ends[lane] = end
    return in_lanes


def _name(span: "_C.TraceSpan") -> str:
    if span.stage == "exposed":
        return f"step {span.step}"
    return span.bucket if span.stage == "bucket" else f"{span.bucket} {span.stage}"


def write(path: Path, document: dict[str, object]) -> None:
    files.write_text(path, json.dumps(document) + "\n")
