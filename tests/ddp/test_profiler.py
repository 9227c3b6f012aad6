"""torch.profiler sees each bucket and each of its stages, on the engine's threads, too."""

import collections

import pytest
import torch
from models import Gradients, synchronize
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fusedcomm
from fusedcomm.config import Chunks, Config

SHAPES = ((300, 50), (20, 30), (4000,))
NUM_STEPS = 3


def profiled_steps(rank, world_size, config, dtype=torch.float32):
    """(name, is_async, begin, end, thread, shapes) of the profiler's events of buckets in NUM_STEPS steps, and the
    numbers of elements and of chunks of each bucket. Steps before and after these are not profiled."""
    ddp = DistributedDataParallel(Gradients(*SHAPES, dtype=dtype), bucket_cap_mb=0.01)
    comm = fusedcomm.attach(ddp, config, quiet=True)
    gradients = [torch.ones(shape, dtype=dtype) for shape in SHAPES]
    synchronize(ddp, gradients, steps=2)
    for _ in range(2):  # the second profiler sees nothing of the first one's steps
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            synchronize(ddp, gradients, steps=NUM_STEPS)
        synchronize(ddp, gradients)
    buckets = [(row.grad_nbytes // dtype.itemsize, max(1, row.num_chunks)) for row in comm.plan().buckets]
    events = [
        (event.name, event.is_async, event.time_range.start, event.time_range.end, event.thread, event.input_shapes)
        for event in profiler.events()
        if event.name.startswith(("fusedcomm/", "gloo:"))
    ]
    return events, buckets


# A configuration for each sum, and its stages.
SUMS = {
    "exact": (Config("fp32"), ["pack", "all-reduce"]),
    "direct": (Config("bf16", "direct", chunks=Chunks(8192)), ["pack", "all-reduce", "unpack"]),
    "one-shot": (Config("int8", "one-shot", chunks=Chunks(8192)), ["pack", "all-gather", "unpack"]),
    "two-shot": (
        Config("int8", "two-shot", chunks=Chunks(8192)),
        ["pack", "all-to-all", "reduce", "all-gather", "unpack"],
    ),
}


def counts_by_stage(events):
    """The number of events by stage and bucket. Their names are "fusedcomm/<bucket>/<stage>"."""
    counts = {}
    for name, *_ in events:
        if name != "gloo:all_reduce":
            product, bucket, stage = name.split("/")
            assert product == "fusedcomm"
            counts.setdefault(stage, collections.Counter())[bucket] += 1
    return counts


@pytest.mark.parametrize("sum", SUMS)
def test_the_profiler_sees_every_bucket_and_stage_by_name(ranks, sum):
    config, stages = SUMS[sum]
    for events, buckets in ranks.run(profiled_steps, config, world_size=2):
        sums = [event for event in events if event[0] == "gloo:all_reduce"]
        assert all(is_async for _, is_async, *_ in sums)
        assert sorted(shapes[0] for *_, shapes in sums) == sorted(NUM_STEPS * [[numel] for numel, _ in buckets])
        counts = counts_by_stage(events)
        assert counts.keys() == set(stages)
        for of_buckets in counts.values():
            assert [of_buckets[name] for name in sorted(of_buckets)] == [NUM_STEPS * chunks for _, chunks in buckets]
        for name, is_async, begin, end, _, _ in events:
            assert begin <= end
            assert is_async or not name.rpartition("/")[2].startswith("all-")
            # Each stage lies within a sum. The profiler's times are whole or rounded microseconds.
            assert any(first - 1 <= begin and end <= last + 1 for _, _, first, last, _, _ in sums)
        threads = {stage: {event[4] for event in events if event[0].endswith(f"/{stage}")} for stage in stages}
        assert len(threads["pack"]) == 1  # the thread that packs
        assert threads["pack"].isdisjoint({event[4] for event in sums})  # which are handed over on another one


def test_the_profiler_sees_buckets_that_the_codec_does_not_carry(ranks):
    for events, buckets in ranks.run(profiled_steps, Config("int8"), torch.float64, world_size=2):
        assert [name for name, *_ in events].count("gloo:all_reduce") == NUM_STEPS * len(buckets)
        assert list(counts_by_stage(events)["all-reduce"].values()) == [NUM_STEPS] * len(buckets)
