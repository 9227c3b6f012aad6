"""What a GradReducer does with a search: its candidates, and the reducer as the tuner's target."""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from fusedcomm.autotune.auto import Auto, ConfigLike, chosen
from fusedcomm.config import Config
from fusedcomm.native import _C

USUAL_BUCKET_MIB = 25
"""MiB at which a bucket is complete if nobody chooses, as in DDP."""


class ReducerTarget:
    """The native reducer as the target of a :class:`fusedcomm.autotune.tuner.Tuner`."""

    def __init__(self, reducer: "_C.GradReducer") -> None:
        self._reducer = reducer

    def set(self, synchronizer: "_C.Synchronizer", process_group: dist.ProcessGroup) -> None:
        """See :class:`fusedcomm.autotune.tuner.Target`, also for the methods below."""
        self._reducer.set_synchronizer(synchronizer)

    def watch(self, device: "_C.Device", begin_pass: Callable[[], object]) -> None:
        """Calls `begin_pass` before each synchronized pass, and notes when it ends."""
        self._reducer.observe(device, begin_pass)

    def unwatch(self) -> None:
        """Ends what :meth:`watch` began. Idempotent."""
        self._reducer.end_observation()

    def take_pass_ends(self) -> list[float]:
        """When each pass ended since the last call, in milliseconds."""
        return self._reducer.take_pass_ends()


def configs_of(config: ConfigLike | None) -> tuple[Sequence[Config], bool]:
    """(the configurations that the argument `config` of a GradReducer asks for, whether the fastest of them is
    searched). A search tries "fp32" first, in place of DDP's own all-reduce.

    Raises TypeError or ValueError if the argument is not possible.
    """
    wanted = chosen(config, "GradReducer")
    if not isinstance(wanted, Auto):
        return (wanted,), False
    exact = Config("fp32")
    return (exact, *(each for each in wanted.configs if each != exact)), True
