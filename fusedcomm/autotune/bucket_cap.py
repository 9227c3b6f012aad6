"""Which ``bucket_cap_mb`` DDP should have been made with, predicted from the buckets of a few steps.

Buckets travel one after another, each in a + b · nbytes, which is fitted to those seen; one can start when the backward
pass has made its last gradient, which is interpolated between the times at which buckets were handed over. What is left
to wait for after the last gradient is the exposed time.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

CAPS_MB = (1, 5, 10, 25, 50, 100)

_LEAST_RATIO = 1.5
"""Between the sizes of two buckets from which a time per byte can be told."""
_WORTH_SAYING = 0.02
"""Of a step."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One bucket of one pass; times since the pass's first hand-over."""

    nbytes: int
    handed_ms: float
    done_ms: float


@dataclasses.dataclass(frozen=True)
class BucketCap:
    """A prediction. Without `exposed_ms`, `unknown` says why there is none."""

    exposed_ms: tuple[tuple[int, float], ...] = ()
    """(bucket_cap_mb, predicted exposed time), for CAPS_MB."""
    now_ms: float | None = None
    """The same for the buckets as they are."""
    step_ms: float | None = None
    """Of a step as measured."""
    unknown: str = ""

    @classmethod
    def from_fields(cls, fields: Mapping) -> "BucketCap":
        return cls(**{**fields, "exposed_ms": tuple((int(cap), float(ms)) for cap, ms in fields["exposed_ms"])})

    @property
    def best_mb(self) -> int | None:
        return min(self.exposed_ms, key=lambda row: row[1])[0] if self.exposed_ms else None

    def __str__(self) -> str:
        if self.unknown:
            return f"bucket_cap_mb: cannot be told, {self.unknown}"
        table = ", ".join(f"{cap}: {ms:.3g}" for cap, ms in self.exposed_ms)
        best_ms = dict(self.exposed_ms)[self.best_mb]
        exposed = f"predicted ms exposed by bucket_cap_mb {{{table}}}, with the buckets as they are {self.now_ms:.3g}"
        if self.now_ms - best_ms < _WORTH_SAYING * self.step_ms:
            return f"{exposed}: nothing to gain"
        return (
            f"{exposed}: a step of {self.step_ms:.4g} ms would take about {self.step_ms - self.now_ms + best_ms:.4g}. "
            f"DDP fixes its buckets when it is made: DistributedDataParallel(…, bucket_cap_mb={self.best_mb})"
        )


def predict(passes: Sequence[Sequence[Bucket]], step_ms: float, cuts: Mapping[int, Sequence[int]]) -> BucketCap:
    """From the buckets of some backward passes of `step_ms` each.

    Args:
        cuts: by bucket_cap_mb, the bytes of the buckets that DDP would cut, in backward order.
    """
    typical = _typical(passes)
    if len(typical) < 2:
        return BucketCap(unknown="all gradients are in one bucket: make DDP with a smaller bucket_cap_mb to see")
    wire = _fit(typical)
    if wire is None:
        return BucketCap(unknown=f"the {len(typical)} buckets do not show what a bucket and what a byte takes")
    ready = _Readiness(typical)

    def exposed(nbytes_of_buckets: Sequence[int]) -> float:
        done = float("-inf")
        for nbytes, total in zip(nbytes_of_buckets, itertools.accumulate(nbytes_of_buckets), strict=True):
            done = max(done, ready.at(total)) + wire[0] + wire[1] * nbytes
        return done - ready.at(total)

    rows = tuple((cap, exposed(nbytes)) for cap, nbytes in cuts.items())
    return BucketCap(rows, exposed([bucket.nbytes for bucket in typical]), step_ms)


def _typical(passes: Sequence[Sequence[Bucket]]) -> list[Bucket]:
    """Medians over the passes that were cut as the last one was."""
    passes = [buckets for buckets in passes if not any(math.isnan(bucket.done_ms) for bucket in buckets)]
    sizes = [bucket.nbytes for bucket in passes[-1]] if passes else []
    alike = [buckets for buckets in passes if [bucket.nbytes for bucket in buckets] == sizes]
    return [
        Bucket(
            nbytes,
            statistics.median(bucket.handed_ms for bucket in same),
            statistics.median(bucket.done_ms for bucket in same),
        )
        for nbytes, *same in zip(sizes, *alike, strict=True)
    ]


def _fit(buckets: Sequence[Bucket]) -> tuple[float, float] | None:
    """(a, b) in ms and ms per byte, by the median slope; None if that is nothing."""
    times, before = [], float("-inf")
    for bucket in buckets:
        times.append((bucket.nbytes, bucket.done_ms - max(bucket.handed_ms, before)))
        before = bucket.done_ms
    slopes = [
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in itertools.combinations(sorted(times), 2)
        if x2 > _LEAST_RATIO * x1
    ]
    if not slopes or (per_byte := statistics.median(slopes)) <= 0:
        return None
    return max(0.0, statistics.median(ms - per_byte * nbytes for nbytes, ms in times)), per_byte


class _Readiness:
    """When the backward pass had made so many bytes of gradients, in its order."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        totals = itertools.accumulate(bucket.nbytes for bucket in buckets)
        self._points = [(total, bucket.handed_ms) for total, bucket in zip(totals, buckets, strict=True)]

    def at(self, nbytes: int) -> float:
        """Between two buckets in proportion, before the first as between the first and the last."""
        (first, first_ms), (last, last_ms) = self._points[0], self._points[-1]
        if nbytes <= first:
            return first_ms - (first - nbytes) * (last_ms - first_ms) / (last - first)
        for (left, left_ms), (right, right_ms) in itertools.pairwise(self._points):
            if nbytes <= right:
                return left_ms + (nbytes - left) * (right_ms - left_ms) / (right - left)
        return last_ms
