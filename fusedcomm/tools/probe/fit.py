"""Costs from times: fits that a few disturbed measurements do not move."""

import itertools
import statistics
from collections.abc import Sequence

from fusedcomm.tools.cluster import Cost

Point = tuple[float, float]
"""(units, seconds)"""

MIN_SHARE_OF_BYTES = 0.05
"""Of the time of the largest message: where bytes take less, their rate is lost in what every message takes."""


def theil_sen(points: Sequence[Point]) -> Cost:
    """The median slope of all pairs of points, each counted by how far apart its points are, and the median of what it
    leaves of each point; neither is negative. One point: a slope alone.

    Raises:
        ValueError: there is no point, or all have the same units and there are several.
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
    """The fixed part alone is fitted."""
    return Cost(max(0.0, statistics.median(seconds - units * per_unit_s for units, seconds in points)), per_unit_s)


def collective(alone: Sequence[Point], together: Sequence[Point]) -> Cost:
    """Of a collective, from times of single ones and from the time that each of several under way takes: the latter is
    the network's, what a single one takes beyond it is latency. That is no less than the smallest one takes: single
    ones begin after a pause, and after that a shaped link carries a burst faster than its line."""
    rate = theil_sen(together)
    largest, largest_s = max(together)
    if rate.per_unit_s * largest < MIN_SHARE_OF_BYTES * largest_s:
        rate = with_slope(together, MIN_SHARE_OF_BYTES * largest_s / largest)
    least, least_s = min(alone)
    if rate.fixed_s > least_s:
        # No message costs the network more than the smallest takes: disturbed ones did. The largest tells the rate.
        rate = Cost(min(least_s, largest_s), max(0.0, largest_s - least_s) / largest)
    latency_s = max(with_slope(alone, rate.per_unit_s).fixed_s, least_s - least * rate.per_unit_s)
    return Cost(max(latency_s, rate.fixed_s), rate.per_unit_s, rate.fixed_s)
