"""Ranks that train are killed and started at random moments, and all have the same bits after every step."""

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).with_name("chaos.py")


@pytest.mark.full
@pytest.mark.parametrize("options", ["--wire int8", "--wire fp32 --in-turn", "--wire int4 --feedback"])
def test_random_losses_and_joins(options):
    subprocess.run([sys.executable, str(CHAOS), "--kills", "25", *options.split()], check=True)
