"""config="auto" on real ranks, and the candidates of its search."""

import contextlib
import dataclasses
import functools
import gc
import io
import json
import os
import random
import time
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from models import SMALL_BUCKETS, Gradients, Mixed, Mlp, on_host, synchronize, threads_of_engine, worst
from patience import patient, slowness
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import chunks
from fusedcomm.autotune import search as autotune
from fusedcomm.autotune.auto import Auto
from fusedcomm.autotune.search import OFF, Candidate, Search, Trial, Tuning
from fusedcomm.autotune.space import Space
from fusedcomm.config import Blocks, Checks, Chunks, Config, Fallback, Feedback, Rounding, TwoLevels
from fusedcomm.native import _C

FP32, BF16, INT8, INT4 = (Candidate(wire) for wire in ("fp32", "bf16", "int8", "int4"))
NUMEL = 20000
"""Elements of the first gradient. It has one dimension, so wires with scales sum it exactly unless "1d" names a wire.
The second gradient is so small that only sum="two-shot" sends it on a lossy wire."""

# --- candidates -----------------------------------------------------------------------------------------------------


def space_of(*wires, **base):
    return Space(Auto(wires or None, Config(**base)))


def running(space, candidate):
    """The candidate's configuration on two ranks with a link of 1 Gbit/s: chunks of 256 KiB, 16 in flight."""
    return chunks.resolved(space.config(candidate), 2, "cpu", 8e-9)


def by_chance(seed):
    space = space_of("int4", "int8", "bf16", "fp16", "fp32")
    chance = random.Random(seed)
    found = Search(
        space.first,
        lambda best: space.sums(best, {"two-shot"}, 4, True),
        lambda best: space.chunks(best, running(space, best), 10),
    )
    num_steps = 0
    while not found.finished:
        num_steps += found.trial_steps
        found.record(90 + 20 * chance.random())
    return found, num_steps


def test_the_same_times_give_the_same_search_and_it_ends():
    most = autotune.max_steps(5, 3, 2)
    for seed in range(50):
        (one, num_steps), (other, _) = by_chance(seed), by_chance(seed)
        assert (one.trials, one.candidate) == (other.trials, other.candidate)
        assert num_steps <= most
        # The last two rounds decide. Each has the exact finalist, the best candidate and maybe another wire.
        tried = [trial.candidate for trial in one.trials]
        if len(tried) > 6 or one.candidate != OFF:  # one trial of off and each wire was enough
            assert len(tried) > 6
            size = 2 if tried[-4:-2] == tried[-2:] else 3
            assert tried[-size:] == tried[-2 * size : -size] and tried[-size].is_exact
            looks = one.trials[-2 * size :]
            total_ms = {
                trial.candidate: sum(look.step_ms for look in looks[i::size]) for i, trial in enumerate(looks[:size])
            }
            assert one.candidate == autotune.preferred(total_ms)


def test_wires_are_tried_from_the_most_exact_on():
    assert space_of("int4", "bf16", "int8", "fp32", "int4").wires == ("fp32", "bf16", "int8", "int4")
    assert Space(Auto()).wires == space_of().wires == ("fp32", "bf16")
    assert space_of(feedback=Feedback()).wires == ("bf16",)
    assert space_of(wire="int8").wires == ("fp32", "int8")
    assert space_of(wire="int8", blocks=Blocks(64)).wires == ("int8",)


def test_only_sums_and_chunks_that_are_left_open_are_tried():
    space = space_of("bf16")
    assert space.sums(BF16, {"two-shot"}, 4, False) == [Candidate("bf16", "direct")]
    fp32, exact = space_of("fp32"), Candidate("fp32")
    assert fp32.sums(exact, {"exact"}, 4, False) == [Candidate("fp32", "two-shot")]
    # On two ranks a two-shot is never better than a one-shot, whichever sums the buckets use now.
    assert fp32.sums(exact, {"exact"}, 2, False) == [Candidate("fp32", "one-shot")]
    for used in ({"one-shot"}, {"one-shot", "exact"}):
        assert space.sums(BF16, used, 2, False) == [Candidate("bf16", "direct")]
        assert space_of("int8").sums(Candidate("int8"), used, 2, False) == []
    assert space.sums(BF16, {"exact"}, 2, False) == [Candidate("bf16", "direct"), Candidate("bf16", "one-shot")]
    assert space_of("bf16", feedback=Feedback()).sums(BF16, {"two-shot"}, 4, False) == []
    assert space_of("bf16", sum="two-shot").sums(Candidate("bf16", "two-shot"), {"two-shot"}, 4, False) == []
    smaller, larger = space.chunks(BF16, running(space, BF16), 10)
    assert (smaller.chunk_nbytes, smaller.chunks_in_flight) == (128 << 10, 32)
    assert (larger.chunk_nbytes, larger.chunks_in_flight) == (1 << 20, 8)
    assert space.chunks(BF16, running(space, BF16), 1) == []
    of_size = Candidate("bf16", chunk_nbytes=8192)
    assert space.chunks(of_size, running(space, of_size), 10) == []


