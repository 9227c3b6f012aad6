"""Front ends on simulated streams (tests/helpers/on_streams.py), step after step: in a steady step the host does not
wait for the device, the allocator needs no events for gradients, and nothing grows, on CPU neither."""

import contextlib
import ctypes
import gc

import on_streams
import pytest
import torch
from front_ends import FRONT_ENDS
from models import Gradients, integers, reducer_of, refusal
from ranks import Ranks, nothing
from sampling import few

import fusedcomm
import fusedcomm.horovod as hvd
from fusedcomm.config import Config
from fusedcomm.devices import cuda

SHAPES = ((96, 64), (64,))


def model() -> Gradients:
    return Gradients(*SHAPES, dtype=torch.float32)


def reduced(rank, name, config):
    forward, comm = FRONT_ENDS[name].make(model(), config)
    if config.weighted:
        comm.weight = rank + 1
    return forward, None


def with_owners(rank, name, config):
    reducer = reducer_of(trained := model(), config)
    return trained, fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, trained.parameters(), lr=0.1, quiet=True)


def with_merges(rank, name, config):
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    trained.comm = fusedcomm.LocalSteps(trained, optimizer, 3, delay=2, config=config, quiet=True)
    return trained, optimizer


def with_horovods_optimizer(rank, name, config):
    hvd.init()
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), 0.1)
    return trained, hvd.DistributedOptimizer(optimizer, trained.named_parameters(), hvd.Compression.int8)


STEPPING = {
    **{name: (reduced, name, config) for name, config in on_streams.CONFIGS.items()},
    "GradReducer": (reduced, "reducer", Config("int8", weighted="mean")),
    "ShardedOptimizer": (with_owners, "", Config("int8", sum="two-shot")),
    "LocalSteps": (with_merges, "", Config("int4", sum="two-shot", chunks=on_streams.CHUNKS)),
    "Horovod": (with_horovods_optimizer, "", None),
}


@contextlib.contextmanager
def stepping(rank, name, device):
    """The forward pass, the optimizer and this rank's gradients of a row. In the end the device has ended its work."""
    make, front_end, config = STEPPING[name]
    with torch.device(device):
        forward, optimizer = make(rank, front_end, config)
        own = [integers(rank, shape).to(device) for shape in SHAPES]
        yield forward, optimizer or torch.optim.SGD(forward.parameters(), lr=0.1), own
        if device != "cpu":
            torch.accelerator.synchronize()
        if name == "Horovod":
            hvd.barrier()
            hvd.shutdown()


def ten_steps(rank, world_size, name, device):
    """(how often each has waited for the device, whose work before it has ended; the parameters then)"""
    found = []
    with stepping(rank, name, device) as (forward, optimizer, own):
        for _ in range(10):
            before = on_streams.waits()
            optimizer.zero_grad()
            forward(own).backward()
            optimizer.step()
            found.append(on_streams.waits() - before)
            if device != "cpu":
                before = on_streams.waits()
                torch.accelerator.synchronize()
                assert on_streams.waits() > before  # a wait counts
        return found, [getattr(p, "_local_tensor", p).detach().cpu() for p in forward.parameters()]


@pytest.mark.parametrize("name", STEPPING)
def test_a_steady_step_does_not_wait_for_an_accelerator_and_has_the_cpus_bits(ranks_on_streams, ranks, name):
    on_cpu = ranks.run(ten_steps, name, "cpu", world_size=2)
    on_device = ranks_on_streams.run(ten_steps, name, on_streams.DEVICE)
    for (waits, ours), (_, theirs) in zip(on_device, on_cpu, strict=True):
        assert waits[4:] == [0] * 6, waits
        assert all(map(torch.equal, ours, theirs))


def steps_with_a_write(rank, world_size, device):
    """What the step says after one whose gradient was written past autograd."""
    with stepping(rank, "ShardedOptimizer", device) as (forward, optimizer, own):
        for _ in range(3):
            forward(own).backward()
            optimizer.step()
        forward(own).backward()
        forward.weights[0].grad.data.add_(1)
        optimizer.step()
        forward(own).backward()
        return refusal(optimizer.step)


def test_an_owner_finds_a_written_gradient_a_step_later(ranks_on_streams):
    for said in ranks_on_streams.run(steps_with_a_write, on_streams.DEVICE):
        assert "the gradient of weights.0 was changed or removed between backward() and step()" in said


