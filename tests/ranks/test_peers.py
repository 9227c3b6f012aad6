"""Waits for other ranks outside of a step. A rank that dies is named on all others within seconds, with what it was
last seen doing. A rank that is late is reported, and the wait goes on."""

import ctypes
import datetime
import os
import sys
import tempfile
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from models import Gradients, synchronize
from patience import HANG_S, patient
from stores import group_over
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.autotune.tuner import Tuner
from fusedcomm.config import Config, Feedback, LocalOptions
from fusedcomm.devices import cpu
from fusedcomm.native import _C
from fusedcomm.ranks import groups, peers
from fusedcomm.ranks.bounded_store import BoundedStore, StoreError

pytestmark = pytest.mark.check

STALL_AFTER_S = patient(2)
TIMEOUT_S = patient(60)
WITHIN_S = 3 * STALL_AFTER_S + patient(10)
VICTIM = 1
SHAPES = ((400, 300), (500, 600))
INT8 = Config("int8")


def die() -> None:
    os._exit(1)


def attach(ddp: DistributedDataParallel, config: Config | fusedcomm.Auto = INT8) -> "fusedcomm.ddp.handle.Handle":
    return fusedcomm.attach(ddp, config, local=LocalOptions(stall_after=STALL_AFTER_S))


def step(ddp: DistributedDataParallel) -> None:
    synchronize(ddp, [torch.ones(shape) for shape in SHAPES])


def dies_before_attaching(ddp: DistributedDataParallel, is_victim: bool) -> None:
    if is_victim:
        die()
    attach(ddp)


def dies_while_connecting(ddp: DistributedDataParallel, is_victim: bool) -> None:
    """Configurations have been compared, but no rank has its channels."""
    if is_victim:
        cpu.CpuPath.connect = lambda *args: die()
    attach(ddp)


def dies_while_connecting_half(ddp: DistributedDataParallel, is_victim: bool) -> None:
    """The victim has one of its two channels."""
    if is_victim:
        own, made = cpu.groups._gloo, []

        def gloo(store, name, *args):
            made.append(name)
            return own(store, name, *args) if len(made) == 1 else die()

        cpu.groups._gloo = gloo
    attach(ddp)


def dies_in_its_first_step(ddp: DistributedDataParallel, is_victim: bool) -> None:
    """The hook is registered with a CommState, so the engine starts only in the first backward pass."""
    state = fusedcomm.CommState("int8", local=LocalOptions(stall_after=STALL_AFTER_S), process_group=ddp.process_group)
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    if is_victim:
        die()
    step(ddp)


def dies_while_searching(ddp: DistributedDataParallel, is_victim: bool) -> None:
    """The victim dies when it makes the first candidate after off."""
    if is_victim:
        Tuner._beside = lambda *args: die()
    attach(ddp, fusedcomm.Auto(("bf16",)))


def dies_before_saving(ddp: DistributedDataParallel, is_victim: bool) -> None:
    comm = attach(ddp, Config("int8", feedback=Feedback()))
    step(ddp)
    if is_victim:
        die()
    comm.state_dict(consolidated=True)


def dies_before_the_report(ddp: DistributedDataParallel, is_victim: bool) -> None:
    comm = attach(ddp)
    step(ddp)
    if is_victim:
        die()
    comm.nonfinite_report()


def dies_in_a_traced_step(ddp: DistributedDataParallel, is_victim: bool) -> None:
    """The victim dies after the step and before it has sent its trace. Only rank 0 waits for the trace."""
    comm = attach(ddp)
    with tempfile.TemporaryDirectory() as folder:
        with comm.trace(os.path.join(folder, "trace.json"), all_ranks=True):
            step(ddp)
            if is_victim:
                die()


# By script: the words of the other ranks' errors for what the victim was last seen doing.
SEEN = {
    dies_before_attaching: "It has not come to attach",
    dies_while_connecting: "attaching: connecting with the other ranks",
    dies_while_connecting_half: "attaching: connecting with the other ranks",
    dies_in_its_first_step: "It has not come to attach",
    dies_while_searching: "for config='auto'",
    dies_before_saving: "in training",
    dies_before_the_report: "in training",
    dies_in_a_traced_step: "in training",
}