def test_two_levels_are_tried_where_they_can_be_had_and_are_left_open():
    space, by_host = space_of("fp32", "bf16"), Candidate("bf16", by_host=True)
    assert space.sums(BF16, {"two-shot"}, 4, True) == [Candidate("bf16", "direct"), by_host]
    assert str(by_host) == "bf16 by host" and space.allows(by_host)
    # From two levels, one level is tried, and a direct sum, which has one.
    assert space.sums(by_host, {"two-shot"}, 4, True) == [Candidate("bf16", "direct"), BF16]
    config = space.config(by_host)
    assert (config.groups, config.local_wire) == ("auto", "bf16") and space.config(BF16).hosts is None
    assert space.first == (Candidate("fp32"), BF16)
    space.use_hosts(True)
    assert space.first == (Candidate("fp32"), by_host)  # fp32 keeps the bits of DDP's all-reduce
    space.use_hosts(False)
    assert space.first == (Candidate("fp32"), BF16)
    exact = space.config(Candidate("fp32", by_host=True))
    assert (exact.groups, exact.local_wire) == ("auto", "fp32")  # not rounded within a host either
    two_shot = Candidate("bf16", "two-shot")
    of_users_sum = space_of("bf16", sum="two-shot").sums(two_shot, {"two-shot"}, 4, True)
    assert of_users_sum == [dataclasses.replace(two_shot, by_host=True)]
    for others in ({"hosts": None}, {"hosts": TwoLevels()}, {"feedback": Feedback()}, {"sum": "direct"}):
        fixed = space_of("bf16", **others)
        fixed.use_hosts(True)
        tried = [*fixed.first, *fixed.sums(fixed.first[0], {"two-shot"}, 4, True)]
        assert not any(candidate.by_host for candidate in tried)


def test_no_sum_is_tried_that_cannot_carry_what_has_to_be_exact():
    space = space_of("bf16", wires={"head.*": "fp32"})
    assert space.sums(BF16, {"two-shot"}, 3, False) == [] and not space.allows(Candidate("bf16", "direct"))
    assert space_of("bf16", wires={"head.*": "bf16"}).allows(Candidate("bf16", "direct"))


def test_chunks_in_flight_of_the_users_stay():
    space = space_of("bf16", chunks=Chunks(in_flight=3))
    (best,) = space.first
    smaller, larger = space.chunks(best, running(space, best), 10)
    assert (smaller.chunk_nbytes, larger.chunk_nbytes) == (128 << 10, 1 << 20)
    assert smaller.chunks_in_flight == larger.chunks_in_flight == 3
    assert space.allows(best) and space.allows(smaller)
    assert not space.allows(BF16) and not space.allows(dataclasses.replace(smaller, chunks_in_flight=4))


def test_a_registered_hook_cannot_be_tuned():
    with pytest.raises(ValueError, match="fusedcomm.attach"):
        fusedcomm.CommState("auto")


# --- real ranks -----------------------------------------------------------------------------------------------------


def gradients(rank, step, numel=NUMEL):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(numel, generator=generator), torch.randn(30, 40, generator=generator)]


def module(**kwargs):
    return DistributedDataParallel(Gradients((NUMEL,), (30, 40)), **{"bucket_cap_mb": 0.004, **kwargs})


class Slow:
    """Sets how long a step takes; call it before each step. Time is the test's own clock, so that the search makes the
    same choice on a busy machine.

    ms: milliseconds of a step by wire, by "off" and by "int8 by host", for example. Each rank adds a random time below
        1 ms.
    """

    def __init__(self, comm, rank, **ms):
        self._comm, self._ms, self._chance = comm, ms, random.Random(rank)
        self._ends_ms = [0.0]  # when each step ends, including the step that has just begun
        runs = comm.runs
        runs._target = types.SimpleNamespace(
            take_pass_ends=functools.partial(self._by_own_clock, runs._target.take_pass_ends),
            set=runs._target.set,
            unwatch=runs._target.unwatch,
        )

    def __call__(self):
        self._ends_ms.append(self._ends_ms[-1] + self.step_ms())

    def step_ms(self):
        plan = self._comm.plan()
        ms = self._ms["off" if plan.off else plan.config.wire]
        if not plan.off and plan.hosts is not None:
            ms = self._ms.get(f"{plan.config.wire} by host", ms)
        return ms + self._chance.random()

    def _by_own_clock(self, take_pass_ends):
        """The ends of as many passes, by the test's clock."""
        return self._ends_ms[-1 - len(take_pass_ends()) : -1]


class Sleeping(Slow):
    """The same on the real clock: sleeps before each step, for longer on a slower machine."""

    def __init__(self, comm, rank, **ms):
        self._comm, self._ms, self._chance = comm, ms, random.Random(rank)

    def __call__(self):
        time.sleep(self.step_ms() * slowness() / 1000)


