"""LocalSteps with windows of time, every="20s". On clocks that advance by each rank's own step's time the steps in each
window are known exactly; the parameters are whole numbers and sums of them that float32 holds exactly."""

import dataclasses
import itertools
import math
import time
import warnings

import on_streams
import pytest
import torch
from local_jobs import InSeconds, Job, clock, flat, until_arrived
from models import error_of
from plain_simulation import Run, simulated
from test_local_steps import check
from torch import nn

SECONDS = 16.0
STEP_S = (2.0, 4.0, 8.0, 8.0)
"""Of each rank: 8, 4, 2 and 2 steps in a window, whose sum is a power of two. Ranks 0 and 1 change places with each
window."""
MOVES = (64.0, -32.0, 16.0, -96.0)
"""What each rank adds to its parameters in a step."""
MESSAGES = 6


def step_s(rank, window):
    return STEP_S[rank ^ (window % 2) if rank < 2 else rank]


@dataclasses.dataclass(frozen=True)
class Timed(Run):
    """A parameter of zeros; each rank has its own times and MOVES."""

    def period(self):
        return f"{SECONDS:g}s"

    def model(self):
        model = nn.Linear(4, 2, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1.0)

    def loss(self, model, rank, step):
        return sum(parameter.sum() for parameter in model.parameters()) * -MOVES[rank]

    def steps_before(self, rank, message):
        return sum(math.ceil(SECONDS / step_s(rank, window)) for window in range(message + 1))

    def weight(self, num_steps):
        return num_steps


def trained(rank, world_size, runs):
    """For each run: (steps made, parameters) after each message, and the parameters after finish()."""
    found = []
    for run in runs:
        with clock() as of_rank:
            job, seen = Job(run, rank), []
            while len(seen) < MESSAGES:
                of_rank.now += step_s(rank, len(seen))
                job.train([job.comm.merges.steps + 1])
                if job.comm.merges.num_begun > len(seen):
                    until_arrived(job.comm)
                    seen.append((job.comm.merges.steps, flat(job.model)))
            found.append((seen, job.finish()))
    return found


def test_each_rank_makes_its_own_steps_in_a_window_and_merges_weigh_them(ranks, subtests):
    # With delay=3 the slowest ranks make 2 steps in a window, so the next window ends their merge.
    runs = [Timed(SECONDS, delay, 48) for delay in (0, 1, 3)]
    for run, *of_ranks in zip(runs, *ranks.run(trained, runs), strict=True):
        with subtests.test(run=str(run)):
            for expected, (seen, ended) in zip(simulated(run, 4), of_ranks, strict=True):
                for message, (steps, parameters) in enumerate(seen):
                    assert steps == run.steps_before(expected.rank, message)
                    assert parameters.tolist() == expected.seen[steps][0].tolist()
                assert torch.equal(ended, of_ranks[0][1])


def on_device(rank, world_size, run):
    """Parameters after each step, which takes a second. A message has arrived when it is read."""
    with clock() as of_rank:
        job, seen = Job(run, rank, device=on_streams.DEVICE), []
        for of_rank.now in range(1, run.steps + 1):
            seen += job.train([of_rank.now])
        job.comm.detach()
    return [each.cpu() for each in seen]


def test_windows_on_streams_begin_when_a_message_is_read(ranks_on_streams):
    run = InSeconds(every=4, delay=0, steps=10)
    for seen, expected in zip(ranks_on_streams.run(on_device, run, world_size=2), simulated(run, 2), strict=True):
        check(seen, expected)


def by_the_clock(rank, world_size):
    """(steps, merges, parameters after finish(), the same after more steps, why it cannot be saved under way) after two
    seconds in which the last rank's steps take three times as long."""
    job = Job(InSeconds(every=0.2, delay=2, width=100), rank, "int4")
    began = time.monotonic()
    for step in itertools.count(1):
        job.train([step])
        time.sleep(0.03 if rank == world_size - 1 else 0.01)
        if time.monotonic() - began > 2:
            break
    steps, merges = job.comm.merges.steps, job.comm.merges.num_begun
    refusal = error_of(RuntimeError, job.comm.state_dict)
    job.comm.finish()
    after = flat(job.model)
    job.load(job.save())
    job.train(range(step, step + 5 * (1 + rank)))
    return steps, merges, after, job.finish(), refusal


@pytest.mark.check
def test_a_slow_rank_makes_fewer_steps_and_all_end_with_equal_parameters(ranks):
    outcomes = ranks.run(by_the_clock, world_size=3)
    assert outcomes[2][0] < min(outcomes[0][0], outcomes[1][0])
    for _, merges, after, later, refusal in outcomes:
        assert 2 <= merges <= 10  # at most one in 0.2 s
        assert torch.equal(after, outcomes[0][2]) and torch.equal(later, outcomes[0][3])
        assert "call finish() before saving" in refusal


def too_short(rank, world_size):
    """(merges of 8 steps, what was warned of) where only the second rank's steps are longer than the window."""
    with clock() as of_rank, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job = Job(InSeconds(every=10, delay=0), rank)
        for step in range(1, 9 if rank else 33):
            of_rank.now += 12.0 if rank else 3.0
            job.train([step])
            until_arrived(job.comm)
        merges, plan = job.comm.merges.num_begun, job.comm.plan()
        job.comm.detach()
    return merges, [str(each.message) for each in caught if "every=" in str(each.message)], str(plan)


def test_a_window_shorter_than_a_step_merges_each_step_and_says_so_once(ranks):
    (merges, nothing, plan), (of_slow, warned, _) = ranks.run(too_short, world_size=2)
    assert merges == of_slow == 8 and nothing == []
    (text,) = warned
    assert "every='10s' leaves 10 s" in text and "a step of rank 1 takes longer" in text
    assert "every 10s, 0 steps late" in plan
