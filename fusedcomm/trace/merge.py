"""Merges all ranks' traces into one timeline. The ranks' clocks need not agree: their difference follows from the
collectives.

No rank's part in a collective can end before every rank of the collective has begun. Let o be the offset that is added
to a rank's times. Then for every collective and every two of its ranks a and b

    end_a + o_a ≥ begin_b + o_b    that is    o_b − o_a ≤ end_a − begin_b

The smallest right-hand side over all collectives is the length of an edge from a to b. The shortest paths from rank 0
are the largest possible offsets. The shortest paths to rank 0, negated, are the smallest. Both meet all inequalities,
and so does their mean, which is used. Half their difference is the most by which the mean can be wrong. (Medians would
be right more often if delays are symmetric, but they guarantee nothing: a collective could end before it begins.)
"""

import json
import zlib
from collections.abc import Sequence

import torch

from fusedcomm.ranks.bounded_store import BoundedStore
from fusedcomm.ranks.peers import Peers
from fusedcomm.trace import document as trace

_PIECE_NBYTES = 1 << 20
"""Most bytes of one value in the store. A TCPStore takes up to 8 MiB."""


# ---- clocks


def clock_offsets(documents: Sequence[dict]) -> tuple[list[float], list[float]]:
    """(offsets to rank 0's clock, their uncertainties), each by rank, in microseconds. Documents are in rank order.

    A rank has offset 0 and infinite uncertainty if no chain of collectives connects it with rank 0.
    """
    bounds = _bounds(documents)
    # If the clocks' rates differ, the bounds of a long trace contradict each other. They are then widened by `slack`
    # microseconds, which doubles until they do not.
    slack, largest, negated_smallest = 0.0, None, None
    while largest is None:
        largest, negated_smallest = (_shortest(paths + slack) for paths in (bounds, bounds.T))
        if largest[0] < 0 or negated_smallest[0] < 0 or (largest + negated_smallest < 0).any():
            slack, largest = max(1.0, 2 * slack), None
    known = largest.isfinite() & negated_smallest.isfinite()
    offsets = torch.where(known, (largest - negated_smallest) / 2, torch.zeros_like(largest))
    uncertainties = torch.where(known, (largest + negated_smallest) / 2, torch.full_like(largest, torch.inf))
    return offsets.tolist(), uncertainties.tolist()


def _shortest(edges: torch.Tensor) -> torch.Tensor:
    """Lengths of the shortest paths from node 0, float64 [n]; `edges`: float64 [n, n].

    The length to node 0 itself is 0. It is negative if a cycle of negative length leaves no shortest path.
    """
    distances = edges[0].clone()
    distances[0] = 0
    for _ in range(len(edges)):
        shorter = torch.minimum(distances, (distances[:, None] + edges).amin(0))
        if torch.equal(shorter, distances):
            return distances
        distances = shorter
    distances[0] = -torch.inf
    return distances


def _bounds(documents: Sequence[dict]) -> torch.Tensor:
    """float64 [n, n]; [a, b] is the least end_a − begin_b over all collectives of both ranks, infinite without one."""
    num_ranks = len(documents)
    bounds = torch.full((num_ranks, num_ranks), torch.inf, dtype=torch.float64)
    for times in _collectives(documents).values():
        ranks = torch.tensor([rank for rank, _, _ in times], dtype=torch.int64)
        begin = torch.tensor([begin for _, begin, _ in times], dtype=torch.float64)
        end = torch.tensor([end for _, _, end in times], dtype=torch.float64)
        index = (ranks[:, None], ranks[None, :])
        bounds[index] = torch.minimum(bounds[index], end[:, None] - begin[None, :])
    return bounds


