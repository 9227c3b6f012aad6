"""How the probe divides its time, and how it shows how far it is."""

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
import types

import pytest
import torch

from fusedcomm.tools.probe import local, run, workload
from fusedcomm.tools.probe import progress as progress_module
from fusedcomm.tools.probe.progress import STAGES, Progress
from fusedcomm.tools.probe.run import PARTS, Budget

ALONE = types.SimpleNamespace(slowest=lambda numbers: numbers)
"""A team of one rank."""


class Clock:
    """Stands for the module `time`: only what is measured takes time."""

    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    monotonic = perf_counter


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(run, "time", found)
    monkeypatch.setattr(progress_module, "time", found)
    return found


def given(clock, seconds, takes):
    """The seconds that each part is given. takes: seconds that a part takes, by what it is given."""
    budget, budgets_s = Budget(ALONE, seconds, Progress(0.0, seconds, shown=False)), []

    def measure(part, budget_s):
        budgets_s.append(budget_s)
        clock.now_s += takes(part, budget_s)

    for part, _ in PARTS[:-1]:
        budget.run(part, measure, part)
    return budgets_s, budget.elapsed_s()


def test_parts_have_their_shares(clock):
    budgets_s, elapsed_s = given(clock, 60.0, lambda part, budget_s: budget_s)
    assert budgets_s == pytest.approx([60.0 * share for _, share in PARTS[:-1]])
    assert elapsed_s < 60.0 and sum(share for _, share in PARTS) == pytest.approx(1)


def test_what_a_part_leaves_over_goes_to_the_later_ones(clock):
    budgets_s, elapsed_s = given(clock, 60.0, lambda part, budget_s: 0.0 if part == "network" else budget_s)
    later = [share for part, share in PARTS if part != "network"][1:]
    assert budgets_s[2:] == pytest.approx([58 * share / sum(later) for share in later[:-1]], rel=0.02)


@pytest.mark.parametrize("slow", STAGES)
def test_a_part_that_takes_three_times_its_share_leaves_less_to_the_others(clock, slow):
    """The whole takes at most 1.2 times what it may, unless the last part is the one."""
    budgets_s, elapsed_s = given(clock, 60.0, lambda part, budget_s: budget_s * (3 if part == slow else 1))
    assert min(budgets_s) >= 0
    assert elapsed_s <= 60 * (1.2 if slow != "check" else 1.45)


def test_without_any_time_left_parts_are_given_none(clock):
    budgets_s, _ = given(clock, 60.0, lambda part, budget_s: 100.0)
    assert budgets_s[1:] == [0.0] * len(budgets_s[1:])


def test_parts_come_in_their_order(clock):
    budget = Budget(ALONE, 60.0, Progress(0.0, 60.0, shown=False))
    with pytest.raises(AssertionError, match="network is not the next part: workload is"):
        budget.run("network", lambda budget_s: None)


@pytest.mark.parametrize(("step_s", "num_steps"), [(5.0, 1), (0.75, 2), (0.5, 4), (0.125, 16), (2**-10, 3 + 50)])
def test_steps_alone_take_the_time_that_they_are_given(clock, monkeypatch, step_s, num_steps):
    """One step has to be, however long it is."""
    began_s, taken = clock.now_s, []

    def take(team, model, step, optimizer, ready, num_ready, num_steps):
        taken.append(num_steps)
        clock.now_s += num_steps * step_s
        return [[0.0, step_s, 0.0, step_s, *[step_s] * num_ready]] * num_steps

    monkeypatch.setattr(workload, "time", clock)
    monkeypatch.setattr(workload, "_steps", take)
    alone = types.SimpleNamespace(**vars(ALONE), mean=lambda values: values)
    found = workload.measure_workload(alone, (torch.nn.Linear(2, 2), None, None), 2.0)
    assert found.backward_s == pytest.approx(step_s) and sum(taken) == num_steps
    assert clock.now_s - began_s <= max(2.0, step_s) + 1e-9


