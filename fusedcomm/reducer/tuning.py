"""What a GradReducer does with a search: the buckets' size, and the reducer as the tuner's target."""

import dataclasses
import os
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from fusedcomm.autotune.auto import Auto, ConfigLike, chosen
from fusedcomm.autotune.search import Tuning, loaded
from fusedcomm.autotune.space import USUAL_BUCKET_MIB, BucketSpace, Space
from fusedcomm.autotune.tuner import Tuner, bucket_caps
from fusedcomm.config import AUTO, Config, LocalOptions, check
from fusedcomm.native import _C
from fusedcomm.session.parameters import NamedParameter

BucketMib = float | Literal["auto"]


class BucketSize:
    """The present size of buckets."""

    def __init__(self, mib: float) -> None:
        self.mib = mib

    def caps(self) -> list[int]:
        """Bytes at which the first bucket and the others are complete."""
        return bucket_caps(self.mib)


class ReducerTarget:
    """The native reducer as the target of a :class:`Tuner`."""

    def __init__(self, reducer: "_C.GradReducer", size: BucketSize) -> None:
        self._reducer, self._size = reducer, size

    def set(self, synchronizer: "_C.Synchronizer", process_group: dist.ProcessGroup) -> None:
        """See :class:`fusedcomm.autotune.tuner.Target`, also for the methods below."""
        self._reducer.set_synchronizer(synchronizer)

    def set_bucket_mib(self, mib: float) -> None:
        """Cuts buckets of this size from the next pass on."""
        self._size.mib = mib
        self._reducer.set_caps(*self._size.caps())

    def watch(self, device: "_C.Device", begin_pass: Callable[[], object]) -> None:
        """Calls `begin_pass` before each synchronized pass, and notes when it ends."""
        self._reducer.observe(device, begin_pass)

    def unwatch(self) -> None:
        """Ends what :meth:`watch` began. Idempotent."""
        self._reducer.end_observation()

    def take_pass_ends(self) -> list[float]:
        """When each pass ended since the last call, in milliseconds."""
        return self._reducer.take_pass_ends()


@dataclasses.dataclass(frozen=True)
class Choice:
    """The arguments `config` and `bucket_mib` of a GradReducer, checked."""

    config: Config | Auto
    bucket_mib: BucketMib

    @classmethod
    def of(cls, config: ConfigLike | None, bucket_mib: BucketMib | None) -> "Choice":
        """Raises TypeError or ValueError if one of them is not possible."""
        if bucket_mib is not None and bucket_mib != AUTO:
            check.positive("bucket_mib", bucket_mib, "a number of MiB greater than 0, or 'auto'")
        config = chosen(
            config,
            no_off="config='off' is DDP's own all-reduce, which a GradReducer does not have: use fusedcomm.attach(ddp, "
            "'off'), or config='fp32', which is as exact",
        )
        if bucket_mib is None:
            bucket_mib = AUTO if isinstance(config, Auto) else USUAL_BUCKET_MIB
        return cls(config, bucket_mib)

    @property
    def size(self) -> BucketSize:
        """The size of buckets to begin with."""
        return BucketSize(USUAL_BUCKET_MIB if self.bucket_mib == AUTO else self.bucket_mib)

    @property
    def space(self) -> Space | None:
        """The candidates to try; None if nothing is to be searched."""
        has_sizes = self.bucket_mib == AUTO
        if isinstance(self.config, Auto):
            return Space(self.config, has_off=False, has_sizes=has_sizes)
        return BucketSpace(self.config) if has_sizes else None

    @property
    def tuned(self) -> Tuning | str | os.PathLike | None:
        """The result of an earlier search, or its path; None without one."""
        return self.config.tuned if isinstance(self.config, Auto) else None


def make_tuner(
    choice: Choice,
    space: Space,
    process_group: dist.ProcessGroup,
    parameters: list[NamedParameter],
    local: LocalOptions,
    device: torch.device,
    size: BucketSize,
    *,
    announce: bool,
    also_agree: dict[str, object],
    problem: Exception | None,
) -> Tuner:
    """Returns the tuner of a GradReducer. Raises as :class:`Tuner`."""
    tuned = None
    try:
        tuned = loaded(choice.tuned)
    except ValueError as error:
        problem = problem or error
    return Tuner(
        space,
        process_group,
        parameters,
        local,
        device,
        announce=announce,
        caps=size.caps,
        also_agree=also_agree,
        tuned=tuned,
        problem=problem,
    )
