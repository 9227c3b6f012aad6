"""Backward passes in which ranks are lost, and ranks that join."""

import pytest
import torch
from sampling import few
from trainees import SHAPES, Script, Team, gradient, means_of

import fusedcomm

pytestmark = pytest.mark.check

LOST = 3
"""The step in which a rank dies."""


@pytest.fixture
def team(tmp_path):
    """team(config, **script): the processes of a test, which end with it."""
    teams = []

    def make(**script) -> Team:
        teams.append(Team(Script(str(tmp_path), **script)))
        return teams[-1]

    yield make
    for made in teams:
        made.close()


def check_steps(team: Team, steps: range, names: list[str], of: list[str], config: dict) -> None:
    """Each of `names` has in every step the means of the ranks `of`, and all have the same parameters."""
    for step in steps:
        wanted = means_of(of, step, config)
        told = {name: team.read(name, f"step.{step}") for name in names}
        for name in names:
            for mean, want in zip(told[name]["means"], wanted, strict=True):
                assert torch.equal(mean, want), f"rank {name}, step {step}, view {told[name]['view']}"
            for mine, first in zip(told[name]["parameters"], told[names[0]]["parameters"], strict=True):
                assert torch.equal(mine, first), f"rank {name} and rank {names[0]} differ after step {step}"


@pytest.mark.sampled
@pytest.mark.parametrize("wire", few(("int8", "bf16", "fp16", "fp32", "fp8", "int4"), "int8", "int4"))
@pytest.mark.parametrize("victim", ["0", "1", "2"])
@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_pass_that_loses_a_rank_has_the_mean_of_the_survivors(team, moment, victim, wire):
    config = {"wire": wire, "chunks": fusedcomm.Chunks(nbytes=4096, in_flight=2)}
    run = team(config=config, die={victim: (LOST, moment)})
    everybody = ["0", "1", "2"]
    survivors = [name for name in everybody if name != victim]
    check_steps(run, range(LOST), survivors, everybody, config)
    check_steps(run, range(LOST, 8), survivors, survivors, config)
    changes = [run.read(name, "end")["changes"] for name in survivors]
    assert [[change["step"] for change in of_rank] for of_rank in changes] == [[LOST]] * 2
    assert all(len(change["lost"]) == 1 and change["size"] == 2 for of_rank in changes for change in of_rank)


def test_of_two_lost_ranks_the_others_have_the_mean_of_those_that_are_left(team):
    config = {"wire": "int8"}
    run = team(config=config, num_founders=4, die={"0": (LOST, "before"), "2": (LOST, "between")})
    check_steps(run, range(LOST), ["1", "3"], ["0", "1", "2", "3"], config)
    check_steps(run, range(LOST, 8), ["1", "3"], ["1", "3"], config)


def test_a_rank_that_is_lost_before_the_first_step_takes_no_part(team):
    config = {"wire": "int8"}
    run = team(config=config, die={"0": (0, "made")})
    check_steps(run, range(8), ["1", "2"], ["1", "2"], config)


@pytest.mark.parametrize(
    "die",
    few(
        (
            {"3": (LOST, "before"), "2": (2, "connecting")},
            {"0": (LOST, "before"), "1": (2, "connecting")},  # each has hosted the store of a view
            {"1": (1, "connecting")},
        ),
        {"3": (LOST, "before"), "2": (2, "connecting")},
    ),
)
def test_a_rank_that_is_lost_as_a_view_connects_holds_up_nobody(team, die):
    config = {"wire": "int8"}
    run = team(config=config, num_founders=4, die=die)
    left = [name for name in "0123" if name not in die]
    check_steps(run, range(LOST, 8), left, left, config)


def test_a_rank_that_is_lost_as_it_connects_its_first_view_holds_up_nobody(team):
    config = {"wire": "int8"}
    run = team(config=config, num_founders=2, num_steps=12, meets=4, die={"j": (1, "connecting")})
    run.join("j", of="0")
    check_steps(run, range(12), ["0", "1"], ["0", "1"], config)
    assert run.read("0", "step.11")["view"] > 1  # the joiner has been a member


