"""Searches of a GradReducer: config="auto"."""

import contextlib
import functools
import gc
import io
import os
import random
import time

import pytest
import torch
from models import Gradients, integers, mean_of_integers, reducer_of, synchronize, threads_of_engine
from patience import patient

from fusedcomm.autotune.auto import Auto
from fusedcomm.config import Config, Feedback

NUM_WEIGHTS = 12
SHAPES = ((512, 512),) * NUM_WEIGHTS
"""Twelve gradients of 1 MiB in fp32."""


class Clock:
    """Sets how long a step takes; call it before each step. Time is the test's own clock, so that the search makes the
    same choice on a busy machine.

    ms: milliseconds of a step by wire. Each rank adds a random time below 0.1 ms.
    """

    def __init__(self, reducer, rank, **ms):
        self._tuner, self._ms = reducer.runs, ms
        self._chance, self._ends_ms = random.Random(rank), []
        take = self._tuner._target.take_pass_ends

        self._tuner._target.take_pass_ends = lambda: self._ends_ms[-1 - len(take()) : -1]

    def __call__(self):
        """Notes the end of the step that begins now. The candidate may change at its beginning, so it is the one before
        that decides; steps to warm up are not timed."""
        before = self._ends_ms[-1] if self._ends_ms else 0.0
        self._ends_ms.append(before + self._ms[self._tuner.session.config.wire] + 0.1 * self._chance.random())


@functools.cache
def of_factor(rank, factor, shapes):
    return [factor * integers(rank + 10 * i, shape) for i, shape in enumerate(shapes)]


@functools.cache
def mean_of_factor(world_size, factor, shapes):
    of_ranks = (of_factor(rank, factor, shapes) for rank in range(world_size))
    return [sum(parts) / world_size for parts in zip(*of_ranks, strict=True)]


def gradients(rank, step, shapes=SHAPES):
    return of_factor(rank, step % 2 + 1, shapes)


def mean(world_size, step, shapes=SHAPES):
    return mean_of_factor(world_size, step % 2 + 1, shapes)


