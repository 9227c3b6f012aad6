"""Each trainer with weights of ranks: its own scaling of losses does not count twice."""

import pytest
from sampling import few
from test_trainers import TRAINERS, found_in, trained


@pytest.mark.parametrize("trainer", few(TRAINERS, "accelerate"))
def test_training_is_that_of_one_process_with_all_tokens(made_once, trainer):
    for found in found_in(trained(made_once, trainer, "weighted", trainer)):
        assert found["error"] < 1e-5
        counts = found["counts"]
        assert counts[0] != counts[1] and len(counts[0]) == 6
