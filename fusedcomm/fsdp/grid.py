"""The hosts of a mesh's ranks, and the bytes that these send to each other."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch.distributed as dist

from fusedcomm.native import _C
from fusedcomm.ranks.hosts import OwnHost
from fusedcomm.session.session import Session


@dataclasses.dataclass(frozen=True)
class Grid:
    """The ranks of a mesh: a row for each copy of the parameters, in it a rank for each shard."""

    ranks: tuple[tuple[int, ...], ...]
    """Their numbers in the job."""
    hosts: tuple[tuple[str, ...], ...]
    """The names of their hosts."""

    @classmethod
    def of(cls, rows: Session | None, replicas: Session | None) -> "Grid":
        """The grid of two sessions, of the reduce-scatter and of the all-reduce; not both are None. A collective
        call."""
        made = rows or replicas
        assert made is not None
        own = [dist.get_process_group_ranks(made.process_group), made.host_names]
        if rows is None:
            found = [[[rank], [host]] for rank, host in zip(*own, strict=True)]
        else:
            found = [own] if replicas is None else replicas.gather("grid", own, "attach()")
        ranks, names = zip(*found, strict=True)
        return cls(tuple(map(tuple, ranks)), tuple(map(tuple, names)))

    @property
    def num_replicas(self) -> int:
        return len(self.ranks)

    @property
    def num_shards(self) -> int:
        return len(self.ranks[0])

    def by_host(self) -> "Grid":
        """The same hosts with the shards of a copy on one of them, as far as its ranks suffice."""
        names = sorted(host for row in self.hosts for host in row)
        rows = (names[first : first + self.num_shards] for first in range(0, len(names), self.num_shards))
        return Grid(self.ranks, tuple(map(tuple, rows)))

    def traffic(
        self,
        scattered: Sequence["_C.BucketPlan"],
        gathered: Sequence["_C.BucketPlan"],
        ring_nbytes: int,
        sums: Sequence["_C.BucketPlan"],
    ) -> "Traffic":
        """Traffic of the host that sends most to other hosts.

        Args:
            scattered: plans of the reduce-scatters.
            gathered: plans of the all-gathers in codes.
            ring_nbytes: that a rank sends in torch's collectives of parameters, which are rings.
            sums: plans of the all-reduces between replicas.
        """
        gradients: Counter[str] = Counter()
        parameters: Counter[str] = Counter()
        for row in self.hosts:
            for host in set(row):
                own = OwnHost.of(row, row.index(host))
                if own.num_links:
                    gradients[host] += own.sent_nbytes(scattered)
                    parameters[host] += own.sent_nbytes(gathered) + own.num_links * ring_nbytes
        for column in zip(*self.hosts, strict=True):
            for host in set(column):
                gradients[host] += OwnHost.of(column, column.index(host)).sent_nbytes(sums)
        most = max(gradients, key=lambda host: gradients[host] + parameters[host])
        return Traffic(gradients[most], parameters[most])


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a host sends to others in a step. `parameters_nbytes`: in all-gathers."""

    gradients_nbytes: int
    parameters_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.gradients_nbytes + self.parameters_nbytes
