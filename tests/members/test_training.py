"""Backward passes in which ranks are lost."""

import pytest
import torch
from sampling import few
from trainees import SHAPES, gradient

import fusedcomm

pytestmark = pytest.mark.check

LOST = 3
"""The step in which a rank dies."""


@pytest.mark.sampled
@pytest.mark.parametrize("wire", few(("int8", "bf16", "fp16", "fp32", "fp8", "int4"), "int8", "int4"))
@pytest.mark.parametrize("victim", ["0", "1", "2"])
@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_pass_that_loses_a_rank_has_the_mean_of_the_survivors(team, moment, victim, wire):
    config = {"wire": wire, "chunks": fusedcomm.Chunks(nbytes=4096, in_flight=2)}
    run = team(config=config, die={victim: (LOST, moment)})
    survivors = [name for name in "012" if name != victim]
    run.check_means(range(LOST), of="012", names=survivors)
    run.check_means(range(LOST, 8), of=survivors)
    changes = [run.read(name, "end")["changes"] for name in survivors]
    assert [[change["step"] for change in of_rank] for of_rank in changes] == [[LOST]] * 2
    assert all(len(change["lost"]) == 1 and change["size"] == 2 for of_rank in changes for change in of_rank)


LOSSES = [
    {"0": (LOST, "before"), "2": (LOST, "between")},
    {"0": (0, "made")},
    {"3": (LOST, "before"), "2": (2, "connecting")},
    {"0": (LOST, "before"), "1": (2, "connecting")},  # each has hosted the store of a view
    {"1": (1, "connecting")},
    {"0": (LOST, "before"), "1": (LOST, "before"), "3": (LOST + 1, "before")},  # the last rank goes on alone
]


@pytest.mark.parametrize("die", few(LOSSES, *LOSSES[:3]), ids=str)
def test_whoever_is_lost_at_any_moment_the_others_go_on_with_their_means(team, die):
    run = team(num_founders=4, die=die)
    left = [name for name in "0123" if name not in die]
    run.check_means(range(LOST + 1 if len(left) == 1 else LOST, 8), of=left)


def test_a_survivor_that_misses_means_takes_them_from_one_that_has_finished(team):
    """Rank 1 finishes the step and rank 2 does not; rank 0 dies before the next one."""
    run = team(late=("2", LOST), die={"0": (LOST + 1, "before")})
    run.check_means(range(LOST + 1), of="012", names="12")
    run.check_means(range(LOST + 1, 8), of="12")


def test_microbatches_of_a_step_stay_as_many_also_where_a_survivor_takes_means_from_another(team):
    config, late = {"wire": "fp32", "weighted": "mean"}, ("2", LOST - 1)
    run = team(config=config, microbatches=6, late=late, die={"1": (LOST, "before")})
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
    run = team(config={"wire": "int4", "feedback": fusedcomm.Feedback()}, die={"0": (LOST, "between")})
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


@pytest.mark.parametrize(("moment", "why"), [("before", ""), ("leaving", "it has left: it has other plans")])
def test_fewer_than_min_ranks_stop_by_name(team, moment, why):
    run = team(min_ranks=3, die={"1": (LOST, moment)})
    for name in ("0", "2"):
        failure = run.failure(name)
        assert failure.startswith("TooFewRanksError"), failure
        assert f"2 of 3 members of view 0 are left, and min_ranks is 3. Lost: 1 ({why}" in failure
