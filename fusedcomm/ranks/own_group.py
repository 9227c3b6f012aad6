"""A group of ranks that meet in a store, without a process group of torch's."""

import dataclasses
import datetime
import socket
from collections.abc import Mapping

import torch
import torch.distributed as dist


def served_store(host: str, timeout: datetime.timedelta = datetime.timedelta(seconds=300)) -> dist.TCPStore:
    """A store that this process serves, at a free port of this address of its own alone: a listener of torch's takes
    all interfaces.

    host: an address, or a name. timeout: of requests; by default torch's. Raises OSError if this process cannot listen
    there.
    """
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address, family=family)
    return dist.TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),  # the store's from here on
    )


@dataclasses.dataclass(frozen=True, eq=False)
class OwnGroup:
    """Stands for a ``dist.ProcessGroup`` where fusedcomm asks one for its ranks, its store, its timeout and its
    backends. It needs no ``init_process_group``, and does not see one. Every rank of the group makes one.

    Args:
        store: a store that only this group uses.
        group_rank, group_size: this rank's number in the group, and the group's number of ranks.
        timeout: after which waits for other ranks end.
        backends: of all ranks, by the type of device: "cpu" or "cuda". Over gloo for cpu, by which lost ranks are
            noticed; without it only the timeout ends a wait for them. Over NCCL for cuda, where gradients use it.
        rank_in_job: for people; None: as `group_rank`.
    """

    store: dist.Store
    group_rank: int
    group_size: int
    timeout: datetime.timedelta
    backends: Mapping[str, dist.Backend] = dataclasses.field(default_factory=dict)
    rank_in_job: int | None = None

    def rank(self) -> int:
        return self.group_rank

    def size(self) -> int:
        return self.group_size

    def _get_backend(self, device: torch.device) -> dist.Backend:
        """As ``dist.ProcessGroup`` has it. Raises RuntimeError if the group has no backend for the device."""
        backend = self.backends.get(device.type)
        if backend is None:
            raise RuntimeError(f"fusedcomm: this group of {self.group_size} ranks has no backend for {device.type}")
        return backend

    def backend_name(self, device: torch.device) -> str | None:
        """The backend over which gradients on the device travel. For cpu fusedcomm makes its own, over gloo."""
        if device.type == "cpu":
            return "gloo"
        backend = self.backends.get(device.type)
        return None if backend is None else backend.name()
