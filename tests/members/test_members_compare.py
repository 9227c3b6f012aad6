"""Members compare their parameters: a rank that most others outvote leaves, and the others go on."""

import torch
from trainees import Trainee

FLIPPED, EVERY = 3, 2


class Flipping(Trainee):
    """The last founder changes one element before a step."""

    def step(self, step: int) -> None:
        if step == FLIPPED and self.name == str(self.script.num_founders - 1):
            self.parameters[1].data[0, 0] += 1
        super().step(step)


def test_a_rank_that_most_others_outvote_leaves_and_they_go_on(team):
    run = team(Flipping, config={"wire": "int8", "compare_every": EVERY})
    failure = run.failure("2")
    assert failure.startswith("DamagedError") and "ahead of step 4 the parameters of rank 2" in failure, failure
    for name in "01":
        ended = run.read(name, "end")["changes"]
        assert [(change["step"], change["size"]) for change in ended] == [(4, 2)]
    for step in range(8):
        first, second = (run.read(name, f"step.{step}")["parameters"] for name in "01")
        assert all(map(torch.equal, first, second))


def test_two_members_that_differ_are_both_told(team):
    run = team(Flipping, config={"wire": "int8", "compare_every": EVERY, "compare": "raise"}, num_founders=2)
    for name in "01":
        failure = run.failure(name)
        assert failure.startswith("DamagedError") and "the parameters of the 2 ranks differ" in failure, failure