def searched(rank, world_size, ms, config):
    """Trains until two steps after the search. Returns (tuning, each step's wire, whether each step's gradients are
    right, the plan)."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, config)
    clock = Clock(reducer, rank, **ms)
    wires, right, last = [], [], None
    while last is None or len(wires) < last + 3:
        step = len(wires)
        clock()
        seen = synchronize(model, gradients(rank, step))
        wires.append(reducer.plan().config.wire)
        # Sums of two ranks' integers are exact in fp32 and in bf16. A code of int8 has a step below .1.
        atol = 0.2 if wires[-1] == "int8" else 0.0
        wanted = mean(world_size, step)
        right.append(all(torch.allclose(a, b, rtol=0, atol=atol) for a, b in zip(seen, wanted, strict=True)))
        if last is None and reducer.tuning().finished:
            last = step
    tuning, plan = reducer.tuning(), str(reducer.plan())
    reducer.detach()
    return tuning, wires, right, plan


@pytest.mark.parametrize("best", ["fp32", "bf16", "int8"])
def test_auto_tries_fp32_and_two_wires_and_keeps_the_fastest(ranks, best):
    ms = {"fp32": 40, "bf16": 39.5, "int8": 39.2, **({best: 20} if best != "fp32" else {})}
    outcome = ranks.run(searched, ms, "auto", world_size=2)
    for tuning, wires, right, plan in outcome:
        assert tuning == outcome[0][0] and all(right) and tuning.finished and tuning.chosen == best
        assert tuning.candidates == ("fp32", "bf16", "int8") and tuning.num_steps == tuning.max_steps == 36
        assert set(wires) == {"fp32", "bf16", "int8"} and set(wires[36:]) == {best}
        assert f"{best} chosen by config='auto' in 36 steps" in plan and "off" not in plan


def test_codes_are_searched_with_error_feedback_and_nothing_is_lost(ranks):
    for chosen, wires, missing, residual in ranks.run(with_error_feedback, world_size=2):
        assert chosen.startswith("Config(wire='int4'") and wires == {"fp32", "int8", "int4"}
        assert missing < 1e-3 and residual > 0


def with_error_feedback(rank, world_size):
    """Returns (the choice, the wires that ran, the largest error of the sum of all steps' gradients plus the residual,
    the residual's largest element)."""
    shapes = ((512, 300), (512, 600), (512, 700))
    model = Gradients(*shapes)
    reducer = reducer_of(model, Auto([Config(wire, "two-shot", feedback=Feedback()) for wire in ("int8", "int4")]))
    clock = Clock(reducer, rank, fp32=60, int8=40, int4=20)

    def of(rank, step):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return [torch.randn(shape, generator=generator) for shape in shapes]

    delivered = [torch.zeros(shape).double() for shape in shapes]
    wanted = [torch.zeros(shape).double() for shape in shapes]
    wires, step = set(), 0
    while step < 3 or not reducer.tuning().finished:
        clock()
        for total, value in zip(delivered, synchronize(model, of(rank, step)), strict=True):
            total += value
        for total, *parts in zip(wanted, *(of(r, step) for r in range(world_size)), strict=True):
            total += sum(parts) / world_size
        wires.add(reducer.plan().config.wire)
        step += 1
    residuals = reducer.state_dict(consolidated=True)["residuals"]
    kept = [residuals[f"weights.{i}"].view(shape) for i, shape in enumerate(shapes)]
    missing = max((a + b - c).abs().max().item() for a, b, c in zip(delivered, kept, wanted, strict=True))
    chosen = reducer.tuning().chosen
    reducer.detach()
    return chosen, wires, missing, max(value.abs().max().item() for value in kept)


# ---- the ranks' own clocks, and other ways to run a step


def on_own_clock(rank, world_size, every, freezes):
    """Trains through a search without a clock of the test's. Returns (tuning, whether each step's gradients are right,
    the sums of the last step's gradients)."""
    shapes = ((300, 100), (512, 512), (512, 300), (512, 300))
    model = Gradients(*shapes)
    reducer = reducer_of(model, Auto(("bf16",)), every=every)
    right, last, step = [], None, 0
    while last is None or step < last + 3:
        if freezes and step in (7, 12):
            model.weights[0].requires_grad_(step == 12)
        model.zero_grad(set_to_none=True)
        for _ in range(every):
            with reducer.no_sync():
                model(gradients(rank, step, shapes)).backward()
            model(gradients(rank, step, shapes)).backward()
        wanted = [2 * every * value for value in mean(world_size, step, shapes)]
        # Sums of four ranks' gradients are even numbers up to 256, so they are exact in bf16, too.
        right += [
            torch.equal(w.grad, value) for w, value in zip(model.weights, wanted, strict=True) if w.grad is not None
        ]
        if last is None and reducer.tuning().finished:
            last = step
        step += 1
    tuning = reducer.tuning()
    reducer.detach()
    return tuning, all(right), [w.grad.sum().item() for w in model.weights]


@pytest.mark.sampled  # a search takes many steps; make test runs one
@pytest.mark.parametrize(("every", "freezes"), [(1, True), (1, False), (2, False)])
def test_all_ranks_choose_alike_by_their_own_clocks(ranks, every, freezes):
    outcome = ranks.run(on_own_clock, every, freezes)
    for tuning, right, sums in outcome:
        assert tuning.finished and right and list(tuning.step_ms) == ["fp32", "bf16"]
        assert tuning == outcome[0][0] and sums == outcome[0][2]
        assert tuning.num_steps == tuning.max_steps


def alone(rank, world_size):
    model = Gradients(*SHAPES[:2])
    found = []
    for wire in ("auto", "bf16"):
        reducer = reducer_of(model, wire)
        seen = synchronize(model, gradients(0, 0)[:2])
        found.append(
            (reducer.tuning(), all(torch.equal(*pair) for pair in zip(seen, gradients(0, 0)[:2], strict=True)))
        )
        reducer.detach()
    return found


def test_one_rank_has_nothing_to_search_for(ranks):
    ((auto, first), (none, second)) = ranks.run(alone, world_size=1)[0]
    assert first and second and none is None
    assert auto.finished and (auto.chosen, auto.num_steps) == ("fp32", 0)


# ---- its life


def threads_settle_at(wanted: int) -> int:
    """The number of engine threads, once it is `wanted` or after two seconds: dropped engines take time to end."""
    deadline = time.monotonic() + patient(2)
    while (found := threads_of_engine()) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def ended(rank, world_size):
    gc.collect()  # ends the engines that earlier tests have dropped
    before = threads_of_engine()
    model = Gradients(*SHAPES[:2])
    values = [integers(rank, shape) for shape in SHAPES[:2]]
    reducer = reducer_of(model, "auto")
    clock = Clock(reducer, rank, fp32=40, bf16=20, int8=30)
    synchronize(model, values, steps=12)
    during = threads_of_engine()
    reducer.detach()
    left = [threads_settle_at(before) - before]
    own = all(torch.equal(a, b) for a, b in zip(synchronize(model, values), values, strict=True))
    again = reducer_of(model, "bf16")
    mean_again = torch.equal(synchronize(model, values)[0], mean_of_integers(world_size, SHAPES[0]))
    again.detach()
    # One is dropped with its model while it searches; of one that has ended its search only the chosen engine is left.
    dropped = Gradients(*SHAPES[:2])
    reducer_of(dropped, "auto")
    synchronize(dropped, values, steps=12)
    del dropped, reducer, again, clock
    gc.collect()
    left.append(threads_settle_at(before) - before)
    plain = reducer_of(model, "bf16")
    one = threads_of_engine() - before
    plain.detach()
    threads_settle_at(before)
    searching = reducer_of(model, "auto")
    clock = Clock(searching, rank, fp32=40, bf16=20, int8=30)
    while not searching.tuning().finished:
        clock()
        synchronize(model, values)
    left.append(threads_settle_at(before + one) - before - one)
    searching.detach()
    return during > before + one, left, own, mean_again


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads in /proc")
def test_a_search_leaves_no_threads_when_it_ends_or_is_ended(ranks):
    for has_several, left, own, mean_again in ranks.run(ended, world_size=2):
        assert has_several and left == [0, 0, 0] and own and mean_again


def failing(rank, world_size):
    """On rank 1 the search fails between two passes. Returns (passes that succeeded, errors)."""
    model = Gradients(*SHAPES[:2])
    reducer = reducer_of(model, "auto")
    values = [integers(rank, shape) for shape in SHAPES[:2]]
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
            synchronize(model, values)
            passed += 1
        except Exception as error:
            errors.append(str(error))
    reducer.detach()
    return passed, errors


def test_what_fails_between_passes_fails_on_every_rank(ranks):
    (passed, first), (passed_too, own) = ranks.run(failing, world_size=2)
    assert passed == passed_too == 3 and len(first) == len(own) == 3
    assert all("rank 1 of 2: between two backward passes:" in text for text in (*first, *own[1:]))
    assert all("the search's own trouble" in text for text in (*first, *own))


def printed(rank, world_size):
    os.environ.pop("FUSEDCOMM_QUIET", None)
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            model = Gradients(*SHAPES)
            from fusedcomm import GradReducer

            reducer = GradReducer(model, Auto(("bf16",)))
            clock = Clock(reducer, rank, fp32=40, bf16=30)
            while not reducer.tuning().finished:
                clock()
                synchronize(model, gradients(rank, 0))
            synchronize(model, gradients(rank, 0), steps=3)
    finally:
        os.environ["FUSEDCOMM_QUIET"] = "1"
    tuning = str(reducer.tuning())
    reducer.detach()
    return out.getvalue(), tuning


def test_rank_0_reports_what_is_tried_and_what_was_chosen_once(ranks):
    (first, report), (second, _) = ranks.run(printed, world_size=2)
    assert first.startswith("fusedcomm: config='auto' tries fp32, bf16, step 0 of 24: no times")
    assert first.count(" tries ") == 1 and second == ""
    assert first.count("bf16 chosen by config='auto' in 24 steps: fp32 40") == 1 and "fp32 40" in report
