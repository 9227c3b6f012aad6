"""The configurations of the two sums of an FSDP2 model: the reduce-scatter, and the all-reduce between replicas."""

import dataclasses

import torch.distributed as dist

from fusedcomm.config import Checks, Config
from fusedcomm.fsdp.comm import WireOf
from fusedcomm.native import _C
from fusedcomm.ranks import hosts
from fusedcomm.session.session import Session


@dataclasses.dataclass(frozen=True)
class Sums:
    """rows: of the reduce-scatter, None without one; replicas: of the all-reduce, None without one."""

    rows: Config | None
    replicas: Config | None
    wire_of: WireOf
    """The number of a parameter's wire in `rows`."""


def sums_of(config: Config, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None) -> Sums:
    """The configurations, for the ranks with shards and for those with the same shards.

    Raises:
        ValueError: an option has no effect on these sums, or hosts= does not fit the mesh.
    """
    has_rows, has_replicas = (each is not None and each.size() > 1 for each in (group, replicas))
    feedback = config.feedback
    if feedback is not None and feedback.unsharded and not has_rows:
        raise ValueError("fusedcomm: Feedback(unsharded=True) needs a reduce-scatter, and this model is not sharded")
    if feedback is not None and not has_replicas and not feedback.unsharded:
        raise ValueError(
            "fusedcomm: feedback= of a reduce-scatter keeps residuals of all gradients on each rank, and FSDP2 shards "
            "these to save memory: Feedback(unsharded=True) if there is memory for it, or leave it out"
        )
    of_sums = None if feedback is None else dataclasses.replace(feedback, unsharded=False)
    of_rows = of_sums if feedback is not None and feedback.unsharded else None
    # Sums are verified by verify.py.
    unchecked = dataclasses.replace(config, checks=Checks(digest=config.checks.digest))
    between = dataclasses.replace(unchecked, feedback=of_sums) if has_replicas else None
    if config.hosts in (hosts.AUTO, None) or not has_rows:
        rows = dataclasses.replace(unchecked, sum="two-shot", hosts=None, feedback=of_rows) if has_rows else None
        return Sums(rows, between, config.wire_number)
    if not has_replicas:
        raise ValueError(
            f"fusedcomm: hosts={config.hosts!r} is not possible: a reduce-scatter has one level. A mesh of two "
            "dimensions (HSDP) has two: shards within a host, replicas between hosts"
        )
    _check_given(config, group)
    within = Config(config.local_wire, sum="two-shot", hosts=None, chunks=config.chunks, feedback=of_rows)

    def wire_of(name: str, parameter: object) -> int:
        return _C.EXACT_WIRE if config.wire_number(name, parameter) == _C.EXACT_WIRE else 0

    return Sums(within, dataclasses.replace(between, hosts=None), wire_of)


def _check_given(config: Config, group: dist.ProcessGroup) -> None:
    """Raises ValueError if the hosts that the user gave are not the ranks with the shards of one copy."""
    if config.groups == hosts.AUTO:
        return
    own = tuple(sorted(dist.get_process_group_ranks(group)))
    found = hosts.given(config.groups, dist.get_world_size())
    if own not in found.groups:
        raise ValueError(
            f"fusedcomm: hosts={config.hosts!r} does not fit the mesh: this rank shares its shards with ranks "
            f"{list(own)}, and they must be the ranks of one host"
        )


def check_names(config: Config, rows: Session | None, replicas: Session | None) -> None:
    """Raises ValueError if hosts="auto" was asked for, and shards or replicas are not where it needs them."""
    if config.hosts in (hosts.AUTO, None) or config.groups != hosts.AUTO or rows is None or replicas is None:
        return
    within, between = set(rows.host_names), set(replicas.host_names)
    if len(within) > 1:
        raise ValueError(
            f"fusedcomm: hosts={config.hosts!r} needs the shards of a copy on one host, and they are on "
            f"{sorted(within)}: make the mesh's last dimension the ranks of a host"
        )
    if len(between) < replicas.world_size:
        raise ValueError(
            f"fusedcomm: hosts={config.hosts!r} needs replicas on different hosts, and {replicas.world_size} of them "
            f"are on {sorted(between)}: give the hosts as lists of ranks, or leave hosts out"
        )
