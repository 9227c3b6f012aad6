"""The measurements of one run, and their summary over the runs of all seeds."""

import dataclasses
import math

import numpy as np

DEFAULT_NAME = "DDP default"
STOCK_FP16_NAME = "DDP fp16 hook"


@dataclasses.dataclass(frozen=True)
class RunSpec:
    """A way of synchronizing, and a seed."""

    name: str
    wire: str  # the wire dtype
    seed: int
    has_reducer: bool = False  # fusedcomm.GradReducer instead of DDP


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The measurements of one run on all ranks; the same on every rank."""

    spec: RunSpec
    accuracy: float  # on the test digits
    final_loss: float  # on all training digits, after the last step
    wire_bytes_per_step: float | None  # sent by a rank over TCP, mean over ranks; None: not measurable here
    step_ms: np.ndarray  # every measured step of every rank
    exposed_ms: np.ndarray  # one value for each value of step_ms
    loss_curve: list[float]  # one loss for each step, on its batch, mean over ranks
    ranks_identical: bool  # every rank ended with the same parameters, bit for bit


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and range of a value over the seeds."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> "Spread":
        """Of one value or more. All three are NaN if one of them is."""
        if any(math.isnan(value) for value in values):
            return Spread(math.nan, math.nan, math.nan)
        return Spread(sum(values) / len(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Summary:
    """One way of synchronizing, over all seeds."""

    name: str
    wire: str
    accuracy: Spread
    final_loss: Spread
    wire_bytes_per_step: float | None
    bytes_ratio: float | None  # wire_bytes_per_step, divided by that of DDP's default; None: not measured
    step_ms_p50: float
    step_ms_p95: float
    exposed_ms_p50: float
    ranks_identical: bool


def summaries(results: list[RunResult]) -> list[Summary]:
    """One summary for each way of synchronizing, in the order of the runs. DDP's default must be among them."""
    names = dict.fromkeys(result.spec.name for result in results)
    by_name = {name: [result for result in results if result.spec.name == name] for name in names}
    default_nbytes = mean_nbytes(by_name[DEFAULT_NAME])
    return [summary(runs, default_nbytes) for runs in by_name.values()]


def summary(runs: list[RunResult], default_nbytes: float | None) -> Summary:
    """Summarizes the runs of one way. default_nbytes: bytes per step of DDP's default; None: not measured."""
    nbytes = mean_nbytes(runs)
    return Summary(
        name=runs[0].spec.name,
        wire=runs[0].spec.wire,
        accuracy=Spread.of([run.accuracy for run in runs]),
        final_loss=Spread.of([run.final_loss for run in runs]),
        wire_bytes_per_step=nbytes,
        bytes_ratio=nbytes / default_nbytes if nbytes and default_nbytes else None,
        **timings(runs),
        ranks_identical=all(run.ranks_identical for run in runs),
    )


def mean_nbytes(runs: list[RunResult]) -> float | None:
    """The mean of wire_bytes_per_step; None if a run lacks it."""
    nbytes = [run.wire_bytes_per_step for run in runs]
    return None if None in nbytes else sum(nbytes) / len(nbytes)


def timings(runs: list[RunResult]) -> dict[str, float]:
    """Percentiles over the steps of all ranks and seeds together."""
    step_ms = np.concatenate([run.step_ms for run in runs])
    exposed_ms = np.concatenate([run.exposed_ms for run in runs])
    return {
        "step_ms_p50": float(np.percentile(step_ms, 50)),
        "step_ms_p95": float(np.percentile(step_ms, 95)),
        "exposed_ms_p50": float(np.percentile(exposed_ms, 50)),
    }