TIMES = {"off": 60, "bf16": 30, "int8": 3}
OFF_IS_BEST = {"off": 3, "bf16": 40, "int8": 40}


def searched(rank, world_size, ms, kwargs, slow_type=Slow):
    """Trains until two steps after the search has ended.

    Returns (tuning, each step's wire, each step's largest relative error, sums and one element of each step's
    gradients, whether off is running).
    """
    ddp = module()
    comm = fusedcomm.attach(ddp, Auto(("int8", "bf16"), Config(**kwargs)), quiet=True)
    slow = slow_type(comm, rank, **ms)
    wires, errors, results, last = [], [], [], None
    while last is None or len(wires) < last + 3:
        step = len(wires)
        slow()
        seen = synchronize(ddp, gradients(rank, step))
        parts = zip(*(gradients(r, step) for r in range(world_size)), strict=True)
        exact = [sum(part) / world_size for part in parts]
        errors.append(worst(((a - b).norm() / b.norm()).item() for a, b in zip(seen, exact, strict=True)))
        if last is None and comm.tuning().finished:
            last = step
        plan = comm.plan()
        wires.append("off" if plan.off else plan.config.wire)
        results.append([value.sum().item() for value in seen] + [seen[0][7].item()])
    tuning = comm.tuning()
    stats = comm.stats()
    comm.detach()
    return tuning, wires, errors, results, stats.off


LIMITS = {"off": 1e-6, "bf16": 0.01, "int8": 0.03}


@pytest.mark.parametrize(
    ("world_size", "ms", "best", "clock"),
    [
        (2, TIMES, "int8", Slow),
        (3, OFF_IS_BEST, "off", Slow),
        pytest.param(2, TIMES, "int8", Sleeping, marks=[pytest.mark.alone, pytest.mark.full]),
        pytest.param(3, OFF_IS_BEST, "off", Sleeping, marks=[pytest.mark.alone, pytest.mark.full]),
    ],
)
def test_all_ranks_choose_alike_and_every_step_is_right(ranks, world_size, ms, best, clock):
    outcome = ranks.run(searched, ms, {"sum": "two-shot"}, clock, world_size=world_size)
    tuning, wires, errors, results, is_off = outcome[0]
    assert tuning.finished and tuning.chosen.wire == best and is_off == (best == "off")
    assert tuning.num_steps <= tuning.max_steps and set(wires[tuning.num_steps :]) == {best}
    assert {"off", "bf16", "int8"} == set(wires)
    for wire, error in zip(wires, errors, strict=True):
        assert error < LIMITS[wire]
        assert error > 1e-5 or wire == "off"
    for other in outcome[1:]:
        assert other[0] == tuning
        assert other[1] == wires and other[3] == results  # bit for bit
    # The most exact first.
    assert [trial.candidate.wire for trial in tuning.trials][:3] == ["off", "bf16", "int8"]
    assert tuning.step_ms[OFF] >= 3 and all(trial.step_ms > 0 for trial in tuning.trials)


def scheduled(rank, world_size, model, ddp_kwargs, accumulate, uneven):
    """Trains through a search, and with DDP's own all-reduce on the same inputs.

    Returns (the largest relative error of a step's gradients, whether the search has finished, its choice, its trials).
    """

    def train(auto):
        torch.manual_seed(3)
        ddp = DistributedDataParallel(model(), **ddp_kwargs)
        comm = None
        if auto:
            comm = fusedcomm.attach(ddp, Auto(("bf16", "int8")), quiet=True)
        num_steps, seen = (90 if not uneven else 84 + 6 * rank), []
        with Join([ddp]) if uneven else contextlib.nullcontext():
            for step in range(num_steps):
                ddp.zero_grad(set_to_none=True)
                for micro in range(accumulate):
                    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
                    with ddp.no_sync() if micro < accumulate - 1 else contextlib.nullcontext():
                        ddp(torch.randn(8, 10, generator=generator)).square().mean().backward()
                seen.append(torch.cat([p.grad.flatten().double() for p in ddp.parameters()]))
        return seen, comm

    reference, _ = train(False)
    seen, comm = train(True)
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(seen, reference, strict=True)]
    tuning = comm.tuning()
    return max(errors), tuning.finished, tuning.chosen, tuning.trials


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("model", "ddp_kwargs", "accumulate", "uneven"),
    [
        (Mlp, SMALL_BUCKETS, 1, False),
        (Mlp, {"static_graph": True, **SMALL_BUCKETS}, 1, False),
        (Mlp, {"gradient_as_bucket_view": True}, 2, False),
        (Mlp, SMALL_BUCKETS, 1, True),
        (Mlp, {"find_unused_parameters": True}, 1, False),
        (Mixed, SMALL_BUCKETS, 1, False),
    ],
    ids=["small buckets", "static graph", "no_sync", "join", "find unused", "mixed dtypes"],
)
def test_ddps_ways_to_run_a_step_go_through_the_search(ranks, model, ddp_kwargs, accumulate, uneven):
    outcome = ranks.run(scheduled, model, ddp_kwargs, accumulate, uneven, world_size=2)
    for error, finished, chosen, trials in outcome:
        assert error < 0.1 and finished
        assert (chosen, trials) == outcome[0][2:]


