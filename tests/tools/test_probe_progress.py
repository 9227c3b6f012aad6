"""How the probe divides its time, and how it shows how far it is."""

import contextlib
import types

import pytest
import torch

from fusedcomm.tools.probe import progress as progress_module
from fusedcomm.tools.probe import run
from fusedcomm.tools.probe.progress import STAGES, Progress

ALONE = types.SimpleNamespace(slowest=lambda numbers: numbers, gather=lambda value: [value])
"""A team of one rank."""


class Clock:
    """Stands for the module `time`: only what is measured takes time."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(run, "time", found)
    monkeypatch.setattr(progress_module, "time", found)
    return found


@pytest.mark.parametrize("slow", [None, *STAGES])
def test_stages_have_their_shares_and_a_slow_one_leaves_less_to_the_later_ones(clock, slow):
    probe = run._Probe(ALONE, run.Settings(), None, 60.0, Progress(0.0, 60.0, shown=False))
    budgets_s = {}
    for stage in STAGES:
        budgets_s[stage] = probe._budget_s(stage)
        clock.now_s += budgets_s[stage] * (3 if stage == slow else 1)
    assert list(run.SHARES) == list(STAGES) and sum(run.SHARES.values()) == pytest.approx(1)
    if slow is None:
        assert budgets_s == pytest.approx({stage: 60 * share for stage, share in run.SHARES.items()})
    assert min(budgets_s.values()) >= 0
    assert clock.now_s - 100 <= 60 * (1 + 2 * run.SHARES["finals"] if slow == "finals" else 1.3)


@pytest.mark.parametrize(("start_s", "measuring_s"), [(0.0, 20.0), (4.0, 16.0), (6.0, 14.0), (40.0, 14.0)])
def test_starting_counts_and_a_long_one_is_said_before_measuring(clock, monkeypatch, capsys, start_s, measuring_s):
    def probed(self):
        assert f"starting took {start_s:.0f} s, measuring takes {measuring_s:.0f} s" in capsys.readouterr().err
        clock.now_s += 10.0
        return run.Findings(*[None] * 7, seconds={})

    monkeypatch.setattr(run, "Team", lambda group, device: types.SimpleNamespace(**vars(ALONE)))
    monkeypatch.setattr(run, "agreed_task", lambda team, settings: (None, None, None))
    monkeypatch.setattr(run, "synchronized", lambda *arguments, **options: contextlib.nullcontext())
    monkeypatch.setattr(run._Probe, "run", probed)
    settings, began = run.Settings(seconds=20.0), clock.now_s - start_s
    found = run.probe(settings, None, torch.device("cpu"), shows_progress=True, began=began)
    assert found.seconds == {"start": start_s, "all": start_s + 10.0}
