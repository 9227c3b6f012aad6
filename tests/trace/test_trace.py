"""``comm.trace``: which ranks write, the stages of a rank and their order, and the tracks that Perfetto shows."""

import contextlib
import dataclasses
import itertools
import json
import warnings

import pytest
import torch
from models import Gradients, synchronize
from torch.nn.parallel import DistributedDataParallel
from traces import dropped, read

import fusedcomm
from fusedcomm import trace
from fusedcomm.config import Chunks, Config

SHAPES = ((300, 50), (20, 30), (4000,))
TWO_SHOT = Config("int8", sum="two-shot", chunks=Chunks(8192))


def traced(rank, world_size, path, config):
    """Traces the third to the fifth of six steps. Returns the exposed times of all, and the number of chunks."""
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.01)
    comm = fusedcomm.attach(ddp, config)
    gradients = [torch.ones(shape) for shape in SHAPES]
    synchronize(ddp, gradients, steps=2)
    with comm.trace(path):
        synchronize(ddp, gradients, steps=3)
    synchronize(ddp, gradients)
    num_chunks = sum(row.num_chunks for row in comm.plan().buckets)
    return list(comm.session.synchronizer.stats().recent_exposed_ms), num_chunks


def test_without_a_field_for_the_rank_only_rank_0_writes(ranks, tmp_path):
    ranks.run(traced, str(tmp_path / "trace.json"), Config("fp32"), world_size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    stages = {event["args"]["stage"] for event in read(tmp_path / "trace.json")}
    assert stages == {"pack", "all-reduce", "bucket", "exposed"}


# ---- stages


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
    ("world_size", "hosts", "tracks"), [(3, None, ONE_LEVEL), (4, [[0, 2], [1, 3]], TWO_LEVELS)], ids=str
)
def test_a_trace_of_each_rank(ranks, tmp_path, world_size, hosts, tracks):
    config = dataclasses.replace(TWO_SHOT, hosts=hosts)
    of_ranks = ranks.run(traced, str(tmp_path / "{rank}.json"), config, world_size=world_size)
    for rank, (exposed_ms, num_chunks) in enumerate(of_ranks):
        document, events = json.loads((tmp_path / f"{rank}.json").read_text()), read(tmp_path / f"{rank}.json")
        assert document["otherData"]["fusedcomm"]["world_size"] == world_size
        assert {event["pid"] for event in events} == {rank} and {event["args"]["step"] for event in events} == {2, 3, 4}
        check_order(events, tracks, num_chunks)
        exposed = [event for event in events if event["args"]["stage"] == "exposed"]
        exposed.sort(key=lambda event: event["ts"])
        assert [event["name"] for event in exposed] == ["step 2", "step 3", "step 4"]
        # There were six steps, and the third to the fifth were traced.
        assert [event["dur"] / 1e3 for event in exposed] == pytest.approx(exposed_ms[2:5], rel=1e-4, abs=1e-3)


# ---- what goes wrong while tracing


def goes_wrong(rank, world_size, folder):
    """The error of a trace that cannot be written, and the warning of one that could not. Then a trace is taken."""
    ddp = DistributedDataParallel(Gradients((50,)))
    comm = fusedcomm.attach(ddp)
    with pytest.raises(IsADirectoryError) as raised, comm.trace(f"{folder}/{{rank}}"):
        pass

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(trace, "write", fail)
        with comm.trace(folder / str(rank) / "full-{rank}.json"):
            synchronize(ddp, [torch.ones(50)])
    with contextlib.suppress(KeyError), comm.trace(folder / str(rank) / "left-{rank}.json"):
        synchronize(ddp, [torch.ones(50)])
        raise KeyError
    with comm.trace(folder / str(rank) / "{rank}.json"):
        synchronize(ddp, [torch.ones(50)])
    return str(raised.value), [str(each.message) for each in caught]


def test_what_goes_wrong_is_named_and_ends_neither_training_nor_tracing(ranks, tmp_path):
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for rank, (error, warned) in enumerate(ranks.run(goes_wrong, tmp_path, world_size=2)):
        assert error == f"[Errno 21] it is a folder, and a file is wanted: '{tmp_path / str(rank)}'"
        assert warned == ["fusedcomm: the trace was not written: [Errno 28] No space left on device"]
        # What an exception leaves is not written, and ends there.
        assert [path.name for path in (tmp_path / str(rank)).iterdir()] == [f"{rank}.json"]
        assert len({event["args"]["step"] for event in read(tmp_path / str(rank) / f"{rank}.json")}) == 1


# ---- tracks


def of_buckets_in_flight(rank, world_size, path, store_path):
    """Before rank 0 has handed over all its buckets but the last, the others have handed over none."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(3)))
    ddp = DistributedDataParallel(layers, bucket_cap_mb=0.01)  # each layer has a bucket of its own
    comm = fusedcomm.attach(ddp, Config("int8", sum="two-shot", chunks=Chunks(4096, in_flight=4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        ddp(torch.ones(2, 60)).sum().backward()
    store = torch.distributed.FileStore(store_path, world_size)
    step = 0
    if rank == 0:
        ddp.module[0].weight.register_hook(lambda gradient: store.set(f"handed over {step}", "all but one"))
    with comm.trace(path):
        for step in range(2):
            loss = ddp(torch.ones(2, 60)).sum()
            if rank > 0:
                store.wait([f"handed over {step}"])
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_span_is_lost_because_it_overlaps_another(ranks, tmp_path, world_size):
    paths = [tmp_path / f"{rank}.json" for rank in range(world_size)]
    ranks.run(of_buckets_in_flight, str(tmp_path / "{rank}.json"), str(tmp_path / "store"), world_size=world_size)
    events = [event for path in paths for event in read(path)]
    assert {event["pid"] for event in events} == set(range(world_size))
    assert dropped(events) == []
    # On one thread for each track, which would be simpler, buckets and collectives would be lost.
    lost = dropped(events, thread="track")
    assert len([event for event in lost if event["pid"] == 0 and event["track"] == "bucket"]) >= 2
    for rank, path in enumerate(paths):
        of_rank = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "M"]
        assert {e["pid"] for e in of_rank} == {rank}
        names = {e["tid"]: e["args"]["name"] for e in of_rank if e["name"] == "thread_name"}
        places = {e["tid"]: e["args"]["sort_index"] for e in of_rank if e["name"] == "thread_sort_index"}
        assert names.keys() == places.keys() and rank not in names
        in_order = [names[thread] for thread in sorted(places, key=places.get)]
        tracks = [name.partition(trace.LANE)[0] for name in in_order]
        assert list(dict.fromkeys(tracks)) == ["exposed", "bucket", "pack", "wire", "reduce", "unpack"]
        for track in set(tracks):
            numbers = [name for name in in_order if name.partition(trace.LANE)[0] == track]
            assert numbers == [track, *(f"{track}{trace.LANE}{index}" for index in range(2, len(numbers) + 1))]


def spans_of(*times):
    return [{"ts": float(begin), "dur": float(end - begin), "pid": 0, "tid": 0} for begin, end in times]


def test_each_event_is_in_the_first_lane_that_is_free():
    lanes = trace.lanes(spans_of((20, 30), (0, 10), (5, 40), (10, 15), (41, 42), (11, 12)))
    assert [[(event["ts"], event["dur"]) for event in lane] for lane in lanes] == [
        [(0, 10), (11, 1), (20, 10), (41, 1)],
        [(5, 35)],
        [(10, 5)],  # (0, 10) ends just then
    ]
    assert trace.lanes([]) == [[]]
