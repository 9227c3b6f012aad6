"""LocalSteps with members: lost ranks, and ranks that join, against a plain simulation."""

import os
import signal

import pytest
import torch
from mergers import Merger, MergeScript, simulated
from patience import patient
from trainees import Team

import fusedcomm

pytestmark = pytest.mark.check

EXACT = {"wire": "fp32"}


def run(script, joins=None):
    """What each rank that is left has written: {name: ({step: …}, end)}. joins: (name, of which other)."""
    team = Team(script, Merger)
    try:
        if joins is not None:
            team.join(*joins)
        found = {}
        for name in team.processes:
            if name in script.die:
                continue
            ended = team.read(name, "end")
            first = team.read(name, "ready")["steps"] + 1
            steps = {step: team.read(name, f"step.{step}") for step in range(first, script.num_steps + 1)}
            found[name] = (steps, ended)
        return found
    finally:
        team.close()


def fits(script, found, takes_part, joined=None) -> bool:
    expected = simulated(script, takes_part, joined or {})
    for name, (steps, _) in found.items():
        for step, told in steps.items():
            for ours, plain in (
                (told["params"], expected.params[name, step]),
                (told["anchors"], expected.anchors[step]),
            ):
                if (ours - plain).abs().max() > 1e-5 * plain.abs().max():
                    return False
    return True


def merges_of(steps) -> list[torch.Tensor]:
    """The anchors that a rank had, one after another."""
    anchors = [steps[step]["anchors"] for step in sorted(steps)]
    return [each for i, each in enumerate(anchors) if i == 0 or not torch.equal(each, anchors[i - 1])]


def same_on_all(found) -> None:
    (first, ended), *others = found.values()
    for steps, end in others:
        assert torch.equal(end["params"], ended["params"])
        for step, told in steps.items():
            assert torch.equal(told["anchors"], first[step]["anchors"]), step


@pytest.mark.sampled
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("victim", ["0", "2"])
@pytest.mark.parametrize(("step", "moment"), [(6, "before"), (8, "handed"), (8, "before"), (9, "before")])
def test_the_others_go_on_without_a_rank_that_is_killed(tmp_path, victim, step, moment, delay):
    script = MergeScript(str(tmp_path), config=EXACT, num_steps=18, die={victim: (step, moment)}, delay=delay)
    found = run(script)
    same_on_all(found)
    assert all(end["size"] == 2 and len(end["changes"]) == 1 for _, end in found.values())
    # The messages of steps 4 and 8 are 0 and 1. Whoever dies with one under way is in it if a survivor has its mean.
    possible = {(6, "before"): [0, 1], (8, "before"): [1], (8, "handed"): [1, 2], (9, "before"): [1, 2]}[step, moment]
    assert any(
        fits(script, found, lambda name, message, last=last: name != victim or message < last) for last in possible
    )


@pytest.mark.parametrize("moment", ["before", "handed"])
def test_windows_of_time_go_on_without_a_rank_that_is_killed_and_with_one_that_joins(tmp_path, moment):
    options = {"num_founders": 2, "num_steps": 28, "meets": 3, "delay": 0, "die": {"0": (24, moment)}}
    script = MergeScript(str(tmp_path), config=EXACT, every="4s", **options)
    found = run(script, joins=("j", "1"))
    ended = {name: end for name, (_, end) in found.items()}
    assert torch.equal(ended["j"]["params"], ended["1"]["params"])
    assert [each["size"] for each in ended.values()] == [2, 2]
    # In a window of time each rank makes its own steps, so only what they merge is the same, one merge after another.
    # The last may come within the other rank's finish(), after its last step.
    merged, of_joiner = (merges_of(found[name][0]) for name in ("1", "j"))
    first = next(i for i, each in enumerate(merged) if torch.equal(each, of_joiner[0]))
    assert len(of_joiner) > 2 and len(merged) - first + 1 >= len(of_joiner)
    for ours, theirs in zip(merged[first:], of_joiner, strict=False):
        assert torch.equal(ours, theirs)


@pytest.mark.sampled
@pytest.mark.parametrize(("delay", "fragments"), [(0, 1), (1, 1), (3, 2)])
def test_a_rank_that_joins_has_the_merged_state_and_no_weight_in_its_first_merge(tmp_path, delay, fragments):
    options = {"num_founders": 2, "num_steps": 20, "meets": 3, "delay": delay, "fragments": fragments}
    script = MergeScript(str(tmp_path), config=EXACT, **options)
    found = run(script, joins=("j", "1"))
    same_on_all(found)
    steps, end = found["j"]
    assert end["size"] == 3 and len(found["0"][1]["changes"]) == 1
    if fragments == 1:
        first = (min(steps) - 1) // script.every - 1  # the message that it took part in first
        assert fits(script, found, lambda name, message: name != "j" or message > first, {"j": first})


@pytest.mark.sampled
@pytest.mark.parametrize("moment", ["before", "handed"])
@pytest.mark.parametrize("delay", [3, 0])
def test_a_rank_is_lost_after_another_has_joined(tmp_path, delay, moment):
    options = {"num_founders": 2, "num_steps": 28, "meets": 3, "delay": delay, "die": {"0": (24, moment)}}
    script = MergeScript(str(tmp_path), config=EXACT, **options)
    found = run(script, joins=("j", "1"))
    same_on_all(found)
    steps, end = found["j"]
    assert end["size"] == 2 and [len(change["lost"]) for change in end["changes"]] == [1]
    first = (min(steps) - 1) // script.every - 1

    def takes_part(name: str, message: int, last: int) -> bool:
        return message > first if name == "j" else name != "0" or message < last

    # The message of step 24 is number 5.
    assert any(fits(script, found, lambda *of, last=last: takes_part(*of, last), {"j": first}) for last in (5, 6))


@pytest.mark.sampled
@pytest.mark.parametrize("fragments", [1, 2])
def test_lossy_merges_stay_the_same_on_all_when_a_rank_is_lost(tmp_path, fragments):
    script = MergeScript(
        str(tmp_path),
        config={"wire": "int8", "feedback": fusedcomm.Feedback(decay=0.95)},
        num_steps=14,
        die={"1": (8, "handed")},
        merge="nesterov",
        fragments=fragments,
        delay=3,
    )
    same_on_all(run(script))


def test_a_rank_that_stands_still_is_left_behind_and_told_so(tmp_path):
    script = MergeScript(str(tmp_path), config=EXACT, num_steps=12, hold={"2": 5}, silence=patient(2))
    team = Team(script, Merger)
    try:
        team.read("2", "step.4")
        os.kill(team.processes["2"].pid, signal.SIGSTOP)
        for name in "01":
            assert team.read(name, "end")["size"] == 2
        os.kill(team.processes["2"].pid, signal.SIGCONT)
        (tmp_path / "go").touch()
        assert team.failure("2").startswith("ExpelledError")
    finally:
        team.close()


def test_a_process_with_another_schedule_is_sent_away(tmp_path):
    script = MergeScript(str(tmp_path), config=EXACT, num_founders=2, num_steps=4, hold={"0": 2, "1": 2})
    team = Team(script, Merger)
    try:
        team.read("1", "ready")
        script.every = 5
        team.join("j", of="1")
        assert "JoinRefusedError" in (told := team.failure("j")) and "it has every 5, and the members have 4" in told
        (tmp_path / "go").touch()
        assert team.read("0", "end")["size"] == 2
    finally:
        team.close()
