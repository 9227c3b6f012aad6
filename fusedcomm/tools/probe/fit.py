"""Fits costs to measured times. A few disturbed measurements do not move the fits."""

import itertools
import statistics
from collections.abc import Sequence

from fusedcomm.tools.cluster import Cost

Point = tuple[float, float]
"""(units, seconds)"""

MIN_SHARE_OF_BYTES = 0.05
"""The smallest share of the largest message's time that bytes are taken to need. With a smaller share their rate cannot
be told from the fixed part of every message."""


def theil_sen(points: Sequence[Point]) -> Cost:
    """A line through the points (Theil-Sen estimator).

    The slope is the median of the slopes of all pairs of points, each weighted by the distance of its points in units.
    The fixed part is the median of what the slope leaves of each point. Neither is negative. With one point the fixed
    part is 0.

    Raises:
        ValueError: there is no point, or several points all have the same units.
    """
    if len(points) == 1:
        units, seconds = points[0]
        return Cost(0.0, seconds / units)
    pairs = itertools.combinations(points, 2)
    slopes = sorted(
        ((right_s - left_s) / (right - left), abs(right - left))
        for (left, left_s), (right, right_s) in pairs
        if right != left
    )
    if not slopes:
        raise ValueError(f"no line through {list(points)}: measure at least two sizes")
    half = sum(weight for _, weight in slopes) / 2
    below = itertools.accumulate(weight for _, weight in slopes)
    slope = next(slope for (slope, _), weight in zip(slopes, below, strict=True) if weight >= half)
    return with_slope(points, max(0.0, slope))


def with_slope(points: Sequence[Point], per_unit_s: float) -> Cost:
    """A line of the given slope: only the fixed part is fitted."""
    return Cost(max(0.0, statistics.median(seconds - units * per_unit_s for units, seconds in points)), per_unit_s)


def collective(alone: Sequence[Point], together: Sequence[Point]) -> Cost:
    """The cost of a collective.

    The time of each of several in flight is the network's. What a single one takes beyond it is latency. The fixed part
    is at least that of the smallest single one, since larger ones may seem too fast: they begin after a pause, and then
    a shaped link carries a burst faster than its line rate.

    Args:
        alone: times of single collectives.
        together: times of collectives with several in flight, divided by their number.
    """
    rate = theil_sen(together)
    largest, largest_s = max(together)
    if rate.per_unit_s * largest < MIN_SHARE_OF_BYTES * largest_s:
        rate = with_slope(together, MIN_SHARE_OF_BYTES * largest_s / largest)
    least, least_s = min(alone)
    if rate.fixed_s > least_s:
        # A fixed part above the time of the smallest message means a disturbance. The largest message gives the rate.
        rate = Cost(min(least_s, largest_s), max(0.0, largest_s - least_s) / largest)
    latency_s = max(with_slope(alone, rate.per_unit_s).fixed_s, least_s - least * rate.per_unit_s)
    return Cost(max(latency_s, rate.fixed_s), rate.per_unit_s, rate.fixed_s)
