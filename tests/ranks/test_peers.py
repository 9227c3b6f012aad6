"""Waits for other ranks outside of a step. A rank that dies is named on all others within seconds, with what it was
last seen doing. A rank that is late is reported, and the wait goes on."""

import ctypes
import dataclasses
import datetime
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Gradients, synchronize
from patience import HANG_S, patient
from stores import group_over
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import CommState
from fusedcomm.autotune.tuner import Tuner
from fusedcomm.config import Config, Feedback, LocalOptions
from fusedcomm.ddp.handle import Handle
from fusedcomm.devices import cpu
from fusedcomm.native import _C
from fusedcomm.ranks import channels, groups, peers
from fusedcomm.ranks.bounded_store import BoundedStore, StoreError

pytestmark = pytest.mark.check

STALL_AFTER_S = patient(2)
TIMEOUT_S = patient(60)
WITHIN_S = 3 * STALL_AFTER_S + patient(10)
VICTIM = 1
SHAPES = ((400, 300), (500, 600))
INT8 = Config("int8")


def die(*_, **__) -> None:
    os._exit(1)


def attach(ddp: DistributedDataParallel, config: Config | str = INT8) -> Handle:
    return fusedcomm.attach(ddp, config, local=LocalOptions(stall_after=STALL_AFTER_S))


def step(ddp: DistributedDataParallel) -> None:
    synchronize(ddp, [torch.ones(shape) for shape in SHAPES])


def attach_a_state(ddp: DistributedDataParallel, config: Config) -> fusedcomm.CommState:
    """With a CommState the engine starts only in the first backward pass."""
    state = fusedcomm.CommState(config, local=LocalOptions(stall_after=STALL_AFTER_S), process_group=ddp.process_group)
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    return state


def save(comm: Handle, ddp: DistributedDataParallel, folder: Path) -> None:
    comm.state_dict(consolidated=True)


def report(comm: Handle, ddp: DistributedDataParallel, folder: Path) -> None:
    comm.nonfinite_report()


@dataclasses.dataclass(frozen=True)
class Death:
    """The victim dies when it calls `name` of `place` for the `number`-th time. `then`: what ranks do after a step."""

    place: object
    name: str
    seen: str  # the words of the other ranks' errors for what the victim was last seen doing
    config: Config | str = INT8
    attach: Callable = attach
    then: Callable | None = None
    number: int = 1


CONNECTING, TRAINING = "attaching: connecting with the other ranks", "in training"
DEATHS = {
    "before attaching": Death(fusedcomm, "attach", "It has not come to attach"),
    "before its first step": Death(CommState, "session", "It has not come to attach", attach=attach_a_state),
    "before it has channels": Death(cpu.CpuPath, "connect", CONNECTING),
    "with one of two channels": Death(channels, "connect_gloo", CONNECTING, number=2),
    "searching": Death(Tuner, "_beside", "for config='auto'", "auto"),
    "before saving": Death(Handle, "state_dict", TRAINING, Config("int8", feedback=Feedback()), then=save),
    "before the report": Death(Handle, "nonfinite_report", TRAINING, then=report),
}


def survive(rank, world_size, name, store_kind, folder):
    """Returns the type and text of the error, None and "" if there is none, and the seconds until then."""
    death, num_calls = DEATHS[name], 0
    own_timeout, own = datetime.timedelta(seconds=TIMEOUT_S), getattr(death.place, death.name)

    def call(*args, **kwargs):
        nonlocal num_calls
        num_calls += 1
        return die() if num_calls == death.number else own(*args, **kwargs)

    with group_over(store_kind, rank, world_size, VICTIM, own_timeout) as group, pytest.MonkeyPatch.context() as patch:
        if rank == VICTIM:
            patch.setattr(death.place, death.name, call)
        ddp = DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.3, process_group=group)
        started = time.monotonic()
        try:
            comm = death.attach(ddp, death.config)
            step(ddp)
            if death.then is not None:
                death.then(comm, ddp, folder)
        except RuntimeError as error:
            return type(error).__name__, str(error), time.monotonic() - started
        return None, "", time.monotonic() - started


@pytest.mark.sampled(by=lambda name, store_kind: {"seen": DEATHS[name].seen, "store": store_kind})
@pytest.mark.parametrize(("name", "store_kind"), [*((name, "tcp") for name in DEATHS), ("before attaching", "file")])
def test_a_rank_that_dies_outside_of_a_step_is_named_with_what_it_was_doing(ranks, tmp_path, name, store_kind):
    outcome = ranks.outcomes(survive, name, store_kind, tmp_path, world_size=3, lost=VICTIM)
    for rank in (0, 2):
        kind, value = outcome[rank]
        assert kind == "value", value
        error_type, error, waited = value
        assert error_type and "rank 1" in error and waited < WITHIN_S, (waited, error)
        if rank == 0 or error_type == "PeerLostError":
            assert DEATHS[name].seen in error, error


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
    dist.barrier()  # both are connected
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
