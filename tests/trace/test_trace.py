"""``comm.trace``: a timeline that Perfetto reads, with every stage of every bucket in order."""

import torch
from models import Gradients, synchronise
from torch.nn.parallel import DistributedDataParallel
from traces import read

import fusedcomm
from fusedcomm.config import Chunks, Config
from fusedcomm.trace import document as trace

SHAPES = ((300, 50), (20, 30), (4000,))


def traced(rank, world_size, wire, path, num_steps):
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.01)
    comm = fusedcomm.attach(ddp, Config(wire, sum="two-shot" if wire == "int8" else "exact", chunks=Chunks(8192)))
    gradients = [torch.ones(shape) for shape in SHAPES]
    synchronise(ddp, gradients, steps=2)
    with comm.trace(path):
        synchronise(ddp, gradients, steps=num_steps)
    synchronise(ddp, gradients)
    return [(row.sum, row.num_chunks) for row in comm.plan().buckets]


def test_a_two_shot_shows_each_stage_of_each_chunk_in_order(ranks, tmp_path):
    (buckets, _) = ranks.run(traced, "int8", str(tmp_path / "trace-{rank}.json"), 3, world_size=2)
    for rank in range(2):
        events = read(tmp_path / f"trace-{rank}.json")
        assert {event["pid"] for event in events} == {rank}
        chunks = {}
        for event in events:
            assert event["dur"] >= 0
            args = event["args"]
            chunks.setdefault((args["step"], args["bucket"], args["chunk"]), {})[args["stage"]] = event
        assert {step for step, _, _ in chunks} == {2, 3, 4}
        assert len(chunks) == 3 * sum(num_chunks for _, num_chunks in buckets)
        for (_, _, chunk), stages in chunks.items():
            bucket = stages.pop("bucket", None)
            exposed = stages.pop("exposed", bucket)  # only the last bucket of a step has this stage
            order = ["pack", "all-to-all", "reduce", "all-gather", "unpack"]
            assert set(stages) == set(order)
            assert [stages[stage]["track"] for stage in order] == ["pack", "wire", "reduce", "wire", "unpack"]
            for before, after in zip(order, order[1:], strict=False):
                assert stages[before]["ts"] + stages[before]["dur"] <= stages[after]["ts"] + 1e-3
            if chunk == 0:  # the bucket's own span
                assert bucket["ts"] <= stages["pack"]["ts"] and bucket["track"] == "bucket"
                assert bucket["ts"] + bucket["dur"] >= stages["unpack"]["ts"] + stages["unpack"]["dur"]
                assert "weights." in bucket["args"]["bucket"]
                assert (exposed["ts"], exposed["dur"]) == (bucket["ts"], bucket["dur"])


def test_without_a_field_for_the_rank_only_rank_0_writes(ranks, tmp_path):
    ranks.run(traced, "fp32", str(tmp_path / "trace.json"), 1, world_size=2)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    stages = {event["args"]["stage"] for event in read(tmp_path / "trace.json")}
    assert stages == {"pack", "all-reduce", "bucket", "exposed"}
    assert trace.path_for("t.json", 1) is None
    assert str(trace.path_for("{rank}/t.json", 12)) == "12/t.json"
