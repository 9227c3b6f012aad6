"""Reads the files that Handle.trace() writes."""

import json
from pathlib import Path

from fusedcomm.trace import LANE


def read(path: Path) -> list[dict]:
    """The events of buckets and stages, each with its "lane" and "track"."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [{**e, "lane": names[e["pid"], e["tid"]]} for e in events if e["ph"] == "X"]
    return [{**e, "track": e["lane"].partition(LANE)[0]} for e in found]


def dropped(events: list[dict], thread: str = "tid") -> list[dict]:
    """The events that Perfetto leaves out: they begin within another event of their thread and end after it.

    Args:
        thread: the field that tells the threads of a process apart.
    """
    found, under_way = [], {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        ends = under_way.setdefault((event["pid"], event[thread]), [])
        while ends and ends[-1] <= begin:
            ends.pop()
        if ends and end > ends[-1]:
            found.append(event)
        else:
            ends.append(end)
    return found
