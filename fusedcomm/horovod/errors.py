"""Exceptions of fusedcomm.horovod."""

NOT_INITIALISED = "fusedcomm.horovod is not initialised: call hvd.init() first"


class HorovodInternalError(RuntimeError):
    """A collective failed: the ranks disagreed about it, or a rank was lost. Elastic training
    catches it, restores the committed state and starts again."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed. `skip_sync`: hosts were only removed, so states need not be synced."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Kept for scripts that catch it; never raised: one build serves one torch, and `fusedcomm.native` checks that."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} was {installed_version} when it was built, and is {version} now")
        self.name, self.version, self.installed_version = name, version, installed_version
