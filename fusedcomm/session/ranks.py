"""The ranks of a process group that attach together: their store, who waits for whom, and what they agree on."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from fusedcomm.config import choose_stall_after
from fusedcomm.ranks import agreement, groups, hosts
from fusedcomm.ranks.bounded_store import BoundedStore, StoreError
from fusedcomm.ranks.peers import GivenUpError, Peers, private_store

T = TypeVar("T")

_GIVEN_UP = "given up"
"""Store key at which a rank says why it cannot attach. Ranks that are connecting then stop waiting for it."""


class Ranks:
    """The ranks of one attachment. Every rank of the group makes one at the same time.

    Args:
        group: the user's, or one of fusedcomm's own.
        device: where the gradients are: the waits have the timeout of its backend.
        stall_after: seconds after which a wait is reported; None: as :func:`fusedcomm.config.choose_stall_after`.

    Attributes:
        store: of this attachment alone.
        peers: what waits for other ranks outside of steps.
        host_names: of each rank, once the ranks have agreed.

    Raises RuntimeError if torch.distributed does not know the group.
    """

    def __init__(self, group: groups.Group, device: torch.device, stall_after: float | None) -> None:
        groups.refuse_unknown(group)
        self.group, self.rank, self.size = group, group.rank(), group.size()
        timeout = dist.default_pg_timeout
        with contextlib.suppress(Exception):  # the group has no backend for the device: whoever needs it says so
            timeout = groups.group_timeout(group, device)
        self.store = private_store(group, timeout)
        self.peers = Peers(group, self.store, timeout, choose_stall_after(stall_after, timeout.total_seconds()))
        self.peers.doing("attaching: comparing its configuration with the others'")
        self.host_names: list[str] = []
        self._num_parts = 0

    def part(self) -> BoundedStore:
        """A store for a further engine of the same ranks. Every rank asks for as many, in the same order."""
        self._num_parts += 1
        return self.store.under(f"beside/{self._num_parts}")

    def agree(self, record: dict, problem: Exception | None) -> None:
        """Compares the ranks' records and learns their hosts. Raises as :func:`fusedcomm.ranks.agreement.agree`."""
        hosts.publish_name(self.store, self.rank)
        agreement.agree(self.peers, self.store.under("plan"), record, problem)
        # The ranks have agreed, so each has published its host name: reading the names does not wait.
        self.host_names = hosts.published_names(self.store, self.size)

    def ready(self, store: BoundedStore, found: dict, problem: Exception | None) -> None:
        """Compares what the ranks have made, so that all go on or none. Raises as agree(). store: of the engine."""
        if problem is not None and not isinstance(problem, GivenUpError):
            with contextlib.suppress(RuntimeError):  # the store has failed, too
                why = f"{self.peers.title(self.rank)} cannot attach: {problem}"
                store.set(_GIVEN_UP, why.replace("fusedcomm: ", ""))
        agreement.agree(self.peers, store.under("ready"), found, problem)

    def connect(self, store: BoundedStore, connect: Callable[[], T]) -> T:
        """Returns what `connect` returns, which waits for all ranks. Raises if one is lost or says that it cannot
        attach. store: of the engine."""
        return self.peers.call(
            connect,
            "connecting with the other ranks to attach",
            given_up=lambda: store.get(_GIVEN_UP).decode() if store.check([_GIVEN_UP]) else "",
        )

    def confirm(self, store: BoundedStore, problem: Exception | None, stop: Callable[[str], object]) -> None:
        """Raises what a rank has found since, this rank's `problem` first, once `stop` was called. Once for a store."""
        try:
            agreement.agree(self.peers, store.under("confirmed"), {}, problem)
        except StoreError:
            pass  # training needs no store; this rank has no problem, or that would have been raised
        except Exception:
            stop("a rank could not attach")
            raise
