"""Statistics of the engine, for people and logs."""

import dataclasses
import statistics

from fusedcomm.native import _C


@dataclasses.dataclass(frozen=True)
class Verified:
    """The error of one bucket's result, against an exact all-reduce of the same gradients. Equal on every rank."""

    step: int
    bucket: str
    relative_error: float
    """‖result − exact‖₂ / ‖exact‖₂; 0 if both are all zeros. Inf if only the exact sum is, or if an element is
    finite in one of them and not in the other. NaN if gradients were not finite and the result is not finite there
    either."""


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """A rank's count of NaN and Inf in the gradients of one parameter."""

    rank: int
    bucket: str
    """The bucket that holds the parameter now; empty if none does."""
    parameter: str
    count: int
    """Elements that were NaN or Inf, since attach."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Statistics of this rank since attach. Times are in milliseconds. Medians cover the last 512 steps, and are None
    before the first.

    A step ends with DDP's last bucket. `buckets` counts sparse and float64 buckets, but no bytes are counted for them.
    """

    steps: int
    buckets: int
    grad_nbytes: int
    """Gradient bytes handed to the hook."""
    sent_nbytes: int
    """Bytes that this rank gave to the transport to send."""
    sent_between_hosts_nbytes: int
    """The sent bytes that go to other hosts. On one level, every rank counts as a host."""
    wire_ratio: float | None
    """sent_nbytes divided by the bytes of an all-reduce of the gradients in their own dtype. None if that is 0."""
    exposed_ms_p50: float | None
    """Median time from handing over the last bucket to its completion: what the step waits for."""
    busy_ms_p50: float | None
    """Median time of a step during which at least one bucket was under way."""
    overlap: float | None
    """Share of the busy time that the backward pass hid. None before the first step."""
    nonfinite: int
    """Elements of local gradients that were NaN or Inf when packed."""
    nonfinite_by_parameter: dict[str, int]
    quantisation_error: dict[str, float]
    """By bucket, the relative error ‖g − ĝ‖₂ / ‖g‖₂ that was last measured (``measure_every`` of
    :class:`fusedcomm.Checks`): g is this rank's gradient, ĝ what the other ranks received for it. With error feedback
    the numerator is the norm of the residual after the step.

    With ``hosts`` the numerator is the error of the part of its host's sum that this rank encodes. The ratio is then as
    large as without for independent gradients, and √(ranks on a host) times as large for equal ones. Buckets that are
    summed exactly are missing."""
    verified: tuple[Verified, ...]
    """The last 256 compared buckets, oldest first; see ``verify_every`` of :class:`fusedcomm.Checks`."""
    off: bool = False
    """Whether wire="auto" sends gradients through DDP's own all-reduce now. Nothing is counted then."""


def collect(hook: "_C.Synchroniser", world_size: int) -> Stats:
    """The statistics of this rank's engine. Waits for the device if that keeps the counts and norms."""
    native = hook.stats()
    exposed, busy = native.recent_exposed_ms, native.recent_busy_ms
    uncompressed = 2 * native.grad_nbytes * (world_size - 1) / world_size
    return Stats(
        steps=native.num_steps,
        buckets=native.num_buckets,
        grad_nbytes=native.grad_nbytes,
        sent_nbytes=native.sent_nbytes,
        sent_between_hosts_nbytes=native.sent_between_hosts_nbytes,
        wire_ratio=native.sent_nbytes / uncompressed if uncompressed else None,
        exposed_ms_p50=statistics.median(exposed) if exposed else None,
        busy_ms_p50=statistics.median(busy) if busy else None,
        overlap=1 - sum(exposed) / sum(busy) if busy and sum(busy) > 0 else None,
        nonfinite=native.num_nonfinite,
        nonfinite_by_parameter=hook.nonfinite_by_parameter(),
        quantisation_error={
            bucket: _ratio(measured.error_norm.item(), measured.norm.item())
            for bucket, measured in hook.measurements().items()
        },
        verified=tuple(_verified(verification) for verification in hook.verifications()),
    )


def _verified(verification: "_C.Verification") -> Verified:
    error, exact, num_wrong = verification.norms.sqrt().tolist()
    relative = float("inf") if num_wrong else _ratio(error, exact)
    return Verified(verification.step, verification.bucket, relative)


def _ratio(error: float, norm: float) -> float:
    return error / norm if norm != 0 else 0.0 if error == 0 else float("inf")


def nonfinite_rows(hook: "_C.Synchroniser", rank: int) -> list[NonFinite]:
    """This rank's rows of a report: one for each parameter that has had NaN or Inf gradients."""
    bucket_of = {name: bucket.label for bucket in hook.buckets() for name in bucket.parameters}
    counts = hook.nonfinite_by_parameter()
    return [NonFinite(rank, bucket_of.get(name, ""), name, count) for name, count in counts.items()]
