"""Exceptions of fusedcomm.horovod."""

NOT_INITIALISED = "fusedcomm.horovod is not initialised: call hvd.init() first"


class HorovodInternalError(RuntimeError):
    """A collective failed: the ranks disagreed about it, or a rank was lost. Elastic training
    catches it, restores the committed state and starts again."""


class HostsUpdatedInterrupt(RuntimeError):
    """The ranks of an elastic job have changed. `skip_sync`: for Horovod's sake; states are synced in any case."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the ranks of the job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """For scripts that catch it; never raised."""
