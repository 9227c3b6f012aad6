"""What runs behind a handle, however it was attached."""


class Runs:
    """A session, a stand-in where torch sums, a search between sessions, or the meshes of an FSDP2 model.

    Each also has `session`, the one that is running now, ``stats()``, ``plan(bucket_nbytes_caps)`` and
    ``stop(reason)``; see :class:`fusedcomm.session.session.Session`.
    """

    is_off = False
    """Whether gradients go through torch's own sums now."""
    is_searching = False
    """Whether a search has not ended."""
    uses_engine = True
    """Whether the gradients of this pass, or between passes of the last one, go through fusedcomm."""

    def tuning(self) -> object | None:
        """What a search has found; None without one."""
        return None
