"""The configurations of the two sums of an FSDP2 model: the reduce-scatter, and the all-reduce between replicas."""

import dataclasses
from collections.abc import Sequence

import torch.distributed as dist

from fusedcomm.config import Config, combinations
from fusedcomm.fsdp.comm import WireOf
from fusedcomm.fsdp.grid import Grid
from fusedcomm.native import _C
from fusedcomm.ranks import hosts


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
        ValueError: an option has no effect on these sums.
    """
    has_rows, has_replicas = (each is not None and each.size() > 1 for each in (group, replicas))
    combinations.refuse("FSDP2", {"feedback": config.feedback, "shards without replicas": not has_replicas})
    between = dataclasses.replace(config, params="fp32", params_kept=False) if has_replicas else None
    if config.hosts in (hosts.AUTO, None) or not (has_rows and has_replicas):
        rows = dataclasses.replace(config, sum="two-shot", feedback=None) if has_rows else None
        return Sums(rows, between, config.wire_number)
    within = Config(config.local_wire, sum="two-shot", hosts=None, chunks=config.chunks, params=config.params)

    def wire_of(name: str, parameter: object) -> int:
        return _C.EXACT_WIRE if config.wire_number(name, parameter) == _C.EXACT_WIRE else 0

    return Sums(within, dataclasses.replace(between, hosts=None), wire_of)


def check_hosts(config: Config, grid: Grid) -> None:
    """Raises ValueError, on all ranks of the mesh, if hosts= needs two levels, and shards or replicas are elsewhere."""
    if config.hosts in (hosts.AUTO, None) or grid.num_shards == 1 or grid.num_replicas == 1:
        return
    of_ranks: Sequence[Sequence[object]] = grid.hosts
    if config.groups != hosts.AUTO:
        found = hosts.given(config.groups, dist.get_world_size())
        of_ranks = [[found.place(rank)[1] for rank in row] for row in grid.ranks]
    for ranks, row in zip(grid.ranks, of_ranks, strict=True):
        if len(set(row)) > 1:
            raise ValueError(
                f"fusedcomm: hosts={config.hosts!r} does not fit the mesh: the shards of ranks {list(ranks)} are on "
                f"{sorted(set(row))}: make the mesh's last dimension the ranks of a host"
            )
    between = {row[0] for row in of_ranks}
    if len(between) < grid.num_replicas:
        raise ValueError(
            f"fusedcomm: hosts={config.hosts!r} does not fit the mesh: {grid.num_replicas} replicas are on "
            f"{sorted(between)}: give the hosts as lists of ranks, or leave hosts out"
        )
