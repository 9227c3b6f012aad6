"""The real steps with which a probe checks its predictions."""

import types

import pytest
import torch
from test_probe_choices import cluster, workload

from fusedcomm.tools.probe import check as module
from fusedcomm.tools.probe import run
from fusedcomm.tools.probe.check import MIN_NUMEL, MIN_TURNS, STEPS_OF_A_TURN, SURE_SHARE, Check, check
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


@pytest.mark.parametrize(
    ("off_s", "ours_s", "said"),
    [
        ([0.010, 0.011] * 2, [0.005, 0.006] * 2, None),
        (
            [0.010, 0.0108] * 2,
            [0.0119, 0.0119] * 2,
            "but real steps took longer: int8 11.9 ms, off 10.4 ms (with 5,000",
        ),
        ([0.010, 0.011] * 2, [0.005, 0.012] * 2, "but real steps overlap: int8 8.5 ms, off 10.5 ms (with 5,000"),
    ],
    ids=["faster", "slower", "noise"],
)
def test_steps_of_a_smaller_model_can_speak_against_what_was_predicted(monkeypatch, off_s, ours_s, said):
    """A whole probe whose measurements are given: on this link int8 is predicted to take a third of the time."""
    of_user, small, ranks = workload(0.0), workload(0.0, 5_000), cluster(1e8)

    def of_a_smaller_model(team, task, workload, cluster, chosen, budget_s):
        assert [option.name for option in chosen[:2]] == [OFF, "int8"]
        smaller = options(small, cluster, ("int8",), (25.0,))
        return [Check(option, 5_000, sum(s) / 4, s) for option, s in zip(smaller, (off_s, ours_s), strict=True)]

    network = types.SimpleNamespace(s_per_byte=None)
    given = {
        "measure_workload": lambda team, task, budget_s: of_user,
        "hosts_of": lambda team: (None, ""),
        "measure_network": lambda team, hosts, budget_s: network,
        "measure_local": lambda *arguments: types.SimpleNamespace(cores=None),
        "with_cpu_of_steps": lambda team, cluster, wires, budget_s: cluster,
        "_cluster": lambda world_size, network, local: ranks,
        "check": of_a_smaller_model,
        "describe": lambda *arguments: {},
    }
    for name, function in given.items():
        monkeypatch.setattr(run, name, function)
    alone = types.SimpleNamespace(world_size=2, slowest=lambda numbers: numbers, gather=lambda value: [value, value])
    settings = run.Settings(wires=("bf16", "int8"), caps_mb=(25.0,))
    found = run._probe(alone, settings, USERS, run.Budget(alone, 60.0, run.Progress(0.0, 60.0, False))).recommendation
    assert found.baseline.wire == OFF and not found.measured
    if said is None:
        assert found.option.name == "int8" and found.gain > 0.6
    else:
        assert found.option == found.baseline and said in found.reason and found.faster is None and found.gain == 0
