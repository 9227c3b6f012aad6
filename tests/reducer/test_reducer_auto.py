"""Searches of a GradReducer: config="auto" and bucket_mib="auto"."""

import contextlib
import functools
import gc
import io
import json
import os
import random
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from models import Gradients, integers, mean_of_integers, reducer_of, synchronize, threads_of_engine
from patience import patient

from fusedcomm.autotune import search as autotune
from fusedcomm.autotune.auto import Auto
from fusedcomm.autotune.search import OFF, Candidate, Trial, Tuning
from fusedcomm.config import Config, Feedback

NUM_WEIGHTS = 12
SHAPES = ((512, 512),) * NUM_WEIGHTS
"""Twelve gradients of 1 MiB in fp32. Buckets of 25 MiB and more are all alike: 1, then 11."""
BUCKETS = {25: 2, 10: 3, 5: 4, 1: 12}
"""The number of buckets by their size."""


class Clock:
    """Sets how long a step takes; call it before each step. Time is the test's own clock, so that the search makes the
    same choice on a busy machine.

    ms: milliseconds of a step by (wire, MiB). Each rank adds a random time below 0.1 ms.
    """

    def __init__(self, reducer, rank, ms):
        self._tuner, self._ms = reducer.runs, ms
        self._chance, self._ends_ms = random.Random(rank), []
        take = self._tuner._target.take_pass_ends

        self._tuner._target.take_pass_ends = lambda: self._ends_ms[-1 - len(take()) : -1]

    def __call__(self):
        """Notes the end of the step that begins now. The candidate may change at its beginning, so it is the one before
        that decides; steps to warm up are not timed."""
        running = self._tuner._running
        before = self._ends_ms[-1] if self._ends_ms else 0.0
        self._ends_ms.append(before + self._ms[running.wire, running.bucket_mib] + 0.1 * self._chance.random())


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


def searched(rank, world_size, ms, wire, kwargs):
    """Trains until two steps after the search. Returns (tuning, each step's (wire, number of buckets), whether each
    step's gradients are right, statistics of the last steps, the plan)."""
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, wire, **kwargs)
    clock = Clock(reducer, rank, ms)
    ways, right, last = [], [], None
    while last is None or len(ways) < last + 3:
        step = len(ways)
        clock()
        seen = synchronize(model, gradients(rank, step))
        # Sums of two ranks' integers are exact in fp32 and in bf16.
        right.append(all(torch.equal(a, b) for a, b in zip(seen, mean(world_size, step), strict=True)))
        if last is None and reducer.tuning().finished:
            last = step
        plan = reducer.plan()
        ways.append((plan.config.wire, len(plan.buckets)))
    stats = reducer.stats()
    tuning = reducer.tuning()
    reducer.detach()
    return tuning, ways, right, stats, str(plan)


def times(**by_wire):
    return {(wire, mib): ms for wire, row in by_wire.items() for mib, ms in zip((25, 10, 5, 1), row, strict=True)}


@pytest.mark.parametrize(
    ("ms", "chosen", "tried"),
    [
        (times(bf16=(40, 30, 20, 30)), 5, [25, 10, 5, 1]),  # 50 and 100 make the same buckets as 25
        # 10 gains less than 3%, and 5 ends this direction
        pytest.param(times(bf16=(40, 39.5, 50, 9)), 25, [25, 10, 5], marks=pytest.mark.full),
        pytest.param(times(bf16=(40, 60, 1, 1)), 25, [25, 10], marks=pytest.mark.full),
    ],
    ids=["smaller", "hardly smaller", "as it was"],
)
def test_the_size_of_buckets_is_searched_and_kept(ranks, ms, chosen, tried):
    outcome = ranks.run(searched, ms, "bf16", {"bucket_mib": "auto"}, world_size=2)
    for tuning, ways, right, stats, plan in outcome:
        assert tuning == outcome[0][0] and all(right) and tuning.finished
        assert tuning.chosen == Candidate("bf16", bucket_mib=chosen)
        assert list(dict.fromkeys(trial.candidate.bucket_mib for trial in tuning.trials)) == tried
        assert tuning.num_steps <= tuning.max_steps == 82
        # The buckets are really cut as the candidates say.
        assert {ways[-1], ways[-2]} == {("bf16", BUCKETS[chosen])}
        assert {buckets for _, buckets in ways} == {BUCKETS[size] for size in tried}
        assert stats.steps == len(ways), "a change of the size alone resets no counts"
        assert f"bf16 in buckets of {chosen} MiB chosen by bucket_mib='auto' from {len(tried)} candidates" in plan


AUTO_TIMES = times(fp32=(60, 55, 50, 70), bf16=(40, 30, 45, 45))