def test_a_wire_that_takes_long_leaves_less_to_the_ones_after_it(clock, monkeypatch):
    budgets_s = {}

    def stages(team, codec, buckets, wire, s_per_byte, budget_s):
        budgets_s[wire] = budget_s
        clock.now_s += 3.0 if wire == "int8" else budget_s
        return {"pack": [(1, 1.0)]}

    monkeypatch.setattr(local, "time", clock)
    monkeypatch.setattr(local, "_stages", stages)
    monkeypatch.setattr(local, "_copy_s_per_byte", lambda team, budget_s: 1e-9)
    monkeypatch.setattr(local, "_agreed_cores", lambda team, cores: cores)
    alone = types.SimpleNamespace(**vars(ALONE), world_size=2, device=torch.device("cpu"))
    local.measure_local(alone, ("int8", "bf16", "int4"), 1.0, None, 4.0)
    assert budgets_s == {"fp32": 1.0, "int8": 1.0, "bf16": 0.0, "int4": 0.0}


@pytest.mark.parametrize(("start_s", "measuring_s"), [(0.0, 20.0), (4.0, 16.0), (6.0, 14.0), (40.0, 14.0)])
def test_starting_counts_and_a_long_one_is_said_before_measuring(clock, monkeypatch, capsys, start_s, measuring_s):
    def probed(team, settings, task, budget):
        assert f"starting took {start_s:.0f} s, measuring takes {measuring_s:.0f} s" in capsys.readouterr().err
        clock.now_s += 10.0
        return run.Findings(*[None] * 11, seconds={"all": budget.elapsed_s()})

    monkeypatch.setattr(run, "Team", lambda group, device: types.SimpleNamespace(**vars(ALONE)))
    monkeypatch.setattr(run, "agreed_task", lambda team, settings, task: task)
    monkeypatch.setattr(run, "synchronised", lambda *arguments: contextlib.nullcontext())
    monkeypatch.setattr(run, "_probe", probed)
    settings, began = run.Settings(seconds=20.0), clock.now_s - start_s
    found = run.probe(settings, None, torch.device("cpu"), shows_progress=True, began=began)
    assert found.seconds == {"start": start_s, "all": start_s + 10.0}


# ---- progress


def test_without_a_terminal_each_stage_is_a_line(capsys, clock):
    shown = Progress(0.0, 60.0, shown=True)
    for stage in STAGES:
        shown.begin(stage)
        clock.now_s += 10
        shown.tick()
    shown.end()
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "about 60 s: starting took 0 s, measuring takes 60 s"
    assert lines == [f"{10 * index:4.0f} of 60 s: {name}" for index, name in enumerate(STAGES.values())]


def test_other_ranks_show_nothing(capsys):
    shown = Progress(0.0, 60.0, shown=False)
    shown.begin("network")
    shown.tick()
    shown.end()
    assert capsys.readouterr() == ("", "")


@contextlib.contextmanager
def terminal(monkeypatch):
    """A terminal in the place of stderr. Yields a function that returns what was written to it."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with os.fdopen(outer, "rb", buffering=0) as reading, os.fdopen(inner, "w") as writing:
        monkeypatch.setattr(sys, "stderr", writing)
        os.set_blocking(outer, False)
        yield lambda: (writing.flush(), reading.read() or b"")[1].decode()


def test_on_a_terminal_a_bar_has_the_stages_name(monkeypatch, clock):
    pytest.importorskip("tqdm")
    with terminal(monkeypatch) as written:
        shown = Progress(0.0, 60.0, shown=True)
        shown._bar.mininterval = 0
        shown.begin("network")
        clock.now_s += 30
        shown.tick()
        shown._bar.refresh()
        assert f"{STAGES['network']}:  50%|" in (text := written()) and "30 of 60 s" in text
        clock.now_s += 90  # it does not go beyond its end
        shown.tick()
        shown._bar.refresh()
        assert f"{STAGES['network']}: 100%|" in written()
        shown.end()


def test_without_tqdm_a_terminal_has_lines(monkeypatch, clock):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with terminal(monkeypatch) as written:
        shown = Progress(0.0, 60.0, shown=True)
        shown.begin("check")
        shown.tick()
        shown.end()
        assert written().splitlines()[1:] == [f"   0 of 60 s: {STAGES['check']}"]