def frozen(world_size, candidate, ddp):
    from fusedcomm.autotune.tuner import model_digest

    parameters = [fusedcomm.session.parameters.NamedParameter(name, p, 0) for name, p in ddp.module.named_parameters()]
    digest = model_digest(parameters)
    trials = (Trial(OFF, 20.0), Trial(candidate, 10.0))
    return Tuning(True, candidate, trials, 31, 99, world_size, "cpu", digest)


def off_beside_default(rank, world_size):
    plain, ddp = module(), module()
    comm = fusedcomm.attach(ddp, Auto(("int8",), tuned=frozen(world_size, OFF, ddp)), quiet=True)
    same = []
    for step in range(4):
        values = gradients(rank, step)
        same += [torch.equal(a, b) for a, b in zip(synchronize(ddp, values), synchronize(plain, values), strict=True)]
    stats, plan, state = comm.stats(), comm.plan(), comm.state_dict()
    comm.load_state_dict(state)
    report = comm.nonfinite_report()
    comm.state_dict(consolidated=True)
    comm.detach()
    return same, stats, str(plan), plan.scratch_nbytes, report


@pytest.mark.parametrize("world_size", [2, 3])
def test_off_is_ddps_default_bit_for_bit_and_the_handle_works(ranks, world_size):
    for same, stats, plan, scratch_nbytes, report in ranks.run(off_beside_default, world_size=world_size):
        assert all(same) and stats.off and stats.sent_nbytes == 0 and scratch_nbytes == 0 and report == []
        assert "off, DDP's own exact all-reduce" in plan and "sent as it is" in plan
        assert "off chosen before by config='auto' from 1 candidates" in plan


def off_and_back(rank, world_size):
    """Trains while off leaves DDP's reducer without a hook, after detaching, and with int8 attached.

    Returns (whether each step is right, whether the reducer had a hook).
    """
    ddp, plain = module(), module()
    comm = fusedcomm.attach(ddp, Auto(("int8",), tuned=frozen(world_size, OFF, ddp)), quiet=True)
    right, hooked = [], []

    def step(number):
        values = gradients(rank, number)
        pairs = zip(synchronize(ddp, values), synchronize(plain, values), strict=True)
        return max(((a - b).norm() / b.norm()).item() for a, b in pairs)

    right += [step(0) == 0, step(1) == 0]
    hooked.append(_C.remove_hook(ddp.reducer))
    ddp._update_process_group(dist.new_group())
    right += [step(2) == 0, step(3) == 0]
    comm.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        right += [step(4) == 0]
    comm = fusedcomm.attach(ddp, Config("int8", wires={"1d": "int8"}), quiet=True)
    right += [0 < step(5) < 0.02, 0 < step(6) < 0.02, comm.stats().steps == 2]
    comm.detach()
    right += [step(7) == 0, step(8) == 0]
    hooked.append(_C.remove_hook(ddp.reducer))
    return right, hooked


def test_off_and_detach_leave_no_hook_behind(ranks):
    for right, hooked in ranks.run(off_and_back, world_size=2):
        assert all(right) and hooked == [False, False]


def takes_hook(rank, world_size):
    ddp = module()
    comm = fusedcomm.attach(ddp, "int8", quiet=True)
    taken = _C.remove_hook(ddp.reducer)
    comm.detach()
    return taken


def test_this_torch_lets_go_of_a_hook(ranks):
    """With a torch that does not, off divides gradients in a separate pass; setup.py needs the new member's name."""
    assert ranks.run(takes_hook, world_size=2) == [True, True]


def threads_settle_at(wanted: int) -> int:
    """The number of engine threads, once it is `wanted` or after two seconds: dropped engines take time to end."""
    deadline = time.monotonic() + patient(2)
    while (found := threads_of_engine()) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def with_error_feedback(rank, world_size):
    """Trains through a search with error feedback.

    Returns (the choice, each step's wire, the largest error of the sum of all steps' gradients plus the residual, the
    largest element of the residual).
    """
    ddp = module()
    base = Config("int4", "two-shot", wires={"1d": "int4"}, feedback=Feedback())
    comm = fusedcomm.attach(ddp, Auto(("int4",), base), quiet=True)
    slow = Slow(comm, rank, off=3, int4=40)
    delivered, wanted = torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    wires, step = [], 0
    for step in range(45):
        slow()
        delivered += synchronize(ddp, gradients(rank, step))[0]
        wanted += sum(gradients(r, step)[0] for r in range(world_size)) / world_size
        plan = comm.plan()
        wires.append("off" if plan.off else plan.config.wire)
        if step == 12:
            # The search goes on with the restored state, whichever candidate runs.
            comm.load_state_dict(comm.state_dict())
    residual = comm.state_dict(consolidated=True)["residuals"].get("weights.0", torch.zeros(NUMEL))
    return comm.tuning().chosen, wires, (delivered + residual - wanted).abs().max().item(), residual.abs().max().item()


