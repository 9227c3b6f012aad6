"""Predicts which ``bucket_cap_mb`` DDP should have been made with, from the buckets of a few steps.

The model: buckets are sent one after another, and each takes a + b · nbytes; a and b are fitted to the observed
buckets. A bucket can start when the backward pass has made its last gradient; that time is interpolated between the
observed hand-overs. The exposed time is what remains to wait for after the last gradient.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

# Values of bucket_cap_mb, in MiB, that are compared.
CAPS_MB = (1, 5, 10, 25, 50, 100)

_LEAST_RATIO = 1.5
"""Ratio of two buckets' bytes above which the pair gives a time per byte."""
_WORTH_SAYING = 0.02
"""Least share of a step that another cap must save to be recommended."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One bucket of one pass. Times count from the pass's first hand-over; `done_ms` is NaN if the bucket failed."""

    nbytes: int
    handed_ms: float
    done_ms: float


@dataclasses.dataclass(frozen=True)
class BucketCap:
    """A prediction. If there is none, `exposed_ms` is empty and `unknown` says why; otherwise `unknown` is empty."""

    exposed_ms: tuple[tuple[int, float], ...] = ()
    """(bucket_cap_mb, predicted exposed time) for each of CAPS_MB."""
    now_ms: float | None = None
    """Predicted exposed time of the buckets as they are."""
    step_ms: float | None = None
    """Measured time of a step."""
    unknown: str = ""

    @classmethod
    def from_fields(cls, fields: Mapping) -> "BucketCap":
        return cls(**{**fields, "exposed_ms": tuple((int(cap), float(ms)) for cap, ms in fields["exposed_ms"])})

    @property
    def best_mb(self) -> int | None:
        return min(self.exposed_ms, key=lambda row: row[1])[0] if self.exposed_ms else None

    def __str__(self) -> str:
        if self.unknown:
            return f"bucket_cap_mb: no prediction, {self.unknown}"
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
    """Predicts the exposed time for each cap.

    Args:
        passes: the observed buckets of some backward passes, each in the order of hand-over.
        step_ms: the measured time of a step.
        cuts: for each bucket_cap_mb, the bytes of the buckets that DDP would make, in backward order.
    """
    typical = _typical(passes)
    if not typical:
        return BucketCap(unknown="no backward pass was observed to its end: train some steps first")
    if len(typical) < 2:
        return BucketCap(unknown="all gradients are in one bucket: make DDP with a smaller bucket_cap_mb to see")
    wire = _fit(typical)
    if wire is None:
        return BucketCap(unknown=f"the {len(typical)} buckets do not tell the time of a bucket from the time of a byte")
    ready = _Readiness(typical)

    def exposed(nbytes_of_buckets: Sequence[int]) -> float:
        done = float("-inf")
        for nbytes, total in zip(nbytes_of_buckets, itertools.accumulate(nbytes_of_buckets), strict=True):
            done = max(done, ready.at(total)) + wire[0] + wire[1] * nbytes
        return done - ready.at(total)

    rows = tuple((cap, exposed(nbytes)) for cap, nbytes in cuts.items())
    return BucketCap(rows, exposed([bucket.nbytes for bucket in typical]), step_ms)


def _typical(passes: Sequence[Sequence[Bucket]]) -> list[Bucket]:
    """Each bucket's median times over the passes with the same buckets as the last. Ignores passes that failed."""
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
    """(a, b) in ms and ms per byte, from the median slope. None if there is no slope or it is not positive."""
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
    """The time at which the backward pass had made a number of bytes of gradients, in backward order."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        totals = itertools.accumulate(bucket.nbytes for bucket in buckets)
        self._points = [(total, bucket.handed_ms) for total, bucket in zip(totals, buckets, strict=True)]

    def at(self, nbytes: int) -> float:
        """In ms. Linear between two buckets; before the first, with the slope from the first to the last."""
        (first, first_ms), (last, last_ms) = self._points[0], self._points[-1]
        if nbytes <= first:
            return first_ms - (first - nbytes) * (last_ms - first_ms) / (last - first)
        for (left, left_ms), (right, right_ms) in itertools.pairwise(self._points):
            if nbytes <= right:
                return left_ms + (nbytes - left) * (right_ms - left_ms) / (right - left)
        return last_ms
