"""config="auto" on real ranks, attached to DDP and given to a GradReducer, which tries "fp32" in place of "off"."""

import contextlib
import functools
import gc
import io
import math
import os
import random
import time
import warnings

import pytest
import torch
from front_ends import FRONT_ENDS, PLAIN, adding_up
from models import (
    Gradients,
    integers,
    on_host,
    reducer_of,
    synchronize,
    synchronized,
    threads_of_engine,
    threads_settle_at,
    worst,
)
from patience import slowness
from scenarios import CASES
from step_clock import StepClock
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config
from fusedcomm.native import _C
from fusedcomm.session import session

SHAPES = ((200, 100), (30, 40))
"""The second gradient is so small that it is summed exactly in every wire."""


def gradients(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def mean_of(world_size, step):
    return [sum(parts) / world_size for parts in zip(*(gradients(r, step) for r in range(world_size)), strict=True)]


def module():
    return DistributedDataParallel(Gradients(*SHAPES), bucket_cap_mb=0.004)


class Sleeping(StepClock):
    """The same on the real clock: sleeps before each step, for longer on a slower machine."""

    def __init__(self, comm, rank, **ms):
        self._runs, self._ms, self._chance = comm.runs, ms, random.Random(rank)

    def __call__(self):
        time.sleep(self.step_ms() * slowness() / 1000)


TIMES = {"off": 60, "bf16": 30, "int8": 3}
OFF_IS_BEST = {"off": 3, "bf16": 40, "int8": 40}
OF_REDUCER = {"fp32": 60, "bf16": 30, "int8": 40}


def steps(comm, ddp, slow, gradients_of, num_more=1):
    """Takes steps until `num_more` after the search has ended. Yields the wire and the means of each. `gradients_of`:
    this rank's in a step."""
    number = 0
    while num_more >= 0:
        slow()
        seen = synchronize(ddp, gradients_of(number))
        plan = comm.plan()
        yield "off" if plan.off else plan.config.wire, seen
        number += 1
        num_more -= comm.tuning().finished


def train_to_choice(comm, ddp, rank, **ms):
    """Takes steps until the search has ended, and one more."""
    for _ in steps(comm, ddp, StepClock(comm, rank, **ms), functools.partial(gradients, rank)):
        pass


LIMITS = {"off": 1e-6, "fp32": 1e-6, "bf16": 0.01, "int8": 0.03}


def searched(rank, world_size, ms, front_end="hook", clock=StepClock):
    """Trains until two steps after the search has ended.

    Returns (tuning, each step's wire, each step's largest relative error, sums and one element of each step's
    gradients, whether off is running, the ranks of a host that sum first, the plan).
    """
    forward, comm = synchronized(front_end, Gradients(*SHAPES), "auto", bucket_mib=0.004)
    wires, errors, results = [], [], []
    slow = clock(comm, rank, **ms)
    for wire, seen in steps(comm, forward, slow, functools.partial(gradients, rank), num_more=2):
        exact = mean_of(world_size, len(wires))
        errors.append(worst(((a - b).norm() / b.norm()).item() for a, b in zip(seen, exact, strict=True)))
        wires.append(wire)
        results.append([value.sum().item() for value in seen] + [seen[0][7, 5].item()])
    tuning, stats = comm.tuning(), comm.stats()
    levels, plan = 1 if stats.off else comm.session.ranks_per_host, str(comm.plan())
    comm.detach()
    return tuning, wires, errors, results, stats.off, levels, plan


@pytest.mark.parametrize(
    ("front_end", "world_size", "ms", "best", "clock"),
    [
        ("hook", 2, TIMES, "int8", StepClock),
        ("hook", 3, OFF_IS_BEST, "off", StepClock),
        ("reducer", 2, OF_REDUCER, "bf16", StepClock),
        pytest.param("hook", 2, TIMES, "int8", Sleeping, marks=[pytest.mark.alone, pytest.mark.full]),
    ],
)
def test_all_ranks_choose_alike_and_every_step_is_right(ranks, front_end, world_size, ms, best, clock):
    outcome = ranks.run(searched, ms, front_end, clock, world_size=world_size)
    tuning, wires, errors, results, is_off, _, plan = outcome[0]
    assert tuning.finished and tuning.chosen == best and is_off == (best == "off")
    assert tuning.num_steps == tuning.max_steps == 36 and set(wires[tuning.num_steps :]) == {best}
    assert f"{best} chosen by config='auto' in 36 steps" in plan
    assert set(ms) == set(wires)
    for wire, error in zip(wires, errors, strict=True):
        assert error < LIMITS[wire]
        assert error > 1e-5 or wire in ("off", "fp32")
    for other in outcome[1:]:
        assert other[0] == tuning
        assert other[1] == wires and other[3] == results  # bit for bit
    assert list(tuning.step_ms) == list(tuning.candidates) == list(ms)
    assert all(tuning.step_ms[wire] >= each for wire, each in ms.items())


def scheduled(rank, world_size, name, front_end):
    """Trains through a search, and with DDP's own all-reduce on the same inputs.

    Returns (the largest relative error of a step's gradients, whether the search has finished, its choice, its times).
    """
    scenario = CASES[name]

    def train(front_end):
        forward, comm = front_end.make(scenario.build(), "auto", **scenario.ddp)
        num_steps, seen = (40 if not scenario.uneven else 39 + 6 * rank), []
        with Join([forward]) if scenario.uneven else contextlib.nullcontext():
            for step in range(num_steps):
                scenario.before_step(getattr(forward, "module", forward), step)
                forward.zero_grad(set_to_none=True)
                for micro in range(scenario.accumulate):
                    is_last = micro == scenario.accumulate - 1
                    x, y = scenario.batch(rank, 10 * step + micro)
                    with contextlib.nullcontext() if is_last else adding_up(forward, comm):
                        (forward(x) - y).square().mean().backward()
                given = (p.grad for p in forward.parameters() if p.grad is not None)
                seen.append(torch.cat([gradient.flatten().double() for gradient in given]))
        return seen, comm

    reference, _ = train(PLAIN)
    seen, comm = train(FRONT_ENDS[front_end])
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(seen, reference, strict=True)]
    tuning = comm.tuning()
    return max(errors), tuning.finished, tuning.chosen, tuning.step_ms


