"""The timeline of all ranks: clocks aligned by collectives, the stages of every rank, and the exposed time of steps."""

import contextlib
import dataclasses
import functools
import itertools
import json
import random
import warnings
from pathlib import Path

import pytest
import torch
import traces
from models import Gradients, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Chunks, Config
from fusedcomm.trace import document as trace
from fusedcomm.trace import merge as timeline

SHAPES = ((300, 50), (20, 30), (4000,))


TWO_SHOT = Config("int8", sum="two-shot", chunks=Chunks(8192))


def traced(rank, world_size, path, config=TWO_SHOT, **kwargs):
    """Traces the third to the fifth of six steps. Returns the exposed times of all, and the number of chunks."""
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.01)
    comm = fusedcomm.attach(ddp, config)
    gradients = [torch.ones(shape) for shape in SHAPES]
    synchronize(ddp, gradients, steps=2)
    with comm.trace(path, **kwargs):
        synchronize(ddp, gradients, steps=3)
    synchronize(ddp, gradients)
    num_chunks = sum(row.num_chunks for row in comm.plan().buckets)
    return list(comm.session.synchronizer.stats().recent_exposed_ms), num_chunks


def traced_by_all(rank, world_size, path, hosts):
    return traced(rank, world_size, path, dataclasses.replace(TWO_SHOT, hosts=hosts), all_ranks=True)


def read(path):
    return json.loads(path.read_text())


def spans_of(document):
    """The events of buckets."""
    return [event for event in document["traceEvents"] if event["ph"] == "X" and event["cat"] != trace.MODEL]


def check_merged(document, world_size, tracks):
    events, about = spans_of(document), document["otherData"]["fusedcomm"]
    assert about["world_size"] == world_size == len(about["clock_uncertainty_us"])
    assert min(event["ts"] for event in document["traceEvents"] if event["ph"] == "X") == 0
    begins, ends = {}, {}
    for rank in range(world_size):
        own = [event for event in events if event["pid"] == rank]
        assert {event["args"]["stage"] for event in own} == {*tracks, "bucket", "exposed"}
        assert {event["args"]["step"] for event in own} == {2, 3, 4}
    for event in events:
        assert event["dur"] >= 0
        args = event["args"]
        # With sums on one level, all ranks take part in each collective.
        if "local all-to-all" not in tracks and args["stage"].startswith("all-"):
            key = (args["step"], args["bucket"], args["chunk"], args["stage"])
            begins.setdefault(key, []).append(event["ts"])
            ends.setdefault(key, []).append(event["ts"] + event["dur"])
    for key, begin in begins.items():
        assert len(begin) == world_size
        assert max(begin) <= min(ends[key]) + 1e-3  # no rank ends a collective before all have begun it
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"}
    assert names == {rank: f"fusedcomm rank {rank} of {world_size}" for rank in range(world_size)}


ONE_LEVEL = {"pack": "pack", "all-to-all": "wire", "reduce": "reduce", "all-gather": "wire", "unpack": "unpack"}
TWO_LEVELS = {
    "pack": "pack",
    "local all-to-all": "local wire",
    "local reduce": "local reduce",
    "all-to-all": "wire",
    "reduce": "reduce",
    "all-gather": "wire",
    "local all-gather": "local wire",
    "unpack": "unpack",
}
"""By stage of a chunk, in their order: the track."""


def check_order(events, tracks, num_chunks):
    """Whether a rank's events show each stage of each chunk, one after another, within its bucket."""
    chunks = {}
    for event in events:
        args = event["args"]
        chunks.setdefault((args["step"], args["bucket"], args["chunk"]), {})[args["stage"]] = event
    assert len(chunks) == 3 * num_chunks
    for (_, _, chunk), stages in chunks.items():
        bucket = stages.pop("bucket", None)
        exposed = stages.pop("exposed", bucket)  # only the last bucket of a step has this stage
        assert {stage: event["track"] for stage, event in stages.items()} == tracks
        for before, after in itertools.pairwise(tracks):
            assert stages[before]["ts"] + stages[before]["dur"] <= stages[after]["ts"] + 1e-3
        if chunk == 0:  # the bucket's own span
            assert bucket["ts"] <= stages["pack"]["ts"] and bucket["track"] == "bucket"
            assert bucket["ts"] + bucket["dur"] >= stages["unpack"]["ts"] + stages["unpack"]["dur"]
            assert "weights." in bucket["args"]["bucket"]
            assert (exposed["ts"], exposed["dur"]) == (bucket["ts"], bucket["dur"])


