"""Ranks that train are killed, stopped and started at random moments, and all have the same bits after every step."""

import random
import signal
import time

import pytest
from trainees import Endless

import fusedcomm


@pytest.mark.full
@pytest.mark.parametrize("wire", ["int8", "fp32"])
@pytest.mark.parametrize("seed", range(2))
def test_random_losses_and_joins(team, seed, wire):
    chosen = random.Random(seed)
    chunks = fusedcomm.Chunks(nbytes=4096, in_flight=2)
    run = team(Endless, config={"wire": wire, "chunks": chunks}, num_founders=4, silence=3.0)
    alive = ["0", "1", "2", "3"]
    run.wait_steps(*alive)
    for turn in range(25):
        time.sleep(chosen.random() * 0.2)
        lost = chosen.sample(alive, chosen.choice([1, 1, 2]))
        left = [name for name in alive if name not in lost]
        early = [f"{turn}.early"] * (chosen.random() < 0.5)  # while the others notice the loss
        later = [f"{turn}.{index}" for index in range(len(lost) - len(early))]
        for name in early:
            run.join(name, of=chosen.choice(left))
        run.signal(signal.SIGSTOP if chosen.random() < 0.2 else signal.SIGKILL, lost[0])
        run.signal(signal.SIGKILL, *lost[1:])
        for name in later:
            run.join(name, of=chosen.choice(left))
        alive = left + early + later
        run.wait_steps(*alive)
        run.signal(signal.SIGKILL, lost[0])
    run.check_steps()
