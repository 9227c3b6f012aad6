"""Members that end and come back: their place in training and data, what a rank gets that joins, what leave() frees."""

import copy
import gc
import os
import threading
import timeit

import pytest
import torch
from checkpoints import file_of, read
from models import error_of
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fusedcomm
from fusedcomm.members.training import transfer

DATA = range(48)


def parallel(members):
    options = {"config": "fp32", "broadcast_buffers": False, "quiet": True}
    return fusedcomm.DataParallel(nn.Linear(4, 2), members=members, **options)


def one_pass(model):
    model(torch.ones(2, 4)).square().mean().backward()


class Kept:
    """An object of a user's with state."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def resumed(rank, world_size, saved, until):
    """Steps of a run that begins at a checkpoint's place: (samples of each step, the checkpoint at the end)."""
    members = fusedcomm.Members()
    sampler = fusedcomm.MembersSampler(DATA, members, batch_size=4)
    if saved is not None:
        states = read(saved, weights_only=True)
        sampler.load_state_dict(states["sampler"])
        members.load_state_dict(states["members"])
    model, seen = parallel(members), []
    loader = torch.utils.data.DataLoader(DATA, batch_sampler=sampler)
    assert len(loader) == (48 - 4 * members.num_microbatches) // (4 * world_size)
    batches = iter(loader)
    while members.step < until:
        seen += next(batches).tolist()
        one_pass(model)
    written = file_of({"members": members.state_dict(), "sampler": sampler.state_dict()})
    members.leave()
    return seen, written


def test_a_resumed_run_goes_on_with_its_step_and_each_sample_comes_once_on_any_number_of_ranks(ranks):
    first = ranks.run(resumed, None, 4, world_size=2)  # 4 steps of 2 batches
    (second,) = ranks.run(resumed, first[0][1], 8, world_size=1)
    assert first[0][1] == first[1][1]
    assert sorted(first[0][0] + first[1][0] + second[0]) == list(DATA)


def joined_by_a_thread(rank, world_size):
    """Founds members here, has a rank join on another thread, and trains until both have made a step together. Returns
    what both found: the place, and the joiner's copy of an object that a callback of its coming changes."""
    found, answered = {}, threading.Event()
    carried, joiner, skeleton = Kept(0.02), Kept(None), transfer.Transfer.skeleton
    members = fusedcomm.Members()

    def noted(self):
        answer = skeleton(self)
        if self._header["name"] == "it":
            answered.set()
        return answer

    def change(decision):
        if decision.joined:
            answered.wait(0.5)  # a member that did not wait for its callbacks would answer within this time
            carried.value = 0.03

    members.on_change(change)
    members.load_state_dict({"step": 100, "num_microbatches": 7})
    model = parallel(members)
    members.carry(it=carried)

    def join():
        own = fusedcomm.Members(join=members.address)
        made = parallel(own)
        own.carry(it=joiner)
        found["joined"] = own.step, own.num_microbatches
        found["refused"] = error_of(RuntimeError, own.load_state_dict, {"step": 6, "num_microbatches": 12})
        one_pass(made)
        found["step"], found["value"] = own.step, joiner.value

    thread = threading.Thread(target=join)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer.Transfer, "skeleton", noted)
        thread.start()
        while members.size == 1:
            found["at"] = members.step, members.num_microbatches
            one_pass(model)
        thread.join()
    found["left_s"] = timeit.timeit(members.leave, number=1)
    return found


def test_a_rank_that_joins_gets_what_callbacks_of_its_coming_have_changed_and_the_place(ranks):
    (found,) = ranks.run(joined_by_a_thread, world_size=1)
    assert found["value"] == 0.03
    assert found["joined"] == found["at"] and found["at"][0] >= 100 and found["step"] == found["at"][0] + 1
    assert "load checkpoints only where members.joins is None" in found["refused"]
    assert found["left_s"] < 30  # and not the minute that leave() waits at most


def seen():
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def rounds(rank, world_size):
    module, counts = nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(5):
        members = fusedcomm.Members()
        comm = fusedcomm.GradReducer(module, "int8", members=members, quiet=True)
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        members.leave()
        comm.detach()
        del comm, members
        torch.distributed.barrier()
        counts.append(seen())
    return counts


def test_rounds_of_members_leave_no_threads_and_descriptors_behind(ranks):
    for counts in ranks.run(rounds, world_size=2):
        for first, last in zip(counts[1], counts[-1], strict=True):
            assert last <= first + 2, counts  # a thread may be about to end


def times_of_passes(rank, world_size):
    module = nn.Linear(4, 2)
    with fusedcomm.Members() as members:
        comm = fusedcomm.GradReducer(module, "fp32", members=members, quiet=True)
        for _ in range(3):
            module(torch.ones(2, 4)).sum().backward()
        return comm.native.observer.take_pass_ends()


def test_members_keep_no_time_of_each_pass(ranks):
    """Nobody takes them, so they would pile up: on a device with an event each."""
    assert ranks.run(times_of_passes, world_size=1) == [[]]


def handled(rank, world_size):
    found = {}
    with fusedcomm.Members() as members:
        model = parallel(members)
        one_pass(model)
        found["repr"], found["dir"] = repr(members), dir(members)
        average = AveragedModel(model)
        average.update_parameters(model)
        for copied in (average, copy.deepcopy(model), read(file_of(model))):
            with torch.no_grad():
                assert torch.equal(copied(torch.ones(1, 4)), model(torch.ones(1, 4)))
        found["copy"] = repr(copy.copy(members))
    found["left"] = repr(members)
    return found


def test_members_are_a_context_and_tell_what_they_are_and_copies_of_their_models_compute(ranks):
    (found,) = ranks.run(handled, world_size=1)
    assert found["repr"].startswith("<fusedcomm.Members: rank 0 of 1 at ") and found["repr"].endswith("step 1>")
    assert found["left"].endswith("step 1, has left>")
    assert "step" in found["dir"] and not [name for name in found["dir"] if name.startswith("_")]
    assert found["copy"] == "<fusedcomm.Members: a copy, and none of them>"
