"""The real steps with which a probe checks its predictions."""

import types

import pytest
import torch
from test_probe_choices import cluster, workload

from fusedcomm.tools.probe import check as module
from fusedcomm.tools.probe.check import MIN_NUMEL, MIN_TURNS, STEPS_OF_A_TURN, SURE_SHARE, check
from fusedcomm.tools.probe.choices import OFF, options
from fusedcomm.tools.probe.steps import WARMUP_STEPS

TEAM = types.SimpleNamespace(device=torch.device("cpu"))
USERS = object()
"""The user's task."""


@pytest.fixture
def taken(monkeypatch):
    """(task, number of choices) of each request for real steps. A synthetic task is replaced by its numel."""
    calls = []

    def in_turns(team, task, chosen, budget_s):
        calls.append((task, len(chosen)))
        return [[0.1]] * len(chosen)

    monkeypatch.setattr(module, "in_turns", in_turns)
    monkeypatch.setattr(module, "synthetic", lambda numel, device: numel)
    monkeypatch.setattr(module, "measure_workload", lambda team, numel, budget_s: workload(0.0, numel))
    return calls


@pytest.mark.parametrize(
    ("steps_of_two", "task", "num_choices"),
    [
        (2.1, USERS, 4),  # there is time for the steps of four choices
        (1.9, USERS, 2),
        (1.1, USERS, 2),
        (0.9, 0.9, 2),  # share of the model's numel
        (0.2, 0.2, 2),
        (1e-6, MIN_NUMEL / 10_000_000, 2),
    ],
)
def test_a_smaller_model_is_taken_only_where_two_choices_of_the_users_take_too_long(
    taken, steps_of_two, task, num_choices
):
    of_user = workload(0.0)
    chosen = options(of_user, cluster(1e8), ("bf16", "int8"), (25.0,))
    longest_s = max(option.prediction.step_s for option in chosen)
    num_steps = WARMUP_STEPS + MIN_TURNS * (1 + STEPS_OF_A_TURN)
    checks = check(TEAM, USERS, of_user, cluster(1e8), chosen, steps_of_two * 2 * num_steps * longest_s / SURE_SHARE)
    ((task_taken, num_taken),) = taken
    assert num_taken == len(checks) == num_choices
    if task is USERS:
        assert task_taken is USERS and [one.option for one in checks] == chosen[:num_choices]
    else:
        # The synthetic model is never larger than the user's.
        assert task_taken == pytest.approx(task * of_user.numel, rel=0.01) and task_taken < of_user.numel
    assert {one.numel for one in checks} == {of_user.numel if task is USERS else workload(0.0, task_taken).numel}


def test_of_the_two_that_are_left_one_is_ours(taken):
    """This holds even if DDP's own all-reduce in other buckets was predicted to be the best. Otherwise no wire of
    fusedcomm would be compared."""
    of_user = workload(0.0)
    found = options(of_user, cluster(1e8), ("bf16",), (25.0, 5.0))
    offs = [option for option in found if option.wire == OFF]
    bf16 = next(option for option in found if option.wire == "bf16")
    longest_s = max(option.prediction.step_s for option in found)
    for chosen, left in (([*offs, bf16], [offs[0], bf16]), (offs, offs), (offs[:1], offs[:1])):
        budget_s = 1.01 * len(left) * (WARMUP_STEPS + MIN_TURNS * (1 + STEPS_OF_A_TURN)) * longest_s / SURE_SHARE
        assert [one.option for one in check(TEAM, USERS, of_user, cluster(1e8), chosen, budget_s)] == left
