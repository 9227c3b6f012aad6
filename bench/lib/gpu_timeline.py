"""What a profiled step on a GPU did that a steady step should not do, and how much of communication it hid."""

import json
import os
import tempfile
from collections.abc import Callable, Iterable

import torch

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cuStreamSynchronize", "cuEventSynchronize")
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaMallocAsync", "cudaHostAlloc", "cuMemAlloc", "cuMemCreate")
COMMUNICATION = ("nccl", "pack_kernel", "reduce_kernel", "unpack_kernel")
"""What the names of kernels that communicate have in them; `unpack_kernel` and `pack_kernel` are fusedcomm's."""

Span = tuple[float, float]
"""Begin and end, in µs."""


def events_of(function: Callable[[], object]) -> list[dict]:
    """The events of a call, of a Chrome trace by torch.profiler."""
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            return json.load(file)["traceEvents"]


def figures_of(events: Iterable[dict]) -> dict[str, float]:
    """The figures of one step; empty if no kernel is in it.

    Returns:
        host_waits: calls that wait for a stream or an event. The one that ends the measured step is a wait for the
            whole device, and does not count.
        allocations: calls that get memory from the driver or give it back.
        hidden: part of the time of communication in which another kernel ran. Absent if nothing communicated.
    """
    kernels, calls = [], []
    for event in events:
        if event.get("cat") == "kernel":
            kernels.append(event)
        elif event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls.append(event["name"])
    if not kernels:
        return {}
    found = {
        "host_waits": float(sum(name in WAITS for name in calls)),
        "allocations": float(sum(name in ALLOCATIONS for name in calls)),
    }
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in kernels:
        communicates = any(part in event["name"].lower() for part in COMMUNICATION)
        spans[communicates].append((event["ts"], event["ts"] + event["dur"]))
    communication = merged(spans[True])
    if total := sum(end - begin for begin, end in communication):
        found["hidden"] = overlap(communication, merged(spans[False])) / total
    return found


def merged(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, those that touch made one."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def overlap(ones: list[Span], others: list[Span]) -> float:
    """The time that is in both; each has merged spans."""
    shared = 0.0
    for begin, end in ones:
        shared += sum(max(0.0, min(end, other[1]) - max(begin, other[0])) for other in others)
    return shared
