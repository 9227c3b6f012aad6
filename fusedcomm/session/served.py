"""Which front ends serve a parameter: they sum its gradients over the ranks, or merge it. A second one is refused."""

import gc
import weakref
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, TypeAlias

import torch

from fusedcomm.native import _C

Place: TypeAlias = Literal["alone", "in hosts", "across hosts"]
"""Where a front end may work: one within hosts and one across hosts may share parameters."""


class Server(Protocol):
    """A front end's object. The table does not keep it alive."""

    serves_as: str
    """What errors call it."""
    place: Place

    def served(self) -> Iterable[torch.Tensor]:
        """Its parameters as they are now; empty once it is detached."""


_servers: "weakref.WeakSet[Server]" = weakref.WeakSet()


def serve(server: Server) -> None:
    """Enters a front end. It is out when it is detached, or gone."""
    _servers.add(server)


def servers_of(parameters: Iterable[torch.Tensor]) -> list[Server]:
    """The front ends that serve one of these parameters: of those that require gradients now, if any does."""
    given = list(parameters)
    ids = {id(each) for each in [each for each in given if each.requires_grad] or given}
    return [server for server in list(_servers) if not ids.isdisjoint(map(id, server.served()))]


def refuse_served(
    named: Sequence[tuple[str, torch.Tensor]],
    serves_as: str,
    place: Place = "alone",
    *,
    hooks: bool = False,
    replaces: type | None = None,
) -> None:
    """Raises ValueError if another front end serves one of the parameters; names both.

    Args:
        serves_as: what errors call the new front end.
        hooks: whether a plain DistributedDataParallel, and whatever has hooks on frozen parameters, is refused, too.
        replaces: front ends of this class are not refused.
    """

    def found() -> list[Server]:
        those = servers_of(tensor for _, tensor in named)
        refused = [each for each in those if {each.place, place} != {"in hosts", "across hosts"}]
        return [each for each in refused if replaces is None or not isinstance(each, replaces)]

    servers = found()
    if servers:
        gc.collect()  # one that nothing refers to any more may be in a cycle
        servers = found()
    for server in servers:
        ids = set(map(id, server.served()))
        raise _refusal(server.serves_as, next(name for name, tensor in named if id(tensor) in ids), serves_as)
    for name, tensor in named if hooks else ():
        if other := _C.synchronized_by(tensor):
            raise _refusal(other, name, serves_as)


def _refusal(other: str, name: str, serves_as: str) -> ValueError:
    return ValueError(
        f"fusedcomm: {other} already synchronizes the parameter {name!r}, and {serves_as} would do it a second time: "
        "call detach() of the first one on every rank, or give each parameter to one of them. (A plain "
        "DistributedDataParallel and a hvd.DistributedOptimizer end when nothing refers to them. Around sums within "
        "hosts LocalSteps takes the DistributedDataParallel or FSDP2 model itself)"
    )
