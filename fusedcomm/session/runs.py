"""What runs behind a handle, however it was attached."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusedcomm.session.compare import ParameterDifference
    from fusedcomm.session.plan import Plan
    from fusedcomm.session.stats import Stats


class Runs:
    """A session, a stand-in where torch sums, a search between sessions, or the meshes of an FSDP2 model."""

    is_off = False
    """Whether gradients go through torch's own sums now."""
    is_searching = False
    """Whether a search has not ended."""
    uses_engine = True
    """Whether the gradients of this pass, or between passes of the last one, go through fusedcomm."""

    weights: Any = None
    """The engine's weights, to which the rank's weight is given. None without Config(weighted=…)."""

    session: Any
    """The session, or its stand-in, that runs now."""

    def stats(self) -> "Stats":
        """Counts and times of this rank."""
        raise NotImplementedError

    def plan(self, bucket_nbytes_caps: list[int] | None) -> "Plan":
        """How each bucket is sent; see :meth:`fusedcomm.session.session.Session.plan`."""
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        """Stops what runs; buckets under way fail with `reason`. Idempotent."""
        raise NotImplementedError

    def compare_parameters(self) -> "ParameterDifference | None":
        """See :meth:`fusedcomm.session.handle.CommHandle.compare_parameters`."""
        return self.session.compare_parameters()

    def tuning(self) -> object | None:
        """What a search has found; None without one."""
        return None
