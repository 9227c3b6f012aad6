"""The report that names the rank that delays a step, on every rank that waits. test_watch_store.py: over a store whose
connections fail. test_watch_hosts.py: between hosts. tests/engine/test_failures.py: of ranks that are lost."""

import ctypes
import datetime
import functools
import itertools
import os
import re
import signal
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from models import Gradients, stderr_to, synchronize
from patience import patient, wait_for_words
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, LocalOptions
from fusedcomm.ranks import peers, roll_call

pytestmark = pytest.mark.check

SHAPES = ((400, 300), (500, 600))


def attached(rank, stall_after):
    """DDP, its handle, and a function that makes steps."""
    ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3)
    comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot"), local=LocalOptions(stall_after=stall_after))
    return ddp, comm, functools.partial(synchronize, ddp, [torch.full(shape, float(rank + 1)) for shape in SHAPES])


def are_right(means, world_size):
    return all((mean == (world_size + 1) / 2).all().item() for mean in means)


def late_for_the_end_of_a_turn(rank, world_size, folder):
    """Trains with config="auto" to the end of a turn, where ranks compare times. Rank 1 comes only after rank 0 has
    warned about it. Returns what this rank writes to stderr meanwhile."""
    ddp = DistributedDataParallel(Gradients((4000,)))
    comm = fusedcomm.attach(ddp, "auto", local=LocalOptions(stall_after=patient(1)))
    gradients = [torch.ones(4000)]
    synchronize(ddp, gradients, steps=comm.runs._turns.num_steps)
    log = folder / f"{rank}.log"
    with stderr_to(log):
        if rank == 1:
            wait_for_words("rank 1", folder / "0.log")
        synchronize(ddp, gradients)
    return log.read_text()


def test_a_rank_that_is_late_for_the_end_of_a_turn_is_named(ranks, tmp_path):
    warned, _ = ranks.run(late_for_the_end_of_a_turn, tmp_path, world_size=2)
    assert "rank 1 is slow" in warned and "is missing" not in warned, warned
    assert "the times of config='auto' trying off" in warned


def paused(rank, world_size, victim, folder, is_stopped):
    """Trains. In step 3 the `victim` is stopped, or in a call that holds the interpreter, until the others have warned
    of it; then five more steps follow. Returns whether the means were right and what was written to stderr."""
    ddp, comm, steps = attached(rank, patient(1))
    steps(3)
    logs = [folder / f"{other}.log" for other in range(world_size)]

    def pause(gradient):
        hook.remove()
        waits = "".join(f"until grep -qs missing {log}; do sleep 0.1; done; " for log in logs if log != logs[victim])
        if is_stopped:
            subprocess.Popen(["sh", "-c", f"{waits}kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            ctypes.PyDLL(None).system(waits.encode())
        return gradient

    hook = ddp.module.weights[0].register_hook(pause) if rank == victim else None
    with stderr_to(logs[rank]):
        means = steps(6)
    comm.detach()
    return are_right(means, world_size), logs[rank].read_text()


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "holds the interpreter"])
def test_a_rank_that_cannot_answer_and_goes_on_is_named_by_the_others_alone(ranks, tmp_path, is_stopped):
    for rank, (right, warned) in enumerate(ranks.run(paused, 2, tmp_path, is_stopped, world_size=3)):
        assert right
        assert warned.count("Warning: fusedcomm") == (rank != 2), warned
        if rank != 2:
            assert "rank 2 (process" in warned and "is missing" in warned and "holds Python's interpreter" in warned


