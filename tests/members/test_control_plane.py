"""Processes that die, and processes that join."""

import pytest
from crew import Crew
from sampling import few


def test_founders_train_together(tmp_path):
    with Crew(tmp_path, 3) as crew:
        crew.wait_steps(["m0", "m1", "m2"], 3)


@pytest.mark.parametrize("killed", few(["m0", "m1", "m2", "m0 m1", "m1 m3"], "m0", "m1 m3"))
def test_the_others_go_on_without_the_killed(tmp_path, killed):
    killed = killed.split()
    with Crew(tmp_path, 4) as crew:
        left = [f"m{rank}" for rank in range(4) if f"m{rank}" not in killed]
        crew.wait_steps(left, 4)
        crew.kill(*killed)
        crew.wait_steps(left, 4 - len(killed))


def test_a_process_joins_by_any_address(tmp_path):
    with Crew(tmp_path, 2) as crew:
        crew.wait_steps(["m0"], 2)
        crew.join("j0", by="m1")
        crew.wait_steps(["m0", "m1", "j0"], 3)
        crew.kill("m0")
        crew.wait_steps(["m1", "j0"], 2)
