"""What FSDP2 calls to gather a module's parameters: in codes, or torch's own all-gather, watched."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from fusedcomm.fsdp.modules import CARRIED, Sharded
from fusedcomm.native import _C
from fusedcomm.session.session import Session

VALUE = " (value)"
"""Follows a parameter's name where its values are meant, and not its gradients."""


class Gathering(dist.Work):
    """An all-gather under way. Its wait() is called before the output is read."""

    def __init__(self, future: torch.futures.Future) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: object = None) -> bool:
        """Waits; on cuda only the current stream does. The engine's errors come when they come, so there is no timeout.

        Raises RuntimeError: the all-gather failed."""
        self._future.wait()
        return True


class FusedAllGather(AllGather):
    """Sends this rank's shard in codes, and decodes those of all ranks, its own included; or leaves that to `inner`.

    Always left to `inner`: gathers over other ranks, which pass on decoded values (reshard_after_forward=n). With one
    warning: dtypes that no wire carries, and extension tensors, which encode themselves. On a CPU, where `inner` waits,
    the session's watch is told meanwhile. With async_op it is waited for inside of torch, and so not watched.

    Args:
        index: of its rows in the session.
        wire_of: the number of a parameter's wire; None: there are no codes.
        may_keep: whether codes that this rank receives of other hosts are kept, on two levels, for the backward pass.

    Attributes:
        is_exact: whether all is left to `inner` now.
    """

    def __init__(
        self,
        session: Session,
        sharded: Sharded,
        index: int,
        wire_of: Callable[[str, torch.Tensor], int] | None,
        inner: AllGather,
        may_keep: bool,
    ) -> None:
        self.inner, self.is_exact = inner, wire_of is None
        self._session, self._sharded, self._has_warned = session, sharded, False
        pieces = [(p.name + VALUE, p.row_numel, wire_of(p.name, p.tensor)) for p in sharded.parameters if wire_of]
        self._native = _C.Rows(synchronizer=session.synchronizer, index=index, pieces=pieces) if pieces else None
        self._most_kept_nbytes = 0
        if self._native is not None:
            self._native.set_row(list(range(len(pieces))))
            self._most_kept_nbytes = self._native.plan_of_again.kept_nbytes if may_keep else 0
        self._has_kept = False  # the latest all-gather

    @property
    def has_codes(self) -> bool:
        """Whether it sends parameters in codes."""
        return self._native is not None

    @property
    def plans(self) -> list["_C.BucketPlan"]:
        """What the calls of a step send."""
        first = self._native.plan(gathers=True)
        again = self._native.plan_of_again if self.kept_nbytes else first
        return [first, again][: self._sharded.num_gathers]

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the codes that are kept for the backward pass. It is 0 on one level, and where the backward pass
        gathers nothing from all ranks."""
        return self._most_kept_nbytes if self._sharded.num_gathers > 1 else 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for an input or output, as torch's own all-gather allocates it."""
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        is_on_cpu = self._sharded.device.type == "cpu"
        if self.is_exact or group is not self._sharded.process_group or not self._carries(input_tensor):
            self._has_kept = False
            what = f"the all-gather of the parameters of {self._sharded.title}"
            with waiting(self._session, what) if is_on_cpu and not async_op else contextlib.nullcontext():
                return self.inner(
                    output_tensor=output_tensor, input_tensor=input_tensor, group=group, async_op=async_op
                )
        keeps = self.kept_nbytes != 0
        again = keeps and self._has_kept and torch._C._current_graph_task_id() >= 0  # in a backward pass
        future = self._native.all_gather(rows=output_tensor, own=input_tensor, is_last=False, keeps=keeps, again=again)
        self._has_kept = keeps
        if async_op or is_on_cpu:  # there torch waits before it reads, too
            return Gathering(future)
        future.wait()
        return None

    def _carries(self, row: torch.Tensor) -> bool:
        """Whether `row` can be sent in codes. Warns once if not."""
        if self._sharded.has_extensions:
            why = "extension tensors among them encode themselves (fsdp_pre_all_gather)"
        elif row.dtype == torch.uint8:
            why = "they have several dtypes. MixedPrecisionPolicy(param_dtype=…) gives them one"
        elif row.dtype not in CARRIED:
            why = f"they are {row.dtype}, which no wire carries"
        else:
            return True
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"fusedcomm: the parameters of {self._sharded.title} are gathered by torch itself, exactly: {why}",
                stacklevel=2,
            )
        return False


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