SCHEDULED = [("hook", name) for name in ("static graph", "no sync", "join", "find unused", "mixed dtypes")]
SCHEDULED += [("reducer", name) for name in ("no sync", "frozen and thawed")]


@pytest.mark.parametrize(("front_end", "name"), SCHEDULED)
def test_ways_to_run_a_step_go_through_the_search(ranks, front_end, name):
    outcome = ranks.run(scheduled, name, front_end, world_size=2)
    for error, finished, chosen, step_ms in outcome:
        assert error < 0.1 and finished and all(0 < ms < math.inf for ms in step_ms.values())
        assert (chosen, step_ms) == outcome[0][2:]


def attach_off(ddp, rank):
    """Attaches a search that has kept off."""
    comm = fusedcomm.attach(ddp, "auto", quiet=True)
    train_to_choice(comm, ddp, rank, **OFF_IS_BEST)
    assert comm.tuning().chosen == "off"
    return comm


def off_and_back(rank, world_size):
    """Trains while off leaves DDP's reducer without a hook, after detaching, and with int8 attached.

    Returns (whether each step is right, whether the reducer had a hook, what off tells, its plan).
    """
    ddp, plain = module(), module()
    comm = attach_off(ddp, rank)
    synchronize(plain, gradients(rank, 0), steps=2)  # it has its last buckets then, too
    right, hooked = [], []

    def step(number):
        values = gradients(rank, number)
        pairs = zip(synchronize(ddp, values), synchronize(plain, values), strict=True)
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    right += [step(0) == 0, step(1) == 0]
    stats, plan = comm.stats(), comm.plan()
    told = stats.off, stats.sent_nbytes, plan.scratch_nbytes, comm.nonfinite_report()
    comm.load_state_dict(comm.state_dict())
    comm.state_dict(consolidated=True)
    hooked.append(_C.remove_hook(ddp.reducer))
    right += [step(2) == 0, step(3) == 0]
    comm.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right += [step(4) == 0]
    comm = fusedcomm.attach(ddp, Config("int8"), quiet=True)
    right += [0 < step(5) < 0.02, 0 < step(6) < 0.02, comm.stats().steps == 2]
    hooked.append(_C.remove_hook(ddp.reducer))
    comm.detach()
    right += [step(7) == 0, step(8) == 0]
    hooked.append(_C.remove_hook(ddp.reducer))
    return right, hooked, told, str(plan)