def test_wire_and_size_are_searched_together(ranks):
    outcome = ranks.run(searched, AUTO_TIMES, Auto(base=Config(sum="two-shot")), {}, world_size=2)
    for tuning, ways, right, _, plan in outcome:
        assert tuning == outcome[0][0] and all(right) and tuning.finished
        assert (tuning.chosen.wire, tuning.chosen.bucket_mib) == ("bf16", 10)
        assert not any(trial.candidate == OFF for trial in tuning.trials)
        assert [(t.candidate.wire, t.candidate.bucket_mib) for t in tuning.trials[:2]] == [("fp32", 25), ("bf16", 25)]
        # The exact finalist gets the size that was found, too.
        assert ("fp32", 10) in [(t.candidate.wire, t.candidate.bucket_mib) for t in tuning.trials]
        assert tuning.num_steps <= tuning.max_steps and ways[-1] == ("bf16", 3)
        assert "chosen by config='auto'" in plan and "it may choose fp32, bf16; fp16" in plan and "off" not in plan


def test_auto_is_short_for_that_and_fp32_can_win(ranks):
    ms = times(fp32=(20, 20, 20, 20), bf16=(40, 40, 40, 40))
    for tuning, ways, right, _, _ in ranks.run(searched, ms, "auto", {}, world_size=2):
        assert (
            tuning.chosen.wire == "fp32" and tuning.chosen.bucket_mib == 25 and ways[-1] == ("fp32", 2) and all(right)
        )


def test_a_number_of_mib_is_not_searched(ranks):
    ms = {(wire, None): value for wire, value in (("fp32", 40), ("bf16", 20))}
    for tuning, ways, right, _, _ in ranks.run(searched, ms, "auto", {"bucket_mib": 5}, world_size=2):
        assert tuning.chosen.wire == "bf16" and tuning.chosen.bucket_mib is None and all(right)
        assert {buckets for _, buckets in ways} == {4}


def test_codes_are_searched_with_error_feedback_and_nothing_is_lost(ranks):
    for chosen, wires, missing, residual in ranks.run(with_error_feedback, world_size=2):
        assert chosen.wire == "int4" and chosen.bucket_mib == 1 and {"int4", "int8"} <= wires
        assert missing < 1e-3 and residual > 0


def with_error_feedback(rank, world_size):
    """Returns (the choice, the wires that ran, the largest error of the sum of all steps' gradients plus the residual,
    the residual's largest element)."""
    shapes = ((512, 300), (512, 600), (512, 700))  # 1 MiB cuts three buckets, 5 MiB and more cut two
    model = Gradients(*shapes)
    base = Config("int8", "two-shot", feedback=Feedback())
    reducer = reducer_of(model, Auto(("int8", "int4"), base))
    clock = Clock(reducer, rank, {("int8", 25): 40, ("int8", 1): 40, ("int4", 25): 20, ("int4", 1): 5})

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


def on_own_clock(rank, world_size, wires, every, freezes):
    """Trains through a search without a clock of the test's. Returns (tuning, whether each step's gradients are right,
    the sums of the last step's gradients)."""
    shapes = ((300, 100), (512, 512), (512, 300), (512, 300))  # 1 MiB cuts three buckets, 5 MiB and more cut two
    model = Gradients(*shapes)
    reducer = reducer_of(model, Auto(wires), every=every)
    right, last, step = [], None, 0
    while last is None or step < last + 3:
        if freezes and step in (7, 12):  # before it decides about sizes
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


@pytest.mark.sampled(by=lambda wires, every, freezes: {})  # a search takes many steps; make test runs one
@pytest.mark.parametrize(
    ("wires", "every", "freezes"), [(None, 1, True), (None, 1, False), (("bf16",), 2, False), (("bf16",), 1, True)]
)
def test_all_ranks_choose_alike_by_their_own_clocks(ranks, wires, every, freezes):
    outcome = ranks.run(on_own_clock, wires, every, freezes)
    for tuning, right, sums in outcome:
        assert tuning.finished and right and len(tuning.trials) >= 3
        assert tuning == outcome[0][0] and sums == outcome[0][2]
        assert tuning.num_steps <= tuning.max_steps


def alone(rank, world_size):
    model = Gradients(*SHAPES[:2])
    found = []
    for wire, kwargs in (("auto", {}), ("bf16", {"bucket_mib": "auto"}), ("bf16", {})):
        reducer = reducer_of(model, wire, **kwargs)
        seen = synchronize(model, gradients(0, 0)[:2])
        found.append(
            (reducer.tuning(), all(torch.equal(*pair) for pair in zip(seen, gradients(0, 0)[:2], strict=True)))
        )
        reducer.detach()
    return found


