"""Processes are killed, stopped and started at random moments."""

import random
import signal
import time

import pytest
from crew import Crew


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_random_losses_and_joins(tmp_path, seed):
    chosen = random.Random(seed)
    with Crew(tmp_path, 4, silence_s=3.0) as crew:
        alive = [f"m{rank}" for rank in range(4)]
        crew.wait_steps(alive, 4)
        for turn in range(25):
            time.sleep(chosen.random() * 0.2)
            lost = chosen.sample(alive, chosen.choice([1, 1, 2]))
            joins = chosen.random() < 0.5
            if joins:  # while the others notice the loss
                crew.join(f"j{turn}", by=chosen.choice([name for name in alive if name not in lost]))
            if chosen.random() < 0.2:
                crew.signal(lost[0], signal.SIGSTOP)
                crew.kill(*lost[1:])
            else:
                crew.kill(*lost)
            alive = [name for name in alive if name not in lost]
            if joins:
                alive.append(f"j{turn}")
            for index in range(4 - len(alive)):
                crew.join(f"k{turn}{index}", by=chosen.choice(alive))
                alive.append(f"k{turn}{index}")
            crew.wait_steps(alive, 4)
            crew.kill(*[name for name in lost if crew.processes[name].is_alive()])
