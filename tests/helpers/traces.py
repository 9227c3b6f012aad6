"""Reads the files that Handle.trace() writes."""

import json


def read(path):
    document = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    return [{**e, "track": names[e["tid"]]} for e in document["traceEvents"] if e["ph"] == "X"]