@pytest.mark.parametrize("world_size", [2, 3])
def test_off_is_ddps_default_bit_for_bit_and_off_and_detach_leave_no_hook_behind(ranks, world_size):
    for right, hooked, told, plan in ranks.run(off_and_back, world_size=world_size):
        # With a torch that does not let go of a hook, off divides gradients in a separate pass.
        assert all(right) and hooked == [False, True, False]
        assert told == (True, 0, 0, [])
        assert "off, DDP's own exact all-reduce" in plan and "sent as it is" in plan
        assert "off chosen by config='auto' in 36 steps" in plan


def searched_on_hosts(rank, world_size, names):
    with on_host(names[rank]):
        return searched(rank, world_size, TIMES)


def test_ranks_that_share_hosts_sum_on_two_levels(ranks):
    outcome = ranks.run(searched_on_hosts, ["a", "b", "a", "b"])
    for tuning, _, errors, results, _, levels, _ in outcome:
        assert tuning.chosen == "int8" and levels == 2
        assert results == outcome[0][3] and worst(errors) < 2 * LIMITS["int8"]


def alone(rank, world_size):
    model, own = Gradients(*SHAPES), [integers(rank, shape) for shape in SHAPES]
    found = []
    for wire in ("auto", "bf16"):
        reducer = reducer_of(model, wire)
        found.append((reducer.tuning(), all(map(torch.equal, synchronize(model, own), own))))
        reducer.detach()
    return found


def test_one_rank_has_nothing_to_search_for(ranks):
    ((auto, first), (none, second)) = ranks.run(alone, world_size=1)[0]
    assert first and second and none is None
    assert auto.finished and (auto.chosen, auto.num_steps) == ("fp32", 0)


# --- process groups, errors -----------------------------------------------------------------------------------------


def failing(rank, world_size):
    ddp = module()
    comm = fusedcomm.attach(ddp, "auto", quiet=True)

    def fail():
        raise LookupError("the search's own trouble")

    comm.runs._end_turn = fail
    synchronize(ddp, gradients(rank, 0), steps=comm.runs._turns.num_steps)
    with pytest.raises(LookupError, match="the search's own trouble"):
        synchronize(ddp, gradients(rank, 0))
    comm.detach()


def test_what_fails_between_passes_is_the_error_of_the_backward_pass(ranks):
    ranks.run(failing, world_size=2)