def survive(rank, world_size, script, store_kind):
    """Runs a script. Returns the type and text of the error, None and "" if there is none, and the seconds it took."""
    own_timeout = datetime.timedelta(seconds=TIMEOUT_S)
    with group_over(store_kind, rank, world_size, VICTIM, own_timeout) as group:
        ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3, process_group=group)
        started = time.monotonic()
        try:
            script(ddp, rank == VICTIM)
        except RuntimeError as error:
            return type(error).__name__, str(error), time.monotonic() - started
        return None, "", time.monotonic() - started


@pytest.mark.sampled(by=lambda script: {"seen": SEEN[script]})
@pytest.mark.parametrize("script", SEEN, ids=lambda script: script.__name__)
def test_a_rank_that_dies_outside_of_a_step_is_named_with_what_it_was_doing(ranks, script):
    outcome = ranks.outcomes(survive, script, "tcp", world_size=3, lost=VICTIM)
    for rank in (0, 2):
        kind, value = outcome[rank]
        assert kind == "value", value
        error_type, error, waited = value
        if script is dies_in_a_traced_step and rank != 0:
            assert error_type is None
            continue
        assert error_type and "rank 1" in error and waited < WITHIN_S, (waited, error)
        if rank == 0 or error_type == "PeerLostError":
            assert SEEN[script] in error, error


def test_so_it_is_over_a_file(ranks):
    outcome = ranks.outcomes(survive, dies_before_attaching, "file", world_size=3, lost=VICTIM)
    for rank in (0, 2):
        kind, value = outcome[rank]
        assert kind == "value" and "rank 1" in value[1] and value[2] < WITHIN_S, value


def detached_after_a_death(rank, world_size):
    group = dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=TIMEOUT_S))
    ddp = DistributedDataParallel(Gradients(*SHAPES), process_group=group)
    comm = attach(ddp)
    step(ddp)
    if rank == VICTIM:
        die()
    while not comm.runs.peers._connections.lost():
        time.sleep(0.05)
    started = time.monotonic()
    comm.detach()
    return time.monotonic() - started


def test_detaching_waits_for_no_rank(ranks):
    outcome = ranks.outcomes(detached_after_a_death, world_size=3, lost=VICTIM)
    for rank in (0, 2):
        kind, value = outcome[rank]
        assert kind == "value" and value < patient(10), value


def comes_late(rank, world_size):
    """The last rank attaches only after rank 0 has warned about it. Returns a rank's warnings, and the values of the
    next step's gradients."""
    store = dist.distributed_c10d._get_default_store()
    ddp = DistributedDataParallel(Gradients(*SHAPES))
    said = []

    def show(message, *args, **kwargs):
        said.append(str(message))
        store.set("warned", "")

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        if rank == world_size - 1:
            store.wait(["warned"], datetime.timedelta(seconds=HANG_S))
        if rank == 1:
            store.set("has come", "")
        if rank == 0:
            store.wait(["has come"], datetime.timedelta(seconds=HANG_S))
        fusedcomm.attach(ddp, "int8", local=LocalOptions(stall_after=patient(1) if rank == 0 else HANG_S))
    gradients = synchronize(ddp, [torch.full(shape, float(rank + 1)) for shape in SHAPES])
    return said, [gradient.unique().tolist() for gradient in gradients]


def test_a_rank_that_comes_late_to_attach_is_reported_and_waited_for(ranks):
    outcome = ranks.run(comes_late, world_size=3)
    said = outcome[0][0]
    assert len(said) == 1 and "has waited for" in said[0] and "rank 2" in said[0] and "rank 1" not in said[0], said
    assert "It has not come to attach" in said[0] and "It goes on waiting" in said[0]
    assert all(gradients == [[2.0], [2.0]] for _, gradients in outcome)


class Silent(dist.Store):
    """A store that takes half a minute to answer once it is silent."""

    def __init__(self, is_silent: bool) -> None:
        super().__init__()
        self.is_silent = is_silent

    def set(self, key, value) -> None:
        pass

    def check(self, keys) -> bool:
        time.sleep(30 if self.is_silent else 0)
        return True

    def wait(self, keys, timeout=None) -> bool:
        return self.check(keys)


