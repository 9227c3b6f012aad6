"""Ranks that train are killed, stopped and started at random moments, and all have the same bits after every step."""

import chaos
import pytest


@pytest.mark.full
@pytest.mark.parametrize(
    "options", ["--wire int8 --stop 0.2", "--wire fp32 --seed 1", "--wire int4 --feedback --in-turn"]
)
def test_random_losses_and_joins(options):
    chaos.run(chaos.parsed(["--kills", "25", "--silence", "3", *options.split()]))
