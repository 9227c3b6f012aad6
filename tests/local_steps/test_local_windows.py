"""LocalSteps with windows of time, every="20s". Ranks whose clocks advance by their own step's time make exactly known
steps in each window; the parameters are whole numbers and sums of them that float32 holds exactly."""

import itertools
import math
import threading
import time
import types
import warnings

import pytest
import torch
from models import error_of
from patience import HANG_S
from plain_simulation import Net, Run
from test_local_state import begun, file_of, read
from test_local_steps import flat
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.local_steps import windows

SECONDS = 16.0
STEP_S = (2.0, 4.0, 8.0, 8.0)
"""Of each rank: 8, 4, 2 and 2 steps in a window, whose sum is a power of two."""
MOVES = (64.0, -32.0, 16.0, -96.0)
"""What each rank adds to its parameters in a step."""
MESSAGES = 6


class Clock:
    """Stands in for `time` where windows are measured."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(windows, "time", types.SimpleNamespace(monotonic=lambda: self.now))


def model_of(fragments):
    """A parameter of zeros for each fragment."""
    model = nn.Sequential(*(nn.Linear(4, 2, bias=False) for _ in range(fragments)))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def until_arrived(comm):
    for _ in range(HANG_S * 1000):
        if comm.window._began is not None:
            return
        threading.Event().wait(0.001)
    raise AssertionError("the message has not arrived")


def trained(rank, world_size, fragments, delay, weights):
    """(message, steps made, each fragment's value) after each message, and each value after finish()."""
    seen = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock, model = Clock(monkeypatch), model_of(fragments)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"delay": delay, "fragments": fragments, "weights": weights, "config": "fp32", "quiet": True}
        comm = fusedcomm.LocalSteps(model, optimizer, f"{SECONDS:g}s", **options)
        while comm.num_messages < MESSAGES:
            clock.now += STEP_S[rank]
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, -MOVES[rank])
            before = comm.num_messages
            optimizer.step()
            if comm.num_messages > before:
                until_arrived(comm)
                values = [parameter.unique().item() for parameter in model.parameters()]
                seen.append((comm.num_messages, comm.steps, values))
        comm.finish()
        seen.append([parameter.unique().item() for parameter in model.parameters()])
        comm.detach()
    return seen


class Rank:
    """One rank of the simulation. `values` and `merged` are of each fragment."""

    def __init__(self, rank, fragments, delay, is_weighted):
        self.step_s, self.move, self.delay, self.is_weighted = STEP_S[rank], MOVES[rank], delay, is_weighted
        self.values, self.counted, self.steps = [0.0] * fragments, [0] * fragments, 0
        self.under_way = []  # (fragment, step after which it is merged, snapshot)

    def window(self, fragment, merged, seconds):
        """Steps until the window is over. Returns (snapshot, weight)."""
        for _ in range(math.ceil(seconds / self.step_s)):
            self.steps += 1
            self.values = [value + self.move for value in self.values]
            self.merge(merged, lambda _, due: due <= self.steps)
        self.merge(merged, lambda index, _: index == fragment)
        snapshot, weight = self.values[fragment], self.steps - self.counted[fragment] if self.is_weighted else 1
        self.counted[fragment] = self.steps
        self.under_way.append((fragment, self.steps + self.delay, snapshot))
        return snapshot, weight

    def merge(self, merged, is_due):
        """Ends merges: z + (merged − snapshot)."""
        for index, due, snapshot in [each for each in self.under_way if is_due(*each[:2])]:
            self.values[index] += merged[index] - snapshot
            self.under_way.remove((index, due, snapshot))


def simulated(world_size, fragments, delay, is_weighted):
    """What trained() returns, of each rank."""
    ranks = [Rank(rank, fragments, delay, is_weighted) for rank in range(world_size)]
    merged, seen = [0.0] * fragments, [[] for _ in ranks]

    def mean(told):
        return sum(value * weight for value, weight in told) / sum(weight for _, weight in told)

    for message in range(MESSAGES):
        fragment = message % fragments
        told = [rank.window(fragment, merged, SECONDS / fragments) for rank in ranks]
        merged[fragment] = mean(told)
        for rank, found in zip(ranks, seen, strict=True):
            if delay == 0:
                rank.merge(merged, lambda *_: True)
            found.append((message + 1, rank.steps, list(rank.values)))
    return seen


