"""torch.profiler sees each bucket, as it sees DDP's own all-reduce."""

import pytest
import torch
from models import Gradients, synchronize
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fusedcomm
from fusedcomm.config import Chunks, Config

SHAPES = ((300, 50), (20, 30), (4000,))
NUM_STEPS = 3


def profiled_steps(rank, world_size, config, dtype):
    """(is_async, thread, shapes) of the profiler's events of buckets in NUM_STEPS steps, and the numbers of elements of
    each bucket. Steps before and after these are not profiled."""
    ddp = DistributedDataParallel(Gradients(*SHAPES, dtype=dtype), bucket_cap_mb=0.01)
    comm = fusedcomm.attach(ddp, config, quiet=True)
    gradients = [torch.ones(shape, dtype=dtype) for shape in SHAPES]
    synchronize(ddp, gradients, steps=2)
    for _ in range(2):  # the second profiler sees nothing of the first one's steps
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            synchronize(ddp, gradients, steps=NUM_STEPS)
        synchronize(ddp, gradients)
    sums = [event for event in profiler.events() if event.name == "gloo:all_reduce"]
    assert all(event.time_range.start <= event.time_range.end for event in sums)
    numels = [row.grad_nbytes // dtype.itemsize for row in comm.plan().buckets]
    return [(event.is_async, event.thread, event.input_shapes) for event in sums], numels


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (Config("fp32"), torch.float32),
        (Config("bf16", "direct"), torch.float32),
        (Config("int8", "one-shot", chunks=Chunks(8192)), torch.float32),
        (Config("int8", "two-shot", chunks=Chunks(8192)), torch.float32),
        (Config("int8"), torch.float64),  # which the codec does not carry
    ],
    ids=str,
)
def test_the_profiler_sees_every_bucket_by_name(ranks, config, dtype):
    for sums, numels in ranks.run(profiled_steps, config, dtype, world_size=2):
        assert all(is_async for is_async, *_ in sums) and len({thread for _, thread, _ in sums}) == 1
        assert sorted(shapes[0] for *_, shapes in sums) == sorted(NUM_STEPS * [[numel] for numel in numels])