def _collectives(documents: Sequence[dict]) -> dict[tuple, list[tuple[int, float, float]]]:
    """By collective: (rank, begin, end) of each rank that recorded it, in microseconds of the rank's clock."""
    collectives = {}
    for rank, document in enumerate(documents):
        about = document["otherData"][trace.ABOUT]
        spans = sorted((e for e in document["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"])
        of_two_levels = {_bucket_of(e) for e in spans if e["args"]["stage"] == "local all-to-all"}
        num_seen = {}
        for event in spans:
            stage = event["args"]["stage"]
            if stage.startswith("local all-"):
                group = ("host", about["host"])
            elif stage in ("all-to-all", "all-gather") and _bucket_of(event) in of_two_levels:
                group = ("place", about["place"])
            elif stage in ("all-to-all", "all-gather", "all-reduce"):
                group = ("all", 0)
            else:
                continue
            what = (*_bucket_of(event), event["args"]["chunk"], stage, *group)
            num_seen[what] = num_seen.get(what, 0) + 1
            times = (rank, event["ts"], event["ts"] + event["dur"])
            collectives.setdefault((*what, num_seen[what]), []).append(times)
    return collectives


def _bucket_of(event: dict) -> tuple[int, str]:
    return event["args"]["step"], event["args"]["bucket"]


# ---- one document


def merge(documents: Sequence[dict]) -> dict:
    """One document with a process for each rank. Times count from the first event of any rank.

    documents: of all ranks of one trace, in rank order; see :func:`fusedcomm.trace.document.document`.
    """
    offsets, uncertainties = clock_offsets(documents)
    abouts = [document["otherData"][trace.ABOUT] for document in documents]
    # Whole nanoseconds, as in the documents: events that do not touch before do not touch then.
    moved = [
        (event, [time + round(offset * 1e3) for time in trace.times_ns(event)])
        for document, offset in zip(documents, offsets, strict=True)
        for event in document["traceEvents"]
        if event["ph"] == "X"
    ]
    first = min((begin for _, (begin, _) in moved), default=0)
    spans = [{**event, **trace.times(begin - first, end - first)} for event, (begin, end) in moved]
    headers = []
    for rank, (document, uncertainty) in enumerate(zip(documents, uncertainties, strict=True)):
        headers += [event for event in document["traceEvents"] if event["ph"] != "X"]
        label = "reference clock" if rank == 0 else f"clock ± {uncertainty:.0f} µs"
        headers.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_labels", "args": {"labels": label}})
    about = {
        "version": abouts[0]["version"],
        "world_size": abouts[0]["world_size"],
        "clock_offset_us": offsets,
        # JSON has no infinity.
        "clock_uncertainty_us": [None if uncertainty == torch.inf else uncertainty for uncertainty in uncertainties],
    }
    return {"traceEvents": headers + spans, "displayTimeUnit": "ms", "otherData": {trace.ABOUT: about}}


# ---- from all ranks


def gather(peers: Peers, store: BoundedStore, document: dict | None, problem: str) -> list[dict] | None:
    """Every rank's document on rank 0, in rank order. None on the other ranks, which wait for no rank.

    Args:
        store: used by this call alone.
        document: this rank's. None if it has none, because of `problem`; rank 0 then raises that.
        problem: empty if there is a document.

    Raises:
        RuntimeError: on rank 0: a rank has no document, or did not send it within the group's timeout.
        PeerLostError: on rank 0: a rank that has not sent its document is lost.
    """
    text = json.dumps({"document": document, "problem": problem})
    packed = zlib.compress(text.encode())
    pieces = [packed[at : at + _PIECE_NBYTES] for at in range(0, len(packed), _PIECE_NBYTES)]
    for index, piece in enumerate(pieces):
        store.set(f"{peers.rank}/{index}", piece)
    store.set(f"{peers.rank}/count", str(len(pieces)))
    if peers.rank != 0:
        return None
    documents = []
    counts = {other: f"{other}/count" for other in range(peers.world_size)}
    missing = peers.wait(store, counts, "gathering the traces of all ranks")
    if missing:
        raise RuntimeError(
            f"fusedcomm: the traces of rank(s) {missing} did not arrive within {peers.timeout.total_seconds():.0f} s: "
            "with all_ranks=True every rank must trace"
        )
    for other in counts:
        keys = [f"{other}/{index}" for index in range(int(store.get(f"{other}/count")))]
        record = json.loads(zlib.decompress(b"".join(store.get(key) for key in keys)))
        for key in keys:
            store.delete_key(key)
        if record["problem"]:
            raise RuntimeError(f"fusedcomm: rank {other} has no trace: {record['problem']}")
        documents.append(record["document"])
    return documents
