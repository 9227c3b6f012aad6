"""What the engine has seen and done, summed up for a person or a log."""

import dataclasses
import statistics

from fusedcomm.native import _C


@dataclasses.dataclass(frozen=True)
class Verified:
    """One bucket's result beside an exact all-reduce of the same gradients. Equal on every rank."""

    step: int
    bucket: str
    relative_error: float
    """‖result − exact‖₂ / ‖exact‖₂; 0 where both are zeros. Inf where an element of one is finite and that of the other
    is not; NaN where gradients were not finite, and are not in the result either."""


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """Whose gradients were NaN or Inf."""

    rank: int
    bucket: str
    """Where the parameter is now; empty if it is in none."""
    parameter: str
    count: int
    """Elements, since attach."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Of this rank, since attach. Times in milliseconds; medians are over the last 512 steps, None before the first.

    A step ends with DDP's last bucket. Sparse and float64 buckets count as buckets but not as bytes.
    """

    steps: int
    buckets: int
    grad_nbytes: int
    """Gradient bytes handed to the hook."""
    sent_nbytes: int
    """Bytes this rank gave to the transport to send."""
    sent_between_hosts_nbytes: int
    """Of these, those to other hosts: every rank is one, unless :func:`fusedcomm.attach` was told otherwise."""
    wire_ratio: float | None
    """sent_nbytes over what an all-reduce of the gradients in their own dtype would have sent."""
    exposed_ms_p50: float | None
    """From the last bucket's hand-over to its completion: what the step waits for."""
    busy_ms_p50: float | None
    """Time in a step during which at least one bucket was under way."""
    overlap: float | None
    """Share of the busy time that was hidden behind the backward pass."""
    nonfinite: int
    """Elements of local gradients that were NaN or Inf when packed."""
    nonfinite_by_parameter: dict[str, int]
    quantisation_error: dict[str, float]
    """By bucket, when it was last measured (``measure_every`` of :class:`fusedcomm.Checks`): ‖g − ĝ‖₂ / ‖g‖₂ of this
    rank's gradients g, and ĝ, what the other ranks got for them; with error feedback they had got some of it earlier.
    With ``hosts`` it is of this rank's share of its host's sum, against its own gradients: as large for independent
    gradients, √(ranks on a host) times for equal ones. Buckets that are summed exactly are not there."""
    verified: tuple[Verified, ...]
    """The last 256 buckets that were compared, oldest first; see ``verify_every`` of :class:`fusedcomm.Checks`."""
    off: bool = False
    """Whether gradients go through DDP's own all-reduce now, because of wire="auto": then nothing is counted."""


def collect(hook: "_C.Synchroniser", world_size: int) -> Stats:
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
    """This rank's share of a report."""
    bucket_of = {name: bucket.label for bucket in hook.buckets() for name in bucket.parameters}
    counts = hook.nonfinite_by_parameter()
    return [NonFinite(rank, bucket_of.get(name, ""), name, count) for name, count in counts.items()]
