"""Members that end and come back: their place in training and data, what a rank gets that joins, what leave() frees."""

import copy
import gc
import io
import os
import threading
import timeit

import pytest
import torch
from models import error_of
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fusedcomm
from fusedcomm.members import state

DATA = range(48)


def parallel(members, module=None):
    return fusedcomm.DataParallel(
        module or nn.Linear(4, 2), config="fp32", members=members, broadcast_buffers=False, quiet=True
    )


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
        states = torch.load(io.BytesIO(saved), weights_only=True)
        sampler.load_state_dict(states["sampler"])
        members.load_state_dict(states["members"])
    model, seen = parallel(members), []
    loader = torch.utils.data.DataLoader(DATA, batch_sampler=sampler)
    assert len(loader) == (48 - 4 * members.num_microbatches) // (4 * world_size)
    batches = iter(loader)
    while members.step < until:
        seen += next(batches).tolist()
        one_pass(model)
    written = io.BytesIO()
    torch.save({"members": members.state_dict(), "sampler": sampler.state_dict()}, written)
    members.leave()
    return seen, written.getvalue()


def test_a_resumed_run_goes_on_with_its_step_and_each_sample_comes_once_on_any_number_of_ranks(ranks):
    first = ranks.run(resumed, None, 4, world_size=2)  # 4 steps of 2 batches
    (second,) = ranks.run(resumed, first[0][1], 8, world_size=1)
    assert first[0][1] == first[1][1]
    assert sorted(first[0][0] + first[1][0] + second[0]) == list(DATA)


def loaded_by_one(rank, world_size):
    members = fusedcomm.Members()
    model = parallel(members)
    if rank == 1:
        members.load_state_dict({"step": 6, "num_microbatches": 12})
    text = error_of(RuntimeError, one_pass, model)
    members.leave()
    return text


def test_a_state_that_not_all_ranks_have_loaded_is_an_error_of_all(ranks):
    first, second = ranks.run(loaded_by_one, world_size=2)
    assert first == second
    assert "rank 0 at step 0 after 0, rank 1 at step 6 after 12" in first and "on every rank" in first


def what_is_no_state(rank, world_size):
    members = fusedcomm.Members()
    sampler = fusedcomm.MembersSampler(DATA, members, batch_size=4)
    bad = ([], {"step": 1}, {"step": -1, "num_microbatches": 0})
    texts = [error_of(ValueError, members.load_state_dict, each) for each in bad]
    texts.append(error_of(ValueError, sampler.load_state_dict, {**sampler.state_dict(), "batch_size": 8}))
    model = parallel(members)
    one_pass(model)
    texts.append(error_of(RuntimeError, members.load_state_dict, {"step": 6, "num_microbatches": 12}))
    members.leave()
    return texts


def test_what_is_no_state_of_this_training_is_refused(ranks):
    (texts,) = ranks.run(what_is_no_state, world_size=1)
    assert "found a list" in texts[0] and "found ['step']" in texts[1] and "state['step']" in texts[2]
    assert "saved with batch_size=8, and here it is 4" in texts[3]
    assert "have made 1 steps: load it on every rank before the first one" in texts[4]


def beside_a_joiner(carried, joiner, change=None):
    """Founds members here, has a rank join on another thread, and trains until both have made a step together. Returns
    (this rank's object, the joiner's), each with what its members say."""
    members = fusedcomm.Members()
    if change is not None:
        members.on_change(lambda decision: change(decision, carried))
    members.load_state_dict({"step": 100, "num_microbatches": 7})
    model = parallel(members)
    members.carry(it=carried)
    found = {}

    def join():
        own = fusedcomm.Members(join=members.address)
        made = parallel(own)
        own.carry(it=joiner)
        found["joined"] = own.step, own.num_microbatches
        found["refused"] = error_of(RuntimeError, own.load_state_dict, {"step": 6, "num_microbatches": 12})
        one_pass(made)
        found["step"] = own.step

    thread = threading.Thread(target=join)
    thread.start()
    while members.size == 1:
        found["at"] = members.step, members.num_microbatches
        one_pass(model)
    thread.join()
    found["left_s"] = timeit.timeit(members.leave, number=1)
    return found