def test_error_feedback_loses_nothing_to_a_switch(ranks):
    for chosen, wires, missing, residual in ranks.run(with_error_feedback, world_size=2):
        assert chosen == OFF and "int4" in wires and wires[-1] == "off"
        assert missing < 1e-3 and residual == 0


def guarded(rank, world_size):
    ddp = module()
    base = Config(
        "int8",
        "two-shot",
        wires={"1d": "int8"},
        rounding=Rounding("stochastic"),
        checks=Checks(verify_every=2, measure_every=3, fallback=Fallback(0.5)),
    )
    comm = fusedcomm.attach(ddp, Auto(("int8",), base), quiet=True)
    slow = Slow(comm, rank, off=60, int8=3)
    while not comm.tuning().finished:
        slow()
        synchronize(ddp, gradients(rank, 1))
    for step in range(4):
        seen = synchronize(ddp, gradients(rank, step))
    return comm.tuning().chosen, len(comm.stats().verified), comm.stats().quantization_error, seen


def test_guards_go_on_with_what_was_chosen(ranks):
    outcome = ranks.run(guarded, world_size=2)
    for chosen, num_verified, errors, seen in outcome:
        assert chosen.wire == "int8" and num_verified > 0 and errors
        assert all(torch.equal(a, b) for a, b in zip(seen, outcome[0][3], strict=True))


def searched_on_hosts(rank, world_size, names, ms, kwargs):
    with on_host(names[rank]):
        tuning, _, errors, results, _ = searched(rank, world_size, ms, kwargs)
    return tuning, errors, results


def test_ranks_that_share_hosts_try_two_levels(ranks):
    ms = {"off": 60, "bf16": 40, "int8": 30, "bf16 by host": 20, "int8 by host": 3}
    outcome = ranks.run(searched_on_hosts, ["a", "b", "a", "b"], ms, {"sum": "two-shot"})
    for tuning, errors, results in outcome:
        assert tuning.chosen.by_host and tuning.chosen.wire == "int8" and results == outcome[0][2]
        assert tuning.num_steps <= tuning.max_steps
        assert [str(trial.candidate) for trial in tuning.trials[:4]] == [
            *("off", "bf16 two-shot by host", "int8 two-shot by host", "int8 two-shot")
        ]
        assert worst(errors) < 2 * LIMITS["int8"]


@pytest.mark.parametrize("names", [["a", "a", "b"], pytest.param(["a", "b", "c"], marks=pytest.mark.full)], ids=str)
def test_other_ranks_do_not(ranks, names):
    with_warnings = ranks.run(searched_on_hosts, names, TIMES, {"sum": "two-shot"}, world_size=3)
    for tuning, _, _ in with_warnings:
        assert tuning.chosen.wire == "int8" and not any(trial.candidate.by_host for trial in tuning.trials)


# --- save and load --------------------------------------------------------------------------------------------------


