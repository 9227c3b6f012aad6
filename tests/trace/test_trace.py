"""``comm.trace``: a timeline that Perfetto reads, with every stage of every bucket in order."""

import itertools
import json

import pytest
import torch
from models import Gradients, synchronize
from torch.nn.parallel import DistributedDataParallel
from traces import complete_events, dropped, read

import fusedcomm
from fusedcomm.config import Chunks, Config
from fusedcomm.trace import document as trace

SHAPES = ((300, 50), (20, 30), (4000,))


def traced(rank, world_size, config, path):
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.01)
    comm = fusedcomm.attach(ddp, config)
    gradients = [torch.ones(shape) for shape in SHAPES]
    synchronize(ddp, gradients, steps=2)
    with comm.trace(path):
        synchronize(ddp, gradients, steps=3)
    synchronize(ddp, gradients)
    return sum(row.num_chunks for row in comm.plan().buckets)


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


@pytest.mark.parametrize(
    ("world_size", "hosts", "tracks"), [(2, None, ONE_LEVEL), (4, [[0, 1], [2, 3]], TWO_LEVELS)], ids=str
)
def test_each_stage_of_each_chunk_is_shown_in_order(ranks, tmp_path, world_size, hosts, tracks):
    config = Config("int8", sum="two-shot", chunks=Chunks(8192), hosts=hosts)
    (num_chunks, *_) = ranks.run(traced, config, str(tmp_path / "trace-{rank}.json"), world_size=world_size)
    for rank in range(world_size):
        events = read(tmp_path / f"trace-{rank}.json")
        assert {event["pid"] for event in events} == {rank}
        chunks = {}
        for event in events:
            assert event["dur"] >= 0
            args = event["args"]
            chunks.setdefault((args["step"], args["bucket"], args["chunk"]), {})[args["stage"]] = event
        assert {step for step, _, _ in chunks} == {2, 3, 4} and len(chunks) == 3 * num_chunks
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


def test_without_a_field_for_the_rank_only_rank_0_writes(ranks, tmp_path):
    ranks.run(traced, Config("fp32"), str(tmp_path / "trace.json"), world_size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    stages = {event["args"]["stage"] for event in read(tmp_path / "trace.json")}
    assert stages == {"pack", "all-reduce", "bucket", "exposed"}


# ---- tracks


class Layers(torch.nn.Module):
    """Three layers, each with a bucket of its own."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


def of_buckets_in_flight(rank, world_size, path, store_path):
    """Before rank 0 has handed over all its buckets but the last, the others have handed over none."""
    ddp = DistributedDataParallel(Layers(), bucket_cap_mb=0.01)
    comm = fusedcomm.attach(ddp, Config("int8", sum="two-shot", chunks=Chunks(4096, in_flight=4)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(2):
        ddp(torch.ones(2, 60)).sum().backward()
    store = torch.distributed.FileStore(store_path, world_size)
    step = 0
    if rank == 0:
        ddp.module.layers[0].weight.register_hook(lambda gradient: store.set(f"handed over {step}", "all but one"))
    with comm.trace(path, all_ranks=True):
        for step in range(2):
            loss = ddp(torch.ones(2, 60)).sum()
            if rank > 0:
                store.wait([f"handed over {step}"])
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_span_is_lost_because_it_overlaps_another(ranks, tmp_path, world_size):
    path = tmp_path / "trace.json"
    ranks.run(of_buckets_in_flight, str(path), str(tmp_path / "store"), world_size=world_size)
    events = complete_events(path)
    assert {event["pid"] for event in events} == set(range(world_size))
    assert dropped(events) == []
    # On one thread for each track, which would be simpler, buckets and collectives would be lost.
    lost = dropped(events, thread="track")
    assert len([event for event in lost if event["pid"] == 0 and event["track"] == "bucket"]) >= 2
    headers = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "M"]
    for rank in range(world_size):
        of_rank = [e for e in headers if e["pid"] == rank]
        names = {e["tid"]: e["args"]["name"] for e in of_rank if e["name"] == "thread_name"}
        places = {e["tid"]: e["args"]["sort_index"] for e in of_rank if e["name"] == "thread_sort_index"}
        assert names.keys() == places.keys() and rank not in names
        in_order = [names[thread] for thread in sorted(places, key=places.get)]
        tracks = [name.partition(trace.LANE)[0] for name in in_order]
        assert list(dict.fromkeys(tracks)) == ["model", "exposed", "bucket", "pack", "wire", "reduce", "unpack"]
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
