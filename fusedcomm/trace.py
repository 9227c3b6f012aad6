"""A timeline of buckets and stages in the Chrome trace format, which ui.perfetto.dev and chrome://tracing read."""

import json
from collections.abc import Sequence
from pathlib import Path

from fusedcomm.native import _C

RANK_FIELD = "{rank}"
"""In a path: replaced by the rank, so that every rank writes a file of its own."""

# One track a stage, in the order of a bucket's way; both collectives of a two-shot share the wire.
_TRACKS = ("bucket", "pack", "wire", "reduce", "unpack")
_TRACK_OF_STAGE = {"all-to-all": "wire", "all-gather": "wire", "all-reduce": "wire"}

# Where sums have two levels.
_LOCAL_TRACKS = ("local wire", "local reduce")
_TRACK_OF_STAGE.update({"local all-to-all": "local wire", "local all-gather": "local wire"})


def path_for(path: str | Path, rank: int) -> Path | None:
    """Where `rank` writes; None if it does not: without ``{rank}`` in the path only rank 0 does."""
    if RANK_FIELD in str(path):
        return Path(str(path).replace(RANK_FIELD, str(rank)))
    return Path(path) if rank == 0 else None


def write(path: Path, spans: Sequence["_C.TraceSpan"], rank: int, world_size: int) -> None:
    """Writes the spans as complete events, times in microseconds since the trace began."""
    name = f"fusedcomm rank {rank} of {world_size}"
    events = [{"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": {"name": name}}]
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
                "name": span.bucket if span.stage == "bucket" else f"{span.bucket} {span.stage}",
                "cat": "fusedcomm",
                "ts": span.begin_ms * 1e3,
                "dur": (span.end_ms - span.begin_ms) * 1e3,
                "args": {"bucket": span.text, "stage": span.stage, "step": span.step, "chunk": span.chunk},
            }
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
