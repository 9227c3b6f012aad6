"""A timeline of buckets and stages in the Chrome trace format, which ui.perfetto.dev and chrome://tracing read.

One rank's document; fusedcomm/trace/merge.py makes one of all ranks' documents.
"""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusedcomm.version import __version__

if TYPE_CHECKING:
    from fusedcomm.native import _C

RANK_FIELD = "{rank}"
"""In a path it is replaced by the rank, so that every rank writes a file of its own."""

ABOUT = "fusedcomm"
"""The key in "otherData" under which a document describes itself; see :func:`document`."""

# One track for each stage, in the order in which a bucket passes them. All collectives share the wire's track.
_TRACKS = ("exposed", "bucket", "pack", "wire", "reduce", "unpack")
_TRACK_OF_STAGE = {"all-to-all": "wire", "all-gather": "wire", "all-reduce": "wire"}

# Further tracks of sums on two levels.
_LOCAL_TRACKS = ("local wire", "local reduce")
_TRACK_OF_STAGE.update({"local all-to-all": "local wire", "local all-gather": "local wire"})


def path_for(path: str | Path, rank: int) -> Path | None:
    """The file that `rank` writes. None if it writes none: without ``{rank}`` in the path only rank 0 writes."""
    if RANK_FIELD in str(path):
        return Path(str(path).replace(RANK_FIELD, str(rank)))
    return Path(path) if rank == 0 else None


def document(
    spans: Sequence["_C.TraceSpan"], rank: int, world_size: int, run: str, place: tuple[int, int]
) -> dict[str, object]:
    """One rank's trace: the spans as Chrome's complete events, in microseconds since this rank's trace began.

    Args:
        run: names the trace: the same on every rank, and different for every trace.
        place: this rank's host and its place on that host. On one level every rank is a host.
    """
    name = f"fusedcomm rank {rank} of {world_size}"
    events = [
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": rank}},
    ]
    tracks = [*_TRACKS, *(_LOCAL_TRACKS if any(span.stage == "local reduce" for span in spans) else ())]
    for index, track in enumerate(tracks):
        events.append({"ph": "M", "pid": rank, "tid": index, "name": "thread_name", "args": {"name": track}})
        events.append(
            {"ph": "M", "pid": rank, "tid": index, "name": "thread_sort_index", "args": {"sort_index": index}}
        )
    for span in spans:
        events.append(
            {
                "ph": "X",
                "pid": rank,
                "tid": tracks.index(_TRACK_OF_STAGE.get(span.stage, span.stage)),
                "name": _name(span),
                "cat": "fusedcomm",
                "ts": span.begin_ms * 1e3,
                "dur": (span.end_ms - span.begin_ms) * 1e3,
                "args": {"bucket": span.text, "stage": span.stage, "step": span.step, "chunk": span.chunk},
            }
        )
    about = {
        "version": __version__,
        "run": run,
        "rank": rank,
        "world_size": world_size,
        "host": place[0],
        "place": place[1],
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {ABOUT: about}}


def _name(span: "_C.TraceSpan") -> str:
    if span.stage == "exposed":
        return f"step {span.step}"
    return span.bucket if span.stage == "bucket" else f"{span.bucket} {span.stage}"


def check(path: Path) -> None:
    """Makes the folder of `path`. Raises OSError if `path` cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a trace is a file, and this is a folder", str(path))
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(errno.EACCES, "a trace cannot be written there", str(path))


def write(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document) + "\n")