def saved_and_loaded(rank, world_size, path):
    ddp = module()
    comm = fusedcomm.attach(ddp, Auto(("int8", "bf16")), quiet=True)
    slow = Slow(comm, rank, **TIMES)
    errors = []
    with pytest.raises(RuntimeError, match="the search has not ended"):
        comm.tuning().save(path)
    while not comm.tuning().finished:
        slow()
        synchronize(ddp, gradients(rank, 0))
    tuning = comm.tuning()
    if rank == 0:
        tuning.save(path)
    dist.barrier()
    comm.detach()
    warned = []
    for tuned in (path, tuning, Tuning.load(path)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = fusedcomm.attach(ddp, Auto(("int8", "bf16"), tuned=tuned), quiet=True)
        warned += [str(w.message) for w in caught if "fusedcomm" in str(w.message)]
        at_once = comm.tuning()
        seen = synchronize(ddp, gradients(rank, 0))
        plan, sent = comm.plan(), comm.stats().sent_nbytes
        comm.detach()
        errors.append((at_once.finished, at_once.chosen == tuning.chosen, plan.config.wire, sent > 0))
    return tuning, errors, warned, str(plan), [value.sum().item() for value in seen]


def test_a_saved_choice_is_taken_at_once(ranks, tmp_path):
    outcome = ranks.run(saved_and_loaded, str(tmp_path / "tuned.json"), world_size=2)
    for tuning, attached, warned, plan, seen in outcome:
        assert attached == [(True, True, "int8", True)] * 3 and warned == []
        assert tuning.chosen.wire == "int8" and seen == outcome[0][4]
        assert "chosen before by config='auto' from" in plan and "off 6" in plan
    assert json.loads((tmp_path / "tuned.json").read_text())["chosen"]["wire"] == "int8"


def loaded_on_hosts(rank, world_size, names):
    with on_host(names[rank]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ddp = module()
        tuned = frozen(world_size, dataclasses.replace(INT8, by_host=True), ddp)
        comm = fusedcomm.attach(ddp, Auto(("int8",), tuned=tuned), quiet=True)
        seen = [value.sum().item() for value in synchronize(ddp, gradients(rank, 0))]
        tuning, plan = comm.tuning(), str(comm.plan())
        comm.detach()
    return tuning.finished, plan, seen, [str(warning.message) for warning in caught]


def test_a_choice_of_two_levels_is_taken_where_there_are_two(ranks):
    outcome = ranks.run(loaded_on_hosts, ["a", "b", "a", "b"])
    for finished, plan, seen, warned in outcome:
        assert finished and "2 hosts × 2 ranks" in plan and "chosen before" in plan
        assert seen == outcome[0][2] and warned == []
    uneven = ranks.run(loaded_on_hosts, ["a", "a", "b"], world_size=3)
    assert all(not finished and "hosts × " not in plan for finished, plan, _, _ in uneven)
    (warning,), *others = (warned for _, _, _, warned in uneven)
    assert "its sums have two levels" in warning and "searches again" in warning and others == [[], []]


def misfits(rank, world_size):
    ddp = module()
    good = frozen(world_size, INT8, ddp)
    cases = {
        "ranks": dataclasses.replace(good, world_size=7),
        "device": dataclasses.replace(good, device_type="cuda"),
        "model": frozen(world_size, INT8, DistributedDataParallel(Gradients((50,)))),
        "wires": dataclasses.replace(good, chosen=INT4),
        "unfinished": dataclasses.replace(good, finished=False, chosen=None),
    }
    messages = {}
    for name, tuned in cases.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            comm = fusedcomm.attach(ddp, Auto(("int8",), tuned=tuned), quiet=True)
        assert not comm.tuning().finished and comm.tuning().num_steps == 0
        synchronize(ddp, gradients(rank, 0))
        comm.detach()
        messages[name] = [str(w.message) for w in caught if "fusedcomm" in str(w.message)]
    return messages


def test_a_choice_made_elsewhere_is_not_taken_and_why(ranks):
    first, second = ranks.run(misfits, world_size=2)
    words = {
        "ranks": "it is for 7 ranks and these are 2",
        "device": "gradients on cuda and these are on cpu",
        "model": "a model with other parameters",
        "wires": "chosen int4, which wires=('int8',)",
        "unfinished": "had not ended",
    }
    for name, word in words.items():
        (message,) = first[name]
        assert word in message and "searches again" in message and second[name] == []


def given_to_one_rank(rank, world_size, path):
    ddp = module()
    errors = []
    alike = frozen(world_size, dataclasses.replace(INT8, chunk_nbytes=100_000_100 + rank), ddp)
    for tuned in (frozen(world_size, INT8, ddp) if rank == 0 else None, path if rank == 1 else None, alike):
        with pytest.raises((RuntimeError, ValueError)) as error:
            fusedcomm.attach(ddp, Auto(("int8",), tuned=tuned), quiet=True)
        errors.append(str(error.value))
    return errors


def test_ranks_must_be_given_the_same_choice(ranks, tmp_path):
    (tmp_path / "garbage.json").write_text('{"fusedcomm tuning": 2, "chosen": 3}')
    outcome = ranks.run(given_to_one_rank, str(tmp_path / "garbage.json"), world_size=2)
    for differs, garbage, alike in outcome:
        assert "do not agree: auto.tuned is {'wire': 'int8'" in differs and "on rank 0 and None on rank 1" in differs
        assert "garbage.json' is not what Tuning.save() writes" in garbage
        assert "auto.tuned.chunk_nbytes is 100000100 on rank 0 and 100000101 on rank 1" in alike


# --- process groups, errors -----------------------------------------------------------------------------------------


def moved(rank, world_size, is_finished):
    subgroup = dist.new_group([0, 1])
    ddp = module()
    tuned = frozen(world_size, INT8, ddp) if is_finished else None
    comm = fusedcomm.attach(ddp, Auto(("int8",), Config("int8", wires={"1d": "int8"}), tuned), quiet=True)
    values = [torch.full((NUMEL,), float(rank)), torch.full((30, 40), float(rank))]
    for _ in range(14):
        before = synchronize(ddp, values)[0].unique().tolist()
    trials = len(comm.tuning().trials)
    ddp._update_process_group(subgroup)
    if rank > 1:
        comm.detach()
        return before, None, trials, None, None
    after = synchronize(ddp, values)[0].unique().tolist()
    begun_again = len(comm.tuning().trials)
    steps = 0
    while not comm.tuning().finished:
        steps += 1
        assert synchronize(ddp, values)[0].unique().tolist() == after
    again = synchronize(ddp, values)[0].unique().tolist() == after
    return before, after, trials, begun_again, (comm.tuning().chosen.wire, steps > 15, again)


@pytest.mark.parametrize("is_finished", [True, False])
def test_another_process_group_keeps_the_choice_or_begins_the_search_again(ranks, is_finished):
    for rank, (before, after, trials, begun_again, end) in enumerate(ranks.run(moved, is_finished, world_size=3)):
        assert before == [1.0] and (trials > 0)
        if rank < 2:
            assert after == [0.5] and end[2]
            assert end[:2] == ("int8", False) if is_finished else (begun_again == 0 and end[1])


def failing(rank, world_size):
    ddp = module()
    comm = fusedcomm.attach(ddp, "auto", quiet=True)

    def fail():
        raise LookupError("the search's own trouble")

    comm.runs._end_trial = fail
    errors, passed = [], 0
    for _ in range(30):
        try:
            synchronize(ddp, gradients(rank, 0))
            passed += 1
        except Exception as error:
            errors.append(str(error))
            break
    comm.detach()
    return passed, errors


def test_what_fails_between_passes_is_the_error_of_the_backward_pass(ranks):
    for passed, errors in ranks.run(failing, world_size=2):
        assert passed == autotune.WARM_UP + autotune.TIMED
        assert len(errors) == 1 and "the search's own trouble" in errors[0]


# --- what goes wrong ------------------------------------------------------------------------------------------------


def without(rank, world_size, impossible, numel, kwargs):
    """Runs a search in which rank 1 cannot make a session for a candidate whose name contains a part in `impossible`.

    Returns (tuning, warnings, largest error of a gradient, wires that ran, parameters with a residual), or the text of
    attach's error.
    """
    from fusedcomm.session import session

    path_of = session.Session._connect_beside

    def connect(self, *arguments):
        name = str(Candidate(self.config.wire, self.config.sum, self.config.chunks.nbytes))
        if rank == 1 and any(part in name for part in impossible):
            raise MemoryError(f"no memory for {name}")
        return path_of(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(session.Session, "_connect_beside", connect)
        ddp = DistributedDataParallel(Gradients((1, numel)), bucket_cap_mb=25)
        try:
            comm = fusedcomm.attach(ddp, Auto(("bf16", "int8"), Config(**kwargs)), quiet=True)
        except (RuntimeError, MemoryError) as error:
            return str(error)
        slow = Slow(comm, rank, **TIMES)
        errors, wires, steps_left = [], [], 3
        while steps_left:
            slow()
            seen = synchronize(ddp, [torch.full((1, numel), float(rank + 1))])[0]
            errors.append((seen - (world_size + 1) / 2).abs().max().item())
            plan = comm.plan()
            wires.append("off" if plan.off else plan.config.wire)
            steps_left -= comm.tuning().finished
        tuning = comm.tuning()
        residual = comm.state_dict(consolidated=True)["residuals"]
        comm.detach()
    texts = [str(w.message) for w in caught if "cannot try" in str(w.message)]
    return tuning, texts, worst(errors), set(wires), sorted(residual)


def test_a_wire_that_one_rank_cannot_have_loses_on_all(ranks, tmp_path):
    outcome = ranks.run(without, ("int8",), NUMEL, {"sum": "two-shot"}, world_size=3)
    (warning,) = outcome[0][1]
    assert "config='auto' cannot try int8 two-shot: rank 1 cannot attach: no memory for int8" in warning
    for tuning, warned, error, wires, _ in outcome:
        assert tuning.chosen.wire == "bf16" and wires == {"off", "bf16"} and error < 0.01
        assert tuning.trials == outcome[0][0].trials
        assert tuning.step_ms[Candidate("int8", "two-shot")] == float("inf")
        assert "int8 two-shot could not be made" in str(tuning)
        assert warned == [] or warned == [warning]
    assert [bool(warned) for _, warned, *_ in outcome] == [True, False, False]
    path = tmp_path / "tuned.json"
    outcome[0][0].save(path)
    assert "Infinity" not in path.read_text() and Tuning.load(path).trials == outcome[0][0].trials


def test_a_candidate_that_comes_up_in_mid_search_and_cannot_be_had_loses_on_all(ranks):
    """Other chunks are tried last, while int8 runs. int8 goes on, and keeps its residual."""
    kwargs = {"sum": "two-shot", "feedback": Feedback()}
    for tuning, _, error, wires, residuals in ranks.run(without, ("in chunks of",), 3_000_000, kwargs, world_size=2):
        lost = [candidate for candidate, ms in tuning.step_ms.items() if ms == float("inf")]
        assert len(lost) == 2 and all(candidate.chunk_nbytes for candidate in lost)
        assert tuning.finished and tuning.chosen == Candidate("int8", "two-shot")
        assert wires == {"off", "bf16", "int8"} and error < 0.05 and residuals == ["weights.0"]


def test_without_any_wire_attach_says_why(ranks):
    for error in ranks.run(without, ("int8", "bf16"), NUMEL, {}, world_size=2):
        assert "no memory for bf16" in error


def traced_at(rank, world_size, path):
    ddp, errors = module(), []

    def attempt():
        try:
            with comm.trace(path, all_ranks=True):
                synchronize(ddp, gradients(rank, 0))
        except RuntimeError as error:
            return str(error)
        return "traced"

    for tuned in (None, frozen(world_size, OFF, ddp), frozen(world_size, INT8, ddp)):
        comm = fusedcomm.attach(ddp, Auto(("int8",), tuned=tuned), quiet=True)
        errors.append(attempt())
        comm.detach()
    return errors


def test_only_what_has_been_chosen_can_be_traced(ranks, tmp_path):
    for searching, off, chosen in ranks.run(traced_at, str(tmp_path / "trace.json"), world_size=2):
        assert "still searching" in searching and "wait for comm.tuning().finished" in searching
        assert "torch's own sums run, so fusedcomm has nothing to trace" in off
        assert chosen == "traced"
    assert (tmp_path / "trace.json").exists()


def detached_while_searching(rank, world_size):
    gc.collect()  # ends the engines that earlier tests have dropped
    before = threads_of_engine()
    ddp = module()
    comm = fusedcomm.attach(ddp, Auto(("bf16", "int8")), quiet=True)
    for _ in range(14):
        synchronize(ddp, gradients(rank, 0))
    comm.detach()
    exact = [sum(parts) / world_size for parts in zip(*(gradients(r, 1) for r in range(world_size)), strict=True)]
    seen = synchronize(ddp, gradients(rank, 1))
    same = all(torch.allclose(a, b) for a, b in zip(seen, exact, strict=True))
    again = fusedcomm.attach(ddp, "bf16", quiet=True)
    synchronize(ddp, gradients(rank, 1))
    buckets, tuning = again.stats().buckets, again.tuning()
    again.detach()
    # No thread works or watches once off is kept. `dropped` is dropped without detach().
    off = fusedcomm.attach(ddp, Auto(("int8",), tuned=frozen(world_size, OFF, ddp)), quiet=True)
    num_of_off = threads_settle_at(before) - before
    off.detach()
    dropped = module()
    fusedcomm.attach(dropped, "auto", quiet=True)
    synchronize(dropped, gradients(rank, 0))
    del dropped, comm, again
    gc.collect()
    return same, buckets > 0, tuning, [num_of_off, threads_settle_at(before) - before]


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads in /proc")
def test_a_search_can_be_ended_by_detaching_and_by_dropping_the_module(ranks):
    for same, counted, tuning, threads in ranks.run(detached_while_searching, world_size=2):
        assert same and counted and tuning is None and threads == [0, 0]


class Closing(io.StringIO):
    """An output whose reader is gone by the time the choice is printed."""

    def write(self, text):
        super().write(text)
        if "chosen by" in text:
            raise BrokenPipeError


def printed(rank, world_size):
    """What a rank prints, in a search whose output closes: that may not end the training of rank 0 alone."""
    os.environ.pop("FUSEDCOMM_QUIET", None)
    out = Closing()
    try:
        with contextlib.redirect_stdout(out):
            ddp = module()
            comm = fusedcomm.attach(ddp, Auto(("bf16",), base=Config(sum="two-shot")))
            slow = Slow(comm, rank, **TIMES)
            while not comm.tuning().finished:
                slow()
                synchronize(ddp, gradients(rank, 0))
            for _ in range(3):
                synchronize(ddp, gradients(rank, 0))
    finally:
        os.environ["FUSEDCOMM_QUIET"] = "1"
    return out.getvalue(), str(comm.tuning())


def test_rank_0_prints_what_is_tried_and_what_was_chosen_once(ranks):
    (first, report), (second, _) = ranks.run(printed, world_size=2)
    assert first.startswith("fusedcomm: config='auto' is searching, step 0 of at most")
    others = "fp32, fp16, int8, fp8, int4 only if named: fusedcomm.Auto(wires=('bf16', 'int8'))"
    assert first.count(f"\n  it may choose off, bf16; {others}\n") == 2
    assert "\n  now off, DDP's own exact all-reduce, 2 ranks\n" in first
    assert (
        "\nfusedcomm: bf16 two-shot chosen by config='auto' from" in first
        and "\n  now wire bf16, sum two-shot" in first
    )
    assert first.count("is searching, step 0 of at most") == 1 and first.count("bf16 two-shot chosen by") == 1
    assert "off 6" in first and second == "" and "bf16 two-shot chosen by" in report
