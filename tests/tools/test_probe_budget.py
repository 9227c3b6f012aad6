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

from fusedcomm.tools.probe import progress as progress_module
from fusedcomm.tools.probe import run
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
    budget, budgets_s = Budget(ALONE, seconds, Progress(seconds, shown=False)), []

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
    budget = Budget(ALONE, 60.0, Progress(60.0, shown=False))
    with pytest.raises(AssertionError, match="network is not the next part: workload is"):
        budget.run("network", lambda budget_s: None)


# ---- progress


def test_without_a_terminal_each_stage_is_a_line(capsys, clock):
    shown = Progress(60.0, shown=True)
    for stage in STAGES:
        shown.begin(stage)
        clock.now_s += 10
        shown.tick()
    shown.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{10 * index:4.0f} of 60 s: {name}" for index, name in enumerate(STAGES.values())]


def test_other_ranks_show_nothing(capsys):
    shown = Progress(60.0, shown=False)
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
        shown = Progress(60.0, shown=True)
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
        shown = Progress(60.0, shown=True)
        shown.begin("check")
        shown.tick()
        shown.end()
        assert written().splitlines() == [f"   0 of 60 s: {STAGES['check']}"]
