"""Sessions that keep recovery codes, what a bucket is summed again from, and what they and their members refuse."""

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fusedcomm.config import Config, combinations
from fusedcomm.members.members import Members
from fusedcomm.native import _C
from fusedcomm.ranks.agreement import difference
from fusedcomm.session.plan import BucketsPlan
from fusedcomm.session.session import Session


class RecoverySession(Session):
    """A session whose buckets keep recovery codes, and their means. It reports stalls, but explains no failure: the
    members agree at once. A member may be lost while the ranks connect, and what already waits for it on a device would
    only end once somebody aborts it."""

    explains = warms_up = False

    def use_comparison(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Nothing: the members compare, so that a lost rank keeps nobody waiting. See Views."""

    def plan(self, bucket_nbytes_caps: list[int] | None, off: bool | None = None) -> BucketsPlan:
        found = super().plan(bucket_nbytes_caps, off)
        # A rank sends (p-1)/p of its codes and, p-1 times, its part of the means: as much as (p-1)/p of both.
        ranks = found.world_size
        kept_nbytes = found.sent_nbytes * ranks // (ranks - 1) if ranks > 1 else 0
        if self.device.type != "cpu":  # the means of two passes; see KeptMessages in job.h
            kept_nbytes = kept_nbytes * 3 // 2
        return dataclasses.replace(found, kept_nbytes=kept_nbytes)

    @property
    def native_config(self) -> "_C.WireConfig":
        config = self.effective_config
        return config.native(config.chunks, keeps_messages=True)


def with_recovery_codes(config: Config, members: Members, device: torch.device) -> Config:
    """`config` with sums on one level, whose recovery codes each rank has. Raises ValueError where that cannot be."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"fusedcomm: gradients are on {device}: ranks come and go on cpu or cuda, leave out members=")
    given = {
        "gradients on cuda": device.type == "cuda",
        "a default group over NCCL": dist.is_initialized() and "nccl" in str(dist.get_backend_config()),
        "sum": config.sum,
        "microbatches": members.microbatches,
        "weighted": config.weighted,
        "hosts": config.named_hosts,
    }
    combinations.refuse("Members", given)
    return dataclasses.replace(config, sum="two-shot", hosts=None)


def why_refused(joiner: dict, own: dict[str, object], members: Members) -> str:
    """Why a process may not join; empty if it may.

    joiner, own: what it and a member say of themselves, by field.
    """
    found = difference({"the members' ranks": own, "this one": {field: joiner.get(field) for field in own}})
    if found:
        return (
            f"{found}. Start it with the model, the configuration and the versions of torch and fusedcomm that the "
            "members have"
        )
    if members.microbatches is not None and members.size + 1 > members.microbatches:
        return (
            f"{members.microbatches} microbatches of a step are too few for {members.size + 1} ranks: start all with a "
            "larger Members(microbatches=…)"
        )
    return ""
