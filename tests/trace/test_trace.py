"""``comm.trace``: which ranks write, and the tracks that Perfetto shows. Stages and their order: test_timeline.py."""

import json

import pytest
import torch
from test_timeline import traced
from torch.nn.parallel import DistributedDataParallel
from traces import complete_events, dropped, read

import fusedcomm
from fusedcomm.config import Chunks, Config
from fusedcomm.trace import document as trace


def test_without_a_field_for_the_rank_only_rank_0_writes(ranks, tmp_path):
    ranks.run(traced, str(tmp_path / "trace.json"), Config("fp32"), world_size=2)
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
