"""Objects of every rank of a session."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.ranks.objects import fill, nbytes_of, pack, ranges, unpack
from fusedcomm.session.session import Session


def everybodys(value: Any, session: Session, call: str) -> Iterator[Any]:
    """Every rank's `value`, in rank order; what it may have, ranks/objects.py says. A collective call, if all of it is
    read. Nothing that a rank sends can run code here. `call`: the user's call that needs them, for reports.

    Raises TypeError, with the same text on every rank, if a rank's `value` has something else."""
    packed, problem = b"", ""
    tensors: list[torch.Tensor] = []
    try:
        packed, tensors = pack(value, f"rank {session.rank}'s part of {call}")
    except TypeError as error:
        problem = str(error)
    with session.calling(call):
        told = session.gather("values", {"packed": packed.decode(), "problem": problem}, call)
        for theirs in told:
            if theirs["problem"]:
                raise TypeError(theirs["problem"])
        for rank, of_rank in enumerate(told):
            theirs, empty = unpack(of_rank["packed"].encode())
            content = torch.empty(nbytes_of(empty), dtype=torch.uint8, device=session.device)
            if len(content):
                if rank == session.rank:
                    own = bytearray().join(ranges(tensors, 0, len(content)))
                    content.copy_(torch.frombuffer(own, dtype=torch.uint8))
                dist.broadcast(content, group=session.process_group, group_src=rank)
                fill(empty, content.cpu())
            yield theirs