def stale_rate(rank, world_size):
    asked, answered = threading.Event(), threading.Event()
    skeleton = state.Transfer.skeleton

    def noted(self):
        if self._header["name"] == "it":
            asked.set()
        found = skeleton(self)
        if self._header["name"] == "it":
            answered.set()
        return found

    def change(decision, carried):
        if decision.joined:
            asked.wait(1)  # a member that waits for its callbacks is asked for other things first
            answered.wait(0.2)
            carried.value = 0.03

    state.Transfer.skeleton = noted
    joiner = Kept(None)
    try:
        found = beside_a_joiner(Kept(0.02), joiner, change)
    finally:
        state.Transfer.skeleton = skeleton
    return joiner.value, found


def test_a_rank_that_joins_gets_what_callbacks_of_its_coming_have_changed_and_the_place(ranks):
    ((value, found),) = ranks.run(stale_rate, world_size=1)
    assert value == 0.03
    assert found["joined"] == found["at"] and found["at"][0] >= 100 and found["step"] == found["at"][0] + 1
    assert "load checkpoints only where members.joins is None" in found["refused"]
    assert found["left_s"] < 30  # and not the minute that leave() waits at most


def refused_carry(rank, world_size):
    members = fusedcomm.Members()
    model = parallel(members)
    text = error_of(TypeError, members.carry, good=Kept(1), bad=Kept([threading.Lock()]))
    carried = sorted(members.carried)
    one_pass(model)
    members.leave()
    return text, carried


def test_what_cannot_be_carried_is_refused_by_the_rank_that_names_it(ranks):
    ((text, carried),) = ranks.run(refused_carry, world_size=1)
    assert "carry(bad=…).state_dict()['value'][0] is a _thread.lock" in text and carried == []


def seen():
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def rounds(rank, world_size, kind):
    module, counts = nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(5):
        members = fusedcomm.Members()
        if kind == "parallel":
            comm = parallel(members, module).comm
        elif kind == "reducer":
            comm = fusedcomm.GradReducer(module, "int8", members=members, quiet=True)
        else:
            comm = fusedcomm.LocalSteps(module, optimizer, 2, members=members, quiet=True)
        for _ in range(2):
            module(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        members.leave()
        comm.detach()
        del comm, members
        torch.distributed.barrier()
        counts.append(seen())
    return counts


@pytest.mark.parametrize("kind", ["reducer", "local steps"])
def test_rounds_of_members_leave_no_threads_and_descriptors_behind(ranks, kind):
    for counts in ranks.run(rounds, kind, world_size=2):
        for first, last in zip(counts[1], counts[-1], strict=True):
            assert last <= first + 2, counts  # a thread may be about to end


def handled(rank, world_size):
    found = {}
    with fusedcomm.Members() as members:
        model = parallel(members)
        one_pass(model)
        found["repr"], found["dir"] = repr(members), dir(members)
        found["misspelt"] = error_of(AttributeError, setattr, members, "min_rank", 3)
        found["read"] = error_of(AttributeError, getattr, members, "adress")
        average = AveragedModel(model)
        average.update_parameters(model)
        written = io.BytesIO()
        torch.save(model, written)
        written.seek(0)
        saved = torch.load(written, weights_only=False)
        for name, copied in {"ema": average, "deepcopy": copy.deepcopy(model), "file": saved}.items():
            with torch.no_grad():
                assert torch.equal(copied(torch.ones(1, 4)), model(torch.ones(1, 4)))
            found[name] = error_of(RuntimeError, copied, torch.ones(1, 4))
        found["copy"] = repr(copy.copy(members))
        found["in advance"] = error_of(RuntimeError, list, fusedcomm.MembersSampler(DATA, members, 4))
    found["left"] = repr(members)
    found["after"] = error_of(RuntimeError, one_pass, model)
    return found


def test_members_are_a_context_tell_what_they_are_and_take_no_name_that_they_lack(ranks):
    (found,) = ranks.run(handled, world_size=1)
    assert found["repr"].startswith("<fusedcomm.Members: rank 0 of 1 at ") and found["repr"].endswith("step 1>")
    assert found["left"].endswith("step 1, has left>")
    assert "step" in found["dir"] and not [name for name in found["dir"] if name.startswith("_")]
    assert "did you mean 'min_ranks'?" in found["misspelt"] and "has no 'adress', but" in found["read"]
    for name in ("ema", "deepcopy", "file"):
        assert "a copy of Members" in found[name] and "without gradients" in found[name]
    assert found["copy"] == "<fusedcomm.Members: a copy, and none of them>"
    assert "Workers of a DataLoader ask in advance: use num_workers=0" in found["in advance"]
    assert "has left the members: to come back make new Members" in found["after"]