def test_one_rank_has_nothing_to_search_for(ranks):
    ((auto, first), (sizes, second), (none, third)) = ranks.run(alone, world_size=1)[0]
    assert first and second and third and none is None
    assert auto.finished and (auto.chosen, auto.num_steps) == (Candidate("fp32", bucket_mib=25), 0)
    assert sizes.finished and (sizes.chosen, sizes.num_steps) == (Candidate("bf16", bucket_mib=25), 0)


# ---- save and load


def saved_and_loaded(rank, world_size, path):
    model = Gradients(*SHAPES)
    reducer = reducer_of(model, "auto")
    clock = Clock(reducer, rank, AUTO_TIMES)
    with pytest.raises(RuntimeError, match="the search has not ended"):
        reducer.tuning().save(path)
    with pytest.raises(RuntimeError, match="config='auto' is still searching"):
        reducer.trace(path)
    while not reducer.tuning().finished:
        clock()
        synchronize(model, gradients(rank, 0))
    tuning = reducer.tuning()
    if rank == 0:
        tuning.save(path)
    dist.barrier()
    reducer.detach()
    again = reducer_of(model, Auto(tuned=path))
    at_once = again.tuning()
    synchronize(model, gradients(rank, 0))
    plan = again.plan()
    again.detach()
    of_ddp = Tuning(True, OFF, (Trial(OFF, 20.0),), 31, 99, world_size, "cpu", tuning.model)
    warned = []
    for unfit, kwargs in ((of_ddp, {}), (tuning, {"bucket_mib": 5})):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other = reducer_of(model, Auto(tuned=unfit), **kwargs)
        warned += [str(w.message) for w in caught if "tuned does not fit" in str(w.message)]
        warned.append(other.tuning().finished)
        other.detach()
    return tuning, at_once, plan.config.wire, len(plan.buckets), str(plan), warned


def test_a_saved_choice_is_taken_at_once_if_it_fits(ranks, tmp_path):
    path = tmp_path / "tuned.json"
    for rank, (tuning, at_once, wire, num_buckets, plan, warned) in enumerate(
        ranks.run(saved_and_loaded, str(path), world_size=2)
    ):
        assert (at_once.chosen, at_once.trials, at_once.loaded) == (tuning.chosen, tuning.trials, True)
        assert (wire, num_buckets) == ("bf16", 3) and "chosen before by config='auto'" in plan
        texts = [text for text in warned if isinstance(text, str)]
        assert [flag for flag in warned if isinstance(flag, bool)] == [False, False]
        assert len(texts) == (2 if rank == 0 else 0)
        assert not texts or ("it has chosen off" in texts[0] and "in buckets of 10 MiB" in texts[1])
    assert json.loads(path.read_text())["chosen"]["bucket_mib"] == 10


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
    clock = Clock(reducer, rank, times(fp32=(40,) * 4, bf16=(20,) * 4))
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
    clock = Clock(searching, rank, times(fp32=(40,) * 4, bf16=(20,) * 4))
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
    reducer = reducer_of(model, "bf16", bucket_mib="auto")
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

            reducer = GradReducer(model, "bf16", bucket_mib="auto")
            clock = Clock(reducer, rank, times(bf16=(40, 30, 45, 45)))
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
    assert first.startswith("fusedcomm: bucket_mib='auto' is searching, step 0 of at most 82: no times")
    assert first.count("is searching") == 1 and second == ""
    assert first.count("bf16 in buckets of 10 MiB chosen by bucket_mib='auto' from 3 candidates") == 1
    assert "bf16 in buckets of 25 MiB 40" in report and "it may choose" not in report


# ---- the search itself


def test_the_most_steps_are_not_exceeded_whatever_is_measured():
    """By chance, with all refinements."""
    wires = [Candidate(wire, bucket_mib=25) for wire in ("fp32", "bf16", "int8")]
    for num_wires, num_more in ((1, 0), (2, 2), (3, 2)):
        most = autotune.max_steps(num_wires, num_more, num_more, 5, has_off=False)
        for seed in range(200):
            chance, num_steps = random.Random(seed), 0
            found = autotune.Search(
                wires[:num_wires],
                lambda best, n=num_more: [Candidate(best.wire, f"sum {i}", bucket_mib=25) for i in range(n)],
                lambda best, n=num_more: [Candidate(best.wire, best.sum, i + 1, bucket_mib=25) for i in range(n)],
                lambda best: [
                    [Candidate(best.wire, best.sum, best.chunk_nbytes, bucket_mib=mib) for mib in towards]
                    for towards in ((50, 100), (10, 5, 1))
                ],
                has_off=False,
            )
            while not found.finished:
                num_steps += found.trial_steps
                found.record(90 + 20 * chance.random())
            assert num_steps <= most and found.candidate in [trial.candidate for trial in found.trials]
