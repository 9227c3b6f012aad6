"""A rank that dies or stops in the middle of a step is named on every other, in an error within the group's timeout.
What the watch says of ranks that are only late: tests/watch."""

import dataclasses
import datetime
import gc
import os
import re
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Gradients, stderr_to, synchronize
from patience import HANG_S, patient
from stores import group_over
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Chunks, Config
from fusedcomm.native import _C

pytestmark = pytest.mark.check

# Seconds; the timeout of the process group. It must also be enough for ranks to start, attach and take three steps
# while other programs use the cores.
TIMEOUT_S = patient(8)
SHAPES = ((400, 300), (500, 600))
INT8 = Config("int8", "two-shot")


@dataclasses.dataclass(frozen=True)
class Loss:
    """Which rank is lost, how, and of what job. store: of the process group, see stores.py."""

    victim: int
    number: signal.Signals
    config: Config = INT8
    store: str = "file"
    world_size: int = 3
    has_state: bool = False

    @property
    def takes_the_store(self) -> bool:
        return self.store == "tcp" and self.victim == 0


TWO_LEVELS = Config("int8", "two-shot", chunks=Chunks(16384), hosts=[[0, 1], [2, 3]])
LOSSES = [
    Loss(2, signal.SIGKILL),
    Loss(2, signal.SIGSTOP, store="tcp"),
    Loss(0, signal.SIGKILL, store="tcp"),
    Loss(0, signal.SIGSTOP, store="tcp"),
    Loss(0, signal.SIGKILL, has_state=True),
    Loss(2, signal.SIGSTOP, Config("fp32")),
    Loss(3, signal.SIGKILL, TWO_LEVELS, world_size=4),
    # An exact sum uses a ring, in which rank 1 is no neighbor of rank 3: rank 1 sees nothing but a timeout.
    Loss(3, signal.SIGKILL, Config("fp32"), world_size=4),
]


def train(rank, world_size, loss, folder):
    """Trains. In step 3 the victim gets its signal in the middle of the backward pass. Returns the error, what was
    written to stderr meanwhile, and the seconds that the step and detaching took."""
    with group_over(loss.store, rank, world_size, loss.victim, datetime.timedelta(seconds=TIMEOUT_S)) as group:
        ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3, process_group=group)
        if loss.has_state:
            ddp.register_comm_hook(fusedcomm.CommState(loss.config, process_group=group), fusedcomm.comm_hook)
            comm = None
        else:
            comm = fusedcomm.attach(ddp, loss.config)
        gradients = [torch.ones(shape) for shape in SHAPES]
        synchronize(ddp, gradients, steps=3)
        if rank == loss.victim:
            ddp.module.weights[0].register_hook(lambda gradient: os.kill(os.getpid(), loss.number))
        started, error, log = time.monotonic(), None, folder / f"{rank}.log"
        with stderr_to(log):
            try:
                synchronize(ddp, gradients)
            except RuntimeError as caught:
                error = str(caught)
        waited_s, started = time.monotonic() - started, time.monotonic()
        if comm is not None:
            # The error is permanent. A bucket is handed over directly, because a reducer cannot be used again after it
            # has raised in the backward pass.
            with pytest.raises(RuntimeError, match="fusedcomm: rank"):
                ddp.reducer._run_comm_hook(ddp.reducer._get_zeros_like_grad_buckets()[0]).wait()
            started = time.monotonic()
            comm.detach()
        return error, log.read_text(), waited_s, time.monotonic() - started


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_rank_lost_in_mid_step_is_named_on_every_other(ranks, tmp_path, loss):
    pid = ranks.pid_of(loss.victim)
    outcome = ranks.outcomes(train, loss, tmp_path, world_size=loss.world_size, lost=loss.victim)
    for rank in {*range(loss.world_size)} - {loss.victim}:
        kind, value = outcome[rank]
        assert kind == "value", value
        error, warned, waited_s, detached_s = value
        assert f"fusedcomm: rank {rank} of {loss.world_size}" in error
        report = error[error.index("restart the job") :]
        if loss.takes_the_store:
            assert ("the store fails" if loss.number == signal.SIGKILL else "the store is silent") in report
            assert "a TCPStore at 127.0.0.1" in report and "hosted by rank 0 of the job" in report
            assert "failed for bucket" in error and "between this rank and rank 0: " in error
        else:
            assert f"rank {loss.victim} (process {pid} on " in report and "is missing: no answer within" in report
            assert report.count("is missing") == 1 and "is slow" not in report
        label = r"\d parameters" if loss.has_state else r"weights\.[01]; "
        assert re.search(
            rf"in step 3 for the (local )?all-(to-all|gather|reduce) of chunk \d+/\d+ of bucket [01] \(.*{label}",
            report,
        )
        # A rank that is not connected with the victim may hear of it from another rank's roll call.
        num_warnings = warned.count("Warning: fusedcomm")
        sees_a_timeout = loss.number == signal.SIGSTOP or waited_s > TIMEOUT_S - 1
        assert num_warnings == sees_a_timeout or (loss.world_size == 4 and num_warnings == 1), warned
        if num_warnings and loss.takes_the_store:  # the error comes from a later roll call than the warning
            assert "the store is silent" in warned and "hosted by rank 0 of the job" in warned
        elif num_warnings:
            assert f"rank {loss.victim} (process {pid} on " in warned
        assert waited_s < TIMEOUT_S + (patient(9) if sees_a_timeout else 0)
        assert detached_s < TIMEOUT_S / 2