def communicators_of_merges(rank, world_size, device):
    with torch.device(device):
        before = len(on_streams.own_backends)
        forward, optimizer = with_merges(rank, "", STEPPING["LocalSteps"][-1])
        forward.comm.finish()
        torch.accelerator.synchronize()
    return on_streams.own_backends[before:]


def test_merges_have_a_communicator_of_their_own(ranks_on_streams):
    """A merge over a slow line would block every collective of the user's."""
    assert ranks_on_streams.run(communicators_of_merges, on_streams.DEVICE) == [["own"], ["own"]]


def plan_of(rank, world_size, name, device):
    with torch.device(device):
        return str(FRONT_ENDS[name].make(model(), "bf16")[1].plan())


@pytest.mark.parametrize(("name", "row"), [("reducer", "bucket"), ("FSDP2", "module")])
def test_the_plan_says_that_nccl_is_called_directly(ranks_on_streams, ranks, name, row):
    """The session has connected all channels, or there would be a reason why it is not; see nccl_scenes.cpp."""
    for plan in ranks_on_streams.run(plan_of, name, on_streams.DEVICE):
        assert f"\n  NCCL is called directly, but through torch for the last {row} of a pass" in plan
    assert "NCCL" not in "".join(ranks.run(plan_of, name, "cpu", world_size=2))


MANY = [(30 + i,) for i in range(40)]


def events_of_steps(rank, world_size, name, device):
    """The events of torch's allocator in each of ten steps, whose gradients are all new."""
    found = []
    with torch.device(device):
        forward, comm = FRONT_ENDS[name].make(Gradients(*MANY), "fp32")
        own = [torch.ones(shape, dtype=torch.float32) for shape in MANY]
        for _ in range(10):
            before = on_streams.allocators_events()
            forward.zero_grad()
            forward(own).backward()
            torch.accelerator.synchronize()
            found.append(on_streams.allocators_events() - before)
    return found


@pytest.mark.parametrize("name", ["reducer", "DataParallel"])
def test_the_allocator_needs_no_events_for_gradients(ranks_on_streams, name):
    """It needs one a stream for the tables of a bucket that lies in a third place."""
    for events in ranks_on_streams.run(events_of_steps, name, on_streams.DEVICE):
        assert max(events[4:]) <= cuda.NUM_STREAMS_BY_HOST - 1, events


def heap_nbytes() -> int:
    """Bytes that this process has from malloc()."""

    class Info(ctypes.Structure):
        _fields_ = [(f"field {i}", ctypes.c_size_t) for i in range(10)]

    find = ctypes.CDLL(None).mallinfo2
    find.restype = Info
    gc.collect()
    info = find()
    return getattr(info, "field 4") + getattr(info, "field 7")


def memory_over_steps(rank, world_size, name, device, num_steps):
    """What this rank has after a half of the steps and after all: blocks of the device's memory, or bytes. In every
    step gradients lie elsewhere."""
    found = []
    with stepping(rank, name, device) as (forward, optimizer, own):
        last = []
        for step in range(1, num_steps + 1):
            optimizer.zero_grad()
            forward(own).backward()
            optimizer.step()
            last = [last[-1:], [p.grad for p in forward.parameters()]]
            if step in (num_steps // 2, num_steps):
                found.append(heap_nbytes() if device == "cpu" else on_streams.num_blocks())
        del last
    return found


@pytest.fixture(scope="module")
def ranks_without_records():
    """Torch's flight recorder notes collectives over gloo, too, some 950 bytes each, until it has 2,000."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_FR_BUFFER_SIZE", "0")
        pool = Ranks(2)
        pool.run(nothing)
    yield pool
    pool.close()


@pytest.mark.parametrize("num_steps", few([60, 1008], 60))
@pytest.mark.parametrize("name", STEPPING)
def test_nothing_grows_while_gradients_move(ranks_on_streams, ranks_without_records, name, num_steps):
    """Both counts are at the same point of a merge: it and the one before, in other memory, take six steps."""
    assert num_steps % 12 == 0
    for half, whole in ranks_on_streams.run(memory_over_steps, name, on_streams.DEVICE, num_steps):
        assert 0 < whole <= half + 2, (half, whole)
    for half, whole in ranks_without_records.run(memory_over_steps, name, "cpu", num_steps):
        assert whole < half + (1 << 17), (half, whole)  # what torch makes late