def slow(rank, world_size, victim, stall_after, folder, forged=None, is_slow_twice=False):
    """Trains. In step 3 the `victim` begins its backward pass only after the others have warned about it; if
    `stall_after` is None, 3 s late, which is too early for a warning. Then five more steps follow.

    Returns whether the means were right, what was written to stderr in step 3 and later, and the seconds that detaching
    took. `forged`: a text that rank 0 puts into the store as roll call 1. `is_slow_twice`: the victim also hands over
    its second bucket of step 3 only after another roll call.
    """
    ddp, comm, steps = attached(rank, stall_after)
    if forged is not None and rank == 0:
        comm.session._store.set("watch/call/1", forged)
        comm.session._store.native.wait([f"watch/answer/1/{answering}" for answering in range(world_size)])
    store = comm.session.store("watch")

    def wait_for_a_call(gradient):
        number = next(number for number in itertools.count(1) if not store.check([f"call/{number}"]))
        while not store.check([f"over/{number}"]):
            time.sleep(0.1)
        return gradient

    steps(3)
    log = folder / f"{rank}.log"
    with stderr_to(log):
        if rank == victim and stall_after is None:
            time.sleep(3)
        elif rank == victim:
            for other in {*range(world_size)} - {victim}:
                wait_for_words("is slow", folder / f"{other}.log")
        hook = ddp.module.weights[0].register_hook(wait_for_a_call) if rank == victim and is_slow_twice else None
        means = steps(1)
        if hook is not None:
            hook.remove()
        means += steps(5)
    warned = log.read_text()
    started = time.monotonic()
    comm.detach()
    return are_right(means, world_size), warned, time.monotonic() - started


def test_a_slow_rank_is_named_once_and_training_goes_on(ranks, tmp_path):
    outcomes = ranks.run(slow, 1, patient(2), tmp_path, None, True, world_size=3)
    for rank, (right, warned, detached) in enumerate(outcomes):
        assert right and detached < patient(5)
        if rank == 1:
            assert warned == ""
            continue
        # The roll call's number is open, and on a busy machine other steps may stall, too.
        calls = re.split(r"Warning: fusedcomm: roll call \d+ of 3 ranks", warned)[1:]
        (warned,) = [call for call in calls if "in step 3" in call]
        assert "rank 1 is slow: it has not handed over bucket 0 (weights.1; " in warned
        assert "of step 3; nothing under way for" in warned and "since step 2" in warned
        assert "ranks 0, 2 wait in step 3 for the all-to-all of chunk 1/" in warned
        assert "missing" not in warned


@pytest.mark.sampled(by=lambda forged: {})
@pytest.mark.parametrize("forged", ["", "opened by rank 2, after a failure: ", '{"rank": "0", "why": 1, "text": 2}'])
def test_a_roll_call_that_cannot_be_read_is_answered_and_passed_over(ranks, tmp_path, forged):
    outcomes = ranks.run(slow, 1, patient(2), tmp_path, forged, world_size=3)
    assert all(right for right, _, _ in outcomes) and outcomes[1][1] == ""
    for _, warned, _ in (outcomes[0], outcomes[2]):
        assert "Warning: fusedcomm: roll call 2 of 3 ranks, opened by rank " in warned
        assert "rank 1 is slow: it has not handed over bucket 0" in warned and "missing" not in warned


def explained_alone(rank, world_size):
    """Rank 1 opens a roll call and leaves it, as a rank does that detaches. Returns the explanation of rank 0's
    failure, and the seconds it took."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=patient(60)))
    ddp = DistributedDataParallel(Gradients(*SHAPES), process_group=group)
    session = fusedcomm.attach(ddp, "int8").session
    dist.barrier()
    if rank == 1:
        session.unwatch()
        opening = roll_call.Opening(1, roll_call.FAILED, "after a failure of a test")
        session.store("watch").set("call/1", roll_call.encode(opening))
    dist.barrier()
    began = time.monotonic()
    text = session.synchronizer.explain("the test failed") if rank == 0 else ""
    taken_s = time.monotonic() - began
    dist.barrier()
    return text, taken_s


def test_an_error_does_not_wait_for_the_report_of_a_rank_that_has_left(ranks):
    (text, taken_s), _ = ranks.run(explained_alone, world_size=2)
    assert "of 2 ranks, opened by rank " in text and "after a failure" in text
    assert "rank 1 (process" in text and "is missing" in text
    assert taken_s < 3 + patient(2)  # the time for answers is the same on any machine


def test_nothing_is_said_of_a_wait_within_stall_after(ranks, tmp_path):
    for right, warned, _ in ranks.run(slow, 1, None, tmp_path, world_size=3):
        assert right and warned == ""


# ---- the option


def test_by_default_a_stall_is_reported_before_the_timeout():
    assert peers.reported_after_s(None, 1800) == 60
    assert peers.reported_after_s(None, 30) == 10
    assert peers.reported_after_s(25, 30) == 25
    assert peers.reported_after_s(0.1, 30) == 0.1