def absent(rank, world_size):
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=patient(2)))
    ddp = DistributedDataParallel(Gradients((5,)), process_group=group)
    if rank == 1:
        dist.barrier()  # the other ranks reach this barrier after their attach has failed
        return None
    try:
        fusedcomm.attach(ddp)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()


def test_a_rank_that_does_not_attach_is_named(ranks):
    errors = ranks.run(absent, world_size=3)
    assert f"rank(s) [1] did not attach within {patient(2)} s" in errors[0] and errors[0] == errors[2]


def stopped_under_way(rank, world_size):
    """Detaches while a bucket waits for rank 1, with more chunks than may be sent at once. Returns its error, and the
    seconds until then."""
    ddp = DistributedDataParallel(Gradients((300000,)))
    comm = fusedcomm.attach(ddp, Config("int8", "two-shot", wires={"1d": "int8"}, chunks=Chunks(8192)))
    synchronize(ddp, [torch.ones(300000)])
    if rank == 1:
        dist.barrier()
        return None
    bucket = ddp.reducer._get_zeros_like_grad_buckets()[0]
    began, future = time.monotonic(), ddp.reducer._run_comm_hook(bucket)
    comm.detach()
    with pytest.raises(RuntimeError) as error:
        future.wait()
    dist.barrier()
    return str(error.value), time.monotonic() - began


def test_detaching_with_a_bucket_under_way_fails_that_bucket(ranks):
    (error, taken_s), _ = ranks.run(stopped_under_way, world_size=2)
    assert error.startswith("fusedcomm: rank 0: a bucket was given up because fusedcomm was detached")
    assert taken_s < TIMEOUT_S  # the group's timeout is minutes


def let_go(rank, world_size, config):
    """After two steps the last rank stops, and the others raise an error of the user's and release everything. Returns
    the seconds that the release took and what it wrote to stderr."""
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=patient(25)))
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3, process_group=group)
    comm = fusedcomm.attach(ddp, config)
    gradients = [torch.ones(shape) for shape in SHAPES]
    synchronize(ddp, gradients, steps=2)

    def fail(gradient):
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.5)  # a bucket is under way by now
        raise ArithmeticError("of the user's")

    ddp.module.weights[0].register_hook(fail)
    with pytest.raises(ArithmeticError):
        synchronize(ddp, gradients)
    comm.detach()
    with tempfile.NamedTemporaryFile() as log, stderr_to(log.name):
        began = time.monotonic()
        del comm, ddp
        gc.collect()
        taken_s = time.monotonic() - began
        text = Path(log.name).read_text()
    return taken_s, text


@pytest.mark.parametrize("sum", ["one-shot", "two-shot"])
def test_messages_are_given_up_while_a_peer_is_silent(ranks, sum):
    kind, found = ranks.outcomes(let_go, Config("int8", sum), world_size=2, lost=1)[0]
    assert kind == "value", found
    taken_s, text = found
    assert taken_s < patient(5) and "closes its channels" not in text


def test_channels_are_let_go_of_while_a_peer_is_silent(ranks):
    """Unlike a message, an all-reduce cannot be aborted, so its channel is closed only after a while."""
    kind, found = ranks.outcomes(let_go, Config("bf16", "direct"), world_size=2, lost=1)[0]
    assert kind == "value", found
    taken_s, text = found
    assert 9 < taken_s < patient(15)
    assert "fusedcomm: rank 0 of 2 closes its channels, but a collective still waits for a peer after 10 s" in text


def dropped_by_its_own_thread(rank, world_size):
    """Rank 0 drops an engine's last owner in the callback of a sum, on the engine's thread. Returns the sum."""
    ddp = DistributedDataParallel(Gradients((8,)))
    comm = fusedcomm.attach(ddp, "fp32", quiet=True)
    synchronizer = comm.session.synchronizer
    owners = [_C.FusedSum(synchronizer)]
    del comm, ddp, synchronizer
    gc.collect()
    is_dropped = threading.Event()

    def drop(error):
        owners.clear()
        is_dropped.set()

    if rank == 1:
        dist.barrier()  # rank 0 has returned from run(), which holds what it was called of
    future = owners[0].run(names=["x"], tensors=[torch.full((8,), rank - 2.0)], factor=2.0)
    future.add_done_callback(drop)
    if rank == 0:
        dist.barrier()
    assert is_dropped.wait(HANG_S)
    return future.wait()[0].item()


def test_an_engine_may_end_on_its_own_thread(ranks):
    assert ranks.run(dropped_by_its_own_thread, world_size=2) == [-3.0, -3.0]