@pytest.mark.full
def test_the_last_rank_goes_on_alone(team):
    config = {"wire": "int8"}
    run = team(config=config, num_founders=2, die={"0": (LOST, "before")})
    check_steps(run, range(LOST), ["1"], ["0", "1"], config)
    check_steps(run, range(LOST, 8), ["1"], ["1"], config)


def test_a_survivor_that_misses_means_takes_them_from_one_that_has_finished(team):
    """Rank 1 finishes the step and rank 2 does not; rank 0 dies before the next one."""
    config = {"wire": "int8"}
    run = team(config=config, late=("2", LOST), die={"0": (LOST + 1, "before")})
    check_steps(run, range(LOST + 1), ["1", "2"], ["0", "1", "2"], config)
    check_steps(run, range(LOST + 1, 8), ["1", "2"], ["1", "2"], config)


def test_a_rank_that_joins_has_the_others_bits_and_its_gradients_count(team):
    config = {"wire": "int8"}
    run = team(config=config, num_founders=2, num_steps=40, meets=4)
    run.join("j", of="1")
    first = run.read("j", "ready")["step"]
    assert first > 0
    check_steps(run, range(max(0, first - 3), first), ["0", "1"], ["0", "1"], config)
    check_steps(run, range(first, first + 3), ["0", "1", "j"], ["0", "1", "j"], config)
    check_steps(run, range(37, 40), ["0", "1", "j"], ["0", "1", "j"], config)


@pytest.mark.full
def test_a_rank_that_joined_goes_on_without_the_founder_that_let_it_in(team):
    config = {"wire": "int8"}
    run = team(config=config, num_founders=2, num_steps=12, hold={"0": 4, "a": 8})
    run.read("0", "step.3")
    run.join("a", of="0")
    # Both founders wait at a step that the joiner takes part in, so one is held until the joiner has asked.
    (run.folder / "go").touch()
    first = run.read("a", "ready")["step"]
    run.processes["0"].kill()
    run.read("1", f"step.{first}")


def test_microbatches_of_a_step_stay_as_many(team):
    config = {"wire": "fp32", "weighted": "mean"}
    run = team(config=config, microbatches=6, die={"1": (LOST, "before")})
    for step in range(8):
        told = {name: run.read(name, f"step.{step}") for name in ("0", "2")}
        of = ("0", "1", "2") if step < LOST else ("0", "2")
        for i, shape in enumerate(SHAPES):
            # Each of a rank's microbatches has the same gradient, so the rank's weight is their number.
            mean = sum(gradient(name, step, i, shape) for name in of) / len(of)
            for name in told:
                assert torch.allclose(told[name]["means"][i], mean, rtol=1e-6, atol=1e-5), (step, name)
        portions = [told[name]["portion"] for name in told]
        assert portions == ([(0, 3), (3, 3)] if step >= LOST else [(0, 2), (4, 2)])


def test_with_error_feedback_no_gradient_is_lost_but_that_of_the_lost_rank(team):
    """What was delivered and what the survivors still keep is what they have computed, to a rounding of a mean."""
    config = {"wire": "int4", "feedback": fusedcomm.Feedback("fp32")}
    run = team(config=config, die={"0": (LOST, "between")})
    ends = {name: run.read(name, "end")["residuals"] for name in ("1", "2")}
    for i, shape in enumerate(SHAPES):
        delivered = torch.zeros(shape)
        for step in range(8):
            size = 3 if step < LOST else 2
            delivered += size * run.read("1", f"step.{step}")["means"][i]
        computed = sum(gradient(name, step, i, shape) for name in ("1", "2") for step in range(8))
        of_lost = sum(gradient("0", step, i, shape) for step in range(LOST))
        kept = sum(residuals[f"p{i}"].view(shape) for residuals in ends.values())
        # The lost rank's residuals are lost with it: the rounding of its gradients and of a third of the means.
        difference = (delivered + kept - computed - of_lost).abs()
        assert difference.max() <= 3 * 100 / 7 + 100 / 7


def test_fewer_than_min_ranks_stop_by_name(team):
    run = team(config={"wire": "int8"}, min_ranks=3, die={"1": (LOST, "before")})
    for name in ("0", "2"):
        assert run.failure(name).startswith("TooFewRanksError")
