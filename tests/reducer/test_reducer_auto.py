"""Searches of a GradReducer: config="auto". tests/autotune has what any search does."""

import functools
import gc

import pytest
import torch
from models import Gradients, integers, reducer_of, synchronize
from step_clock import StepClock

SHAPES = ((512, 64),) * 4


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


def searched(rank, world_size):
    """Trains until two steps after the search, for each wire that may be the best. Returns by it (tuning, each step's
    wire, whether each step's gradients are right, the plan)."""
    found = {}
    for best in ("fp32", "bf16", "int8"):
        model = Gradients(*SHAPES)
        reducer = reducer_of(model, "auto")
        clock = StepClock(
            reducer, rank, **{"fp32": 40, "bf16": 39.5, "int8": 39.2, **({best: 20} if best != "fp32" else {})}
        )
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
        found[best] = reducer.tuning(), wires, right, str(reducer.plan())
        reducer.detach()
    return found


def test_auto_tries_fp32_and_two_wires_and_keeps_the_fastest(ranks):
    outcome = ranks.run(searched, world_size=2)
    for found in outcome:
        for best, (tuning, wires, right, plan) in found.items():
            assert tuning == outcome[0][best][0] and all(right) and tuning.finished and tuning.chosen == best
            assert tuning.candidates == ("fp32", "bf16", "int8") and tuning.num_steps == tuning.max_steps == 36
            assert set(wires) == {"fp32", "bf16", "int8"} and set(wires[36:]) == {best}
            assert f"{best} chosen by config='auto' in 36 steps" in plan and "off" not in plan


# ---- the ranks' own clocks, and other ways to run a step


def on_own_clock(rank, world_size, freezes):
    """Trains through a search without a clock of the test's. Returns (tuning, whether each step's gradients are right,
    the sums of the last step's gradients)."""
    shapes = ((300, 10), (512, 51), (51, 300), (51, 300))
    model = Gradients(*shapes)
    reducer = reducer_of(model, "auto")
    right, last, step = [], None, 0
    while last is None or step < last + 3:
        if freezes and step in (7, 12):
            model.weights[0].requires_grad_(step == 12)
        model.zero_grad(set_to_none=True)
        with reducer.no_sync():
            model(gradients(rank, step, shapes)).backward()
        model(gradients(rank, step, shapes)).backward()
        wanted = [2 * value for value in mean(world_size, step, shapes)]
        # Sums of four ranks' gradients are even numbers up to 256, so they are exact in bf16, too.
        atol = 0.5 if reducer.plan().config.wire == "int8" else 0.0
        right += [
            torch.allclose(w.grad, value, rtol=0, atol=atol)
            for w, value in zip(model.weights, wanted, strict=True)
            if w.grad is not None
        ]
        if last is None and reducer.tuning().finished:
            last = step
        step += 1
    tuning = reducer.tuning()
    reducer.detach()
    return tuning, all(right), [w.grad.sum().item() for w in model.weights]


@pytest.mark.sampled  # a search takes many steps; make test runs one
@pytest.mark.parametrize("freezes", [True, False])
def test_all_ranks_choose_alike_by_their_own_clocks(ranks, freezes):
    outcome = ranks.run(on_own_clock, freezes)
    for tuning, right, sums in outcome:
        assert tuning.finished and right and list(tuning.step_ms) == ["fp32", "bf16", "int8"]
        assert tuning == outcome[0][0] and sums == outcome[0][2]
        assert tuning.num_steps == tuning.max_steps


def alone(rank, world_size):
    model = Gradients(*SHAPES)
    found = []
    for wire in ("auto", "bf16"):
        reducer = reducer_of(model, wire)
        seen = synchronize(model, gradients(0, 0))
        found.append((reducer.tuning(), all(torch.equal(*pair) for pair in zip(seen, gradients(0, 0), strict=True))))
        reducer.detach()
    return found


def test_one_rank_has_nothing_to_search_for(ranks):
    ((auto, first), (none, second)) = ranks.run(alone, world_size=1)[0]
    assert first and second and none is None
    assert auto.finished and (auto.chosen, auto.num_steps) == ("fp32", 0)


# ---- its life


def failing(rank, world_size):
    """On rank 1 the search fails between two passes. Returns (passes that succeeded, errors)."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, "auto")
    values = [integers(rank, shape) for shape in SHAPES]
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


def failing_and_collected(rank, world_size):
    found = failing(rank, world_size)
    gc.collect()  # `fail` keeps a watch in a cycle, which would wait for its store when the group is gone
    return found


def test_what_fails_between_passes_fails_on_every_rank(ranks):
    (passed, first), (passed_too, own) = ranks.run(failing_and_collected, world_size=2)
    assert passed == passed_too == 3 and len(first) == len(own) == 3
    assert all("rank 1 of 2: between two backward passes:" in text for text in (*first, *own[1:]))
    assert all("the search's own trouble" in text for text in (*first, *own))
