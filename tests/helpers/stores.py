"""Process groups over one kind of store or another."""

import contextlib

import torch
import torch.distributed as dist


@contextlib.contextmanager
def group_over(store_kind, rank, world_size, victim, timeout):
    """A process group of its own on the store at hand, or with a TCPStore that rank 0 hosts until the others have left,
    but for the victim: else one that is slower than rank 0 would have to say that the store is gone."""
    if store_kind == "file":
        yield dist.new_group(list(range(world_size)), timeout=timeout)
        return
    # The port is the system's choice: one chosen here might be another's by the time rank 0 listens to it.
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