@pytest.mark.parametrize(
    ("world_size", "hosts", "tracks"),
    # Of the four, ranks 0 and 3 share no collective: their clocks are aligned through rank 1 or 2.
    [(3, None, ONE_LEVEL), (4, [[0, 2], [1, 3]], TWO_LEVELS)],
    ids=str,
)
def test_one_trace_of_all_ranks(ranks, tmp_path, world_size, hosts, tracks):
    path = tmp_path / "trace.json"
    exposed_ms, (num_chunks, *_) = zip(*ranks.run(traced_by_all, str(path), hosts, world_size=world_size), strict=True)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    document = read(path)
    check_merged(document, world_size, tracks)
    for rank in range(world_size):
        check_order([event for event in traces.read(path) if event["pid"] == rank], tracks, num_chunks)
    # The ranks run on one machine and began to trace within a step of each other.
    about = document["otherData"]["fusedcomm"]
    assert about["clock_uncertainty_us"][0] == 0 and max(about["clock_uncertainty_us"]) < 50_000
    for rank in range(world_size):
        exposed = [e for e in spans_of(document) if e["pid"] == rank and e["args"]["stage"] == "exposed"]
        exposed.sort(key=lambda event: event["ts"])
        assert [event["name"] for event in exposed] == ["step 2", "step 3", "step 4"]
        # There were six steps, and the third to the fifth were traced.
        assert [event["dur"] / 1e3 for event in exposed] == pytest.approx(exposed_ms[rank][2:5], rel=1e-4, abs=1e-3)


def simulated(num_ranks, num_steps, clocks, seed, rates=None):
    """The documents of ranks that take part in simulated all-reduces. `clocks`: offset of each rank's clock from the
    true time, in microseconds; `rates`: speed of each rank's clock."""
    generator = random.Random(seed)
    documents, now = [], 1000.0
    events = [[] for _ in range(num_ranks)]
    for step in range(num_steps):
        begin = [now + generator.uniform(0, 500) for _ in range(num_ranks)]
        end = [max(begin) + generator.uniform(5, 300) for _ in range(num_ranks)]
        now = max(end)
        for rank in range(num_ranks):
            rate = rates[rank] if rates else 1.0
            args = {"bucket": "bucket 0 (a)", "stage": "all-reduce", "step": step, "chunk": 0}
            ts = begin[rank] * rate - clocks[rank]
            events[rank].append(
                {
                    "ph": "X",
                    "cat": "fusedcomm",
                    "pid": rank,
                    "tid": 0,
                    "ts": ts,
                    "dur": (end[rank] - begin[rank]) * rate,
                    "args": args,
                }
            )
    for rank in range(num_ranks):
        about = {"version": "0", "rank": rank, "world_size": num_ranks, "host": rank, "place": 0}
        documents.append({"traceEvents": events[rank], "otherData": {"fusedcomm": about}})
    return documents


@pytest.mark.parametrize("seed", range(5))
def test_true_offsets_lie_within_the_stated_uncertainty(seed):
    generator = random.Random(seed)
    clocks = [0.0] + [generator.uniform(-1e7, 1e7) for _ in range(6)]
    offsets, uncertainties = timeline.clock_offsets(simulated(7, 40, clocks, seed))
    assert offsets[0] == uncertainties[0] == 0
    for found, true, uncertainty in zip(offsets[1:], clocks[1:], uncertainties[1:], strict=True):
        assert abs(found - true) <= uncertainty + 1e-6
        assert uncertainty < 100  # 40 collectives bound it more tightly than one delay of up to 300 µs


def test_clocks_of_different_rates_are_still_aligned_nearly(seed=3):
    rates = [1.0, 1.001, 0.999]  # much worse than real clocks: 100 ms of error in 100 s
    documents = simulated(3, 500, [0.0, 0.0, 0.0], seed, rates)
    offsets, uncertainties = timeline.clock_offsets(documents)
    length = max(event["ts"] for event in spans_of(documents[0]))
    for offset, uncertainty in zip(offsets[1:], uncertainties[1:], strict=True):
        assert 0 < uncertainty < 0.01 * length and abs(offset) < 0.002 * length


