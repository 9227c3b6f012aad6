"""A comparison with a reference fails if only one side is NaN: in the figures of the benchmarks."""

import math
import sys
from pathlib import Path

from models import worst


def test_the_worst_of_some_errors_is_a_nan_if_one_is(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "bench"), *sys.path])
    from lib import common

    for function in (worst, common.worst):
        assert math.isnan(function([0.1, math.nan, 0.2])) and math.isnan(function([math.nan, 0.1]))
        assert function([0.25, 0.5, 0.125]) == 0.5