def failing_on_rank_1(rank, world_size):
    """Fails between two passes of a GradReducer. Returns (passes that succeeded, errors)."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, "auto")
    if rank == 1:
        count = reducer.runs._count_pass

        def fail():
            if reducer.runs._num_passes == 3:
                raise LookupError("the search's own trouble")
            count()

        reducer.runs._count_pass = fail
    passed, errors = 0, []
    for _ in range(6):
        try:
            synchronize(model, gradients(rank, 0))
            passed += 1
        except Exception as error:
            errors.append(str(error))
    reducer.detach()
    return passed, errors


def failing_and_collected(rank, world_size):
    found = failing_on_rank_1(rank, world_size)
    gc.collect()  # `fail` keeps a watch in a cycle, which would wait for its store when the group is gone
    return found


def test_what_fails_between_passes_of_a_reducer_fails_on_every_rank(ranks):
    (passed, first), (passed_too, own) = ranks.run(failing_and_collected, world_size=2)
    assert passed == passed_too == 3 and len(first) == len(own) == 3
    assert all("rank 1 of 2: between two backward passes:" in text for text in (*first, *own[1:]))
    assert all("the search's own trouble" in text for text in (*first, *own))


# --- what goes wrong ------------------------------------------------------------------------------------------------


def without(rank, world_size):
    """On rank 1 there is no memory for int8's session. Returns the text of attach's error, and engine threads left."""
    gc.collect()
    before, make = threads_of_engine(), session.Session._connect

    def connect(self, *arguments):
        if rank == 1 and self.config.wire == "int8":
            raise MemoryError("no memory for int8")
        return make(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.Session, "_connect", connect)
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            fusedcomm.attach(module(), "auto", quiet=True)
    text = str(raised.value)
    del raised
    return text, threads_settle_at(before) - before


def test_a_candidate_that_one_rank_cannot_have_is_an_error_of_all(ranks):
    for text, threads in ranks.run(without, world_size=2):
        assert "no memory for int8" in text and threads == 0


def traced_at(rank, world_size, path):
    ddp, errors = module(), []

    def attempt():
        try:
            with comm.trace(path):
                synchronize(ddp, gradients(rank, 0))
        except RuntimeError as error:
            return str(error)
        return "traced"

    for ms in (None, OFF_IS_BEST, TIMES):
        comm = fusedcomm.attach(ddp, "auto", quiet=True)
        if ms is not None:
            train_to_choice(comm, ddp, rank, **ms)
        errors.append(attempt())
        comm.detach()
    return errors


def test_only_what_has_been_chosen_can_be_traced(ranks, tmp_path):
    for searching, off, chosen in ranks.run(traced_at, str(tmp_path / "trace.json"), world_size=2):
        assert "still searching" in searching and "after comm.tuning().finished" in searching
        assert "torch's own sums run" in off
        assert chosen == "traced"
    assert (tmp_path / "trace.json").exists()


def detached_while_searching(rank, world_size):
    gc.collect()  # ends the engines that earlier tests have dropped
    before = threads_of_engine()
    ddp = module()
    comm = fusedcomm.attach(ddp, "auto", quiet=True)
    synchronize(ddp, gradients(rank, 0), steps=14)
    comm.detach()
    seen = synchronize(ddp, gradients(rank, 1))
    same = all(torch.allclose(a, b) for a, b in zip(seen, mean_of(world_size, 1), strict=True))
    again = fusedcomm.attach(ddp, "bf16", quiet=True)
    synchronize(ddp, gradients(rank, 1))
    buckets, tuning, of_one = again.stats().buckets, again.tuning(), threads_of_engine() - before
    again.detach()
    searching = fusedcomm.attach(ddp, "auto", quiet=True)
    train_to_choice(searching, ddp, rank, **TIMES)
    num_of_chosen = threads_settle_at(before + of_one) - before - of_one
    searching.detach()
    # No thread works or watches once off is kept. `dropped` is dropped without detach().
    off = attach_off(ddp, rank)
    num_of_off = threads_settle_at(before) - before
    off.detach()
    dropped = module()
    fusedcomm.attach(dropped, "auto", quiet=True)
    synchronize(dropped, gradients(rank, 0))
    del dropped, comm, again, searching
    gc.collect()
    return same, buckets > 0, tuning, [num_of_chosen, num_of_off, threads_settle_at(before) - before]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads in /proc")
def test_a_search_can_be_ended_by_detaching_and_by_dropping_the_module(ranks):
    for same, counted, tuning, threads in ranks.run(detached_while_searching, world_size=2):
        assert same and counted and tuning is None and threads == [0, 0, 0]


def printed(rank, world_size):
    os.environ.pop("FUSEDCOMM_QUIET", None)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            ddp = module()
            comm = fusedcomm.attach(ddp, "auto")
            train_to_choice(comm, ddp, rank, **TIMES)
            synchronize(ddp, gradients(rank, 0), steps=3)
    finally:
        os.environ["FUSEDCOMM_QUIET"] = "1"
    return out.getvalue(), str(comm.tuning())


def test_rank_0_prints_what_is_tried_and_what_was_chosen_once(ranks):
    (first, report), (second, _) = ranks.run(printed, world_size=2)
    assert first.startswith("fusedcomm: config='auto' tries off, bf16, int8, step 0 of 36: no times\n")
    assert "\n  now off, DDP's own exact all-reduce, 2 ranks\n" in first
    assert "\nfusedcomm: int8 chosen by config='auto' in 36 steps" in first and "\n  now wire int8, sum auto" in first
    assert first.count(" tries off") == 1 and first.count("int8 chosen by") == 1
    assert "off 6" in first and second == "" and "int8 chosen by" in report