def test_a_rank_without_a_common_collective_is_not_aligned():
    documents = simulated(2, 3, [0.0, 50.0], 0)
    for event in spans_of(documents[1]):
        event["args"]["stage"] = "pack"
    assert timeline.clock_offsets(documents) == ([0.0, 0.0], [0.0, float("inf")])
    merged = timeline.merge(documents)
    assert merged["otherData"]["fusedcomm"]["clock_uncertainty_us"] == [0.0, None]
    json.loads(json.dumps(merged, allow_nan=False))


# ---- what goes wrong while tracing


def leaves_with_an_error(comm, step, rank, path):
    with comm.trace(path, all_ranks=True):
        step()
        if rank == 1:
            raise KeyError("lost")


def has_no_document(comm, step, rank, path):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(trace, "document", lambda *arguments: 1 / 0)
        with comm.trace(path, all_ranks=True):
            step()


def writes_into_a_folder(comm, step, rank, path):
    path.parent.mkdir(exist_ok=True)
    try:
        with comm.trace(path.parent, all_ranks=True):
            step()
    except OSError:
        step()  # the other ranks are in this step
        raise


def has_a_full_disk(comm, step, rank, path):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "write", fail)
        with comm.trace(path):
            step()


HAS_NONE = "RuntimeError: fusedcomm: rank 1 has no trace: "
WRONG = {
    leaves_with_an_error: [HAS_NONE + "KeyError('lost')", "KeyError: 'lost'", None],
    has_no_document: [
        HAS_NONE + "ZeroDivisionError('division by zero')",
        "ZeroDivisionError: division by zero",
        None,
    ],
    writes_into_a_folder: [
        "IsADirectoryError: [Errno 21] it is a folder, and a file is wanted: '{path}'",
        None,
        None,
    ],
    has_a_full_disk: ["fusedcomm: the trace was not written: [Errno 28] No space left on device", None, None],
}
"""By what goes wrong: each rank's error or warning."""


def goes_wrong(rank, world_size, folder):
    """A rank's error or warning for each way. After it, another trace is taken."""
    found = []
    ddp = DistributedDataParallel(Gradients((50,)))
    comm = fusedcomm.attach(ddp)
    step = functools.partial(synchronize, ddp, [torch.ones(50)])
    for way in WRONG:
        path = folder / way.__name__ / "trace.json"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                way(comm, step, rank, path)
                error = str(caught[0].message) if caught else None
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
        found.append(error)
        with comm.trace(path, all_ranks=True):
            step()
    return found


def test_what_goes_wrong_is_named_and_ends_neither_training_nor_tracing(ranks, subtests, tmp_path):
    for way, *found in zip(WRONG, *ranks.run(goes_wrong, tmp_path, world_size=3), strict=True):
        with subtests.test(way=way.__name__):
            path = tmp_path / way.__name__
            assert found == [text and text.format(path=path) for text in WRONG[way]]
            assert [each.name for each in path.iterdir()] == ["trace.json"]
            assert {event["pid"] for event in spans_of(read(path / "trace.json"))} == {0, 1, 2}


def alone_first(rank, world_size, path):
    """First only rank 0 traces, with and without a field for the rank in the path. Then all ranks trace."""
    ddp = DistributedDataParallel(Gradients((50,)))
    comm = fusedcomm.attach(ddp)
    for own in (f"{path}-alone.json", f"{path}-alone-{{rank}}.json"):
        with comm.trace(own) if rank == 0 else contextlib.nullcontext():
            synchronize(ddp, [torch.ones(50)])
    for options in ({"all_ranks": True}, {}):
        with comm.trace(path + ("" if options else "-{rank}.json"), **options):
            synchronize(ddp, [torch.ones(50)])


def test_a_trace_of_one_rank_leaves_those_of_all_as_they_are(ranks, tmp_path):
    path = tmp_path / "trace"
    ranks.run(alone_first, str(path), world_size=3)
    assert {event["pid"] for event in spans_of(read(path))} == {0, 1, 2}
    for rank in range(3):
        assert {event["pid"] for event in spans_of(read(Path(f"{path}-{rank}.json")))} == {rank}
