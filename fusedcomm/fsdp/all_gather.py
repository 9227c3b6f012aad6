"""Torch's own all-gather of parameters, watched: a rank that others wait for there is named, as in a reduce-scatter."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from fusedcomm.session.session import Session


class WatchedAllGather(AllGather):
    """Calls `inner`, and tells the watch of `session` meanwhile. On cpu only, where the call waits.

    An all-gather with async_op returns at once and is waited for inside of torch, so it is not watched.
    """

    def __init__(self, session: Session, inner: AllGather, what: str) -> None:
        self.inner = inner
        self._session, self._what = session, what

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for an input or output, as torch's own all-gather allocates it."""
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with contextlib.nullcontext() if async_op else waiting(self._session, self._what):
            return self.inner(output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op)


@contextlib.contextmanager
def waiting(session: Session, what: str) -> Iterator[None]:
    """Context of a collective call of torch's within a step, on cpu. `what` names it in reports. An error out of it
    gets the result of a roll call, which names the ranks that are gone."""
    call = session.synchronizer.begin_call(what)
    has_ended = False
    try:
        yield
        has_ended = True
    except RuntimeError as error:
        failure = f"fusedcomm: rank {session.rank} of {session.world_size}: {what} failed: {error}"
        report = session.synchronizer.explain(failure)
        raise RuntimeError(f"{failure}\n{report}" if report else failure) from error
    finally:
        session.synchronizer.end_call(call, has_ended)