@pytest.mark.parametrize(
    ("fragments", "delay", "weights"),
    [(1, 0, "steps"), (1, 1, "steps"), (1, 3, "steps"), (2, 1, "steps"), (2, 3, "steps"), (1, 1, None)],
)
def test_each_rank_makes_its_own_steps_in_a_window_and_merges_weigh_them(ranks, fragments, delay, weights):
    # With delay=3 the slowest ranks make 2 steps in a window, so the next window ends their merge.
    outcomes = ranks.run(trained, fragments, delay, weights, world_size=4)
    expected = simulated(4, fragments, delay, weights == "steps")
    for (*messages, ended), of_rank in zip(outcomes, expected, strict=True):
        assert messages == of_rank
        assert ended == outcomes[0][-1]
    assert [messages[-2][1] for messages in outcomes] == [SECONDS / fragments * MESSAGES / step for step in STEP_S]


def by_the_clock(rank, world_size):
    """(steps, merges, parameters after finish(), whether a state of then can be loaded) after two seconds in which the
    last rank's steps take three times as long."""
    run = Run("corrected", every="0.2s", delay=2, fragments=2, width=100)
    model, optimizer, comm = begun(run, "int4", weights="steps")
    began = time.monotonic()
    for step in itertools.count(1):
        run.step(model, optimizer, rank, step)
        time.sleep(0.03 if rank == world_size - 1 else 0.01)
        if time.monotonic() - began > 2:
            break
    steps, merges = comm.steps, comm.num_messages
    refusal = error_of(RuntimeError, comm.state_dict)
    comm.finish()
    after, saved = flat(model).clone(), file_of(comm.state_dict())
    comm.load_state_dict(read(saved))
    for again in range(step, step + 5 * (1 + rank)):
        run.step(model, optimizer, rank, again)
    comm.finish()
    comm.detach()
    return steps, merges, after, flat(model).clone(), refusal


def test_a_slow_rank_makes_fewer_steps_and_all_end_with_equal_parameters(ranks):
    outcomes = ranks.run(by_the_clock, world_size=3)
    assert outcomes[2][0] < min(outcomes[0][0], outcomes[1][0])
    for _, merges, after, later, refusal in outcomes:
        assert 2 <= merges <= 20  # two fragments: at most one in 0.1 s
        assert torch.equal(after, outcomes[0][2]) and torch.equal(later, outcomes[0][3])
        assert "every='0.2s'" in refusal and "finish() before saving" in refusal


def too_short(rank, world_size):
    """(merges of 8 steps, what was warned of) where only the second rank's steps are longer than the window."""
    run = Run("corrected", every="10s", delay=0)
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        clock = Clock(monkeypatch)
        model, optimizer, comm = begun(run)
        for step in range(1, 9 if rank else 33):
            clock.now += 12.0 if rank else 3.0
            run.step(model, optimizer, rank, step)
            until_arrived(comm)
        merges, plan = comm.num_messages, comm.plan(bits_s=1e6, step_s=0.5)
        comm.detach()
    return merges, [str(each.message) for each in caught if "every=" in str(each.message)], str(plan)


def test_a_window_shorter_than_a_step_merges_each_step_and_says_so_once(ranks):
    (merges, nothing, plan), (of_slow, warned, _) = ranks.run(too_short, world_size=2)
    assert merges == of_slow == 8 and nothing == []
    (text,) = warned
    assert "every='10s' leaves 10 s" in text and "a step of rank 1 takes longer" in text
    assert "every 10s, 0 steps late" in plan and 'every="1s" is the least that hides them' in plan


def refused(rank, world_size):
    ddp = DistributedDataParallel(Net(), process_group=torch.distributed.new_subgroups(1)[0])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    return error_of(ValueError, fusedcomm.LocalSteps, ddp, optimizer, "20s", quiet=True)


def test_ranks_that_step_together_are_refused(ranks):
    for text in ranks.run(refused, world_size=2):
        assert "every='20s'" in text and "after the same step" in text
