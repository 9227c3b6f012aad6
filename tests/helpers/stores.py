"""Process groups over different kinds of stores."""

import contextlib

import torch
import torch.distributed as dist


@contextlib.contextmanager
def group_over(store_kind, rank, world_size, victim, timeout):
    """A new process group. If `store_kind` is "file" it uses the store of the default group. Otherwise it replaces the
    default group by one on a TCPStore that rank 0 hosts.

    Rank 0 waits until all other ranks except `victim` have left. If it did not, a rank slower than rank 0 would report
    that the store is gone.
    """
    if store_kind == "file":
        yield dist.new_group(list(range(world_size)), timeout=timeout)
        return
    # The system chooses the port: another program might take one chosen here before rank 0 listens on it.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 0 else None
    port = torch.tensor([server.port if server else 0])
    dist.broadcast(port, src=0)
    dist.destroy_process_group()
    store = server or dist.TCPStore("127.0.0.1", int(port), is_master=False)
    store.set_timeout(timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield dist.group.WORLD
    finally:
        if rank != 0 and victim != 0:
            store.set(f"has left/{rank}", "")
        elif rank == 0:
            store.wait([f"has left/{other}" for other in range(1, world_size) if other != victim])