def waits_for_a_silent_store(rank, world_size):
    """Rank 0 waits on a store that never answers. Returns its warnings."""
    silent, timeout = Silent(False), datetime.timedelta(seconds=HANG_S)
    store = BoundedStore(silent, timeout, "a store that may be silent")
    waiting = peers.Peers(dist.group.WORLD, store, timeout, stall_after_s=0.5)
    silent.is_silent = rank == 0

    def end_the_wait(message, *args, **kwargs):
        raise InterruptedError(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = end_the_wait
        try:
            waiting.wait(store, {1: "key"}, "testing")
            said = ""
        except InterruptedError as ended:
            said = str(ended)
    dist.barrier()  # keeps rank 1 from leaving early, since it would then count as lost
    return said


def test_that_the_store_is_silent_is_said(ranks):
    said, none = ranks.run(waits_for_a_silent_store, world_size=2)
    assert "while testing" in said and "the store does not answer" in said and none == ""


def test_a_request_to_a_silent_store_ends_and_its_error_says_which_store():
    store = BoundedStore(Silent(True), datetime.timedelta(seconds=0.2), "a store of a test")
    with pytest.raises(StoreError) as caught:
        store.under("here").check(["key"])
    assert str(caught.value) == (
        "fusedcomm: the process group's store failed (looking for 'key'): no answer within 0.2 s. It is a store of a "
        "test. That process was killed, has left, is stopped or is cut off, or the link to it is full: look at its "
        "log, and restart the job"
    )


def leaves_after_its_part(rank, world_size):
    """Rank 1 provides its part and leaves. Rank 2 provides its part some time after rank 1 has left. Returns the result
    of the wait for both parts."""
    group = dist.group.WORLD
    timeout = datetime.timedelta(seconds=HANG_S)
    store = BoundedStore(dist.distributed_c10d._get_default_store(), timeout, "the group's store").under("test")
    waiting = peers.Peers(group, store, timeout, stall_after_s=HANG_S)
    if rank == 1:
        store.set("part/1", "")
        die()
    while not waiting._connections.lost():
        time.sleep(0.05)
    if rank == 2:
        time.sleep(3 * peers._GRACE_S)
        store.set("part/2", "")
    return waiting.wait(store, {1: "part/1", 2: "part/2"}, "testing")


def test_a_rank_that_has_given_its_part_may_leave(ranks):
    outcome = ranks.outcomes(leaves_after_its_part, world_size=3, lost=1)
    assert [outcome[0], outcome[2]] == [("value", []), ("value", [])]


def set_thread_stacks(nbytes: int) -> None:
    """Gives every thread that this process starts from now on a stack of that size."""
    libc, attributes = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    assert libc.pthread_attr_init(attributes) == 0
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(nbytes)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0


def has_no_threads_left(rank, world_size):
    """Rank 1 can start no thread, since there is no memory for its stack. Returns a rank's error and what caused it."""
    ddp = DistributedDataParallel(Gradients(*SHAPES))
    dist.barrier()
    if rank == 1:
        set_thread_stacks(1 << 48)
    try:
        fusedcomm.attach(ddp, "int8")
    except RuntimeError as error:
        return str(error), str(error.__cause__)
    finally:
        if rank == 1:
            set_thread_stacks(8 << 20)
        dist.barrier()  # a rank that has left would count as lost
    return "", ""


@pytest.mark.skipif(sys.platform != "linux", reason="sets glibc's default")
def test_a_rank_that_can_start_no_thread_tells_the_others_so(ranks):
    first, own, last = ranks.run(has_no_threads_left, world_size=3)
    cause = "gloo's channel 'scatter' over 3 ranks, with 4 threads and one for each network device, could not be made: "
    assert own[0].startswith(f"fusedcomm: {cause}") and "Resource temporarily unavailable" in own[0], own
    for told in (first, last):
        assert "rank 1 cannot attach: " in told[0] and cause in told[0], told


def given_up(rank, world_size):
    """Rank 0 calls a collective alone, and both give up the group. Seconds until the last of it has ended here."""
    group = dist.new_group()
    sentinels = _C.PeerSentinels(backend=groups.gloo_backend(group), tag=peers._TAG)
    if rank == 0:
        dist.barrier(group, async_op=True)
    dist.destroy_process_group(group)
    del group
    began = time.monotonic()
    del sentinels
    return time.monotonic() - began


def test_the_end_of_a_group_does_not_wait_for_a_collective_that_never_ends(ranks):
    """Until the group's timeout, in whichever thread happened to collect it."""
    seconds = ranks.run(given_up, world_size=2, leaves_waiting=True)
    assert max(seconds) < patient(30), seconds
