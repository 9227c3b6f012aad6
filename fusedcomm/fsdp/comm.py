"""The reduce-scatter that FSDP2 calls, and what waits for it."""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from fusedcomm.fsdp.modules import Sharded
from fusedcomm.fsdp.replicas import ReplicaSums, plain, reduced
from fusedcomm.native import _C
from fusedcomm.session.session import Session

CARRIED = (torch.float32, torch.bfloat16, torch.float16)
"""What the wires carry."""

WireOf = Callable[[str, torch.Tensor], int]


class Pending:
    """The reduce-scatters under way whose outputs nobody reads before the backward pass ends.

    Each keeps its input, which is a module's whole gradient. There are at most MAX_UNDER_WAY, so that a slow network
    does not fill the memory with gradients that FSDP2 would have freed. Two keep the network busy.
    """

    MAX_UNDER_WAY = 2

    def __init__(self) -> None:
        self._futures: list[torch.futures.Future] = []

    def add(self, future: torch.futures.Future) -> None:
        """Call it within a backward pass, which then returns when the future is done."""
        # Each time: of an earlier pass that failed, futures may be left, and its callback has not run.
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._futures.append(future)
        while len(self._futures) > self.MAX_UNDER_WAY:
            self._futures.pop(0).wait()

    def finish(self) -> None:
        """Waits. Raises the first error."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.wait()


class FusedReduceScatter:
    """torch's interface of a custom reduce-scatter: see torch.distributed.fsdp's ReduceScatter."""

    """session: of the ranks over which gradients are sharded; None if there is one. replicas: None if no all-reduce
    follows."""

    def __init__(
        self,
        session: Session | None,
        replicas: ReplicaSums | None,
        sharded: Sharded,
        index: int,
        is_last: bool,
        wire_of: WireOf,
    ) -> None:
        self.sharded = sharded
        self._session, self._index, self._is_last = session, index, is_last
        self._replicas = replicas
        self._wire_of = wire_of
        # By the names of the trained parameters: freezing one changes the rows.
        self._natives: dict[tuple[str, ...], _C.ReduceScatter] = {}
        self._pending: Pending | None = None
        self._has_warned = False

    def use(self, pending: Pending) -> None:
        self._pending = pending

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for an input or output, with zeros behind it that fill up the input's last blocks."""
        numel = torch.Size(size).numel()
        padding = 0 if self._session is None else self.native().padding_numel
        memory = torch.empty(numel + padding, dtype=dtype, device=device)
        memory[numel:].zero_()
        memory = memory[:numel].view(size)
        return memory if self._replicas is None else reduced(memory, self._all_reduce)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> dist.Work | None:
        output_tensor, input_tensor = plain(output_tensor), plain(input_tensor)
        native = self.native()
        is_known = input_tensor.numel() == native.row_numel * self._session.world_size
        if not is_known or input_tensor.dtype not in CARRIED:
            self._say_exact(input_tensor.dtype)
            self._pending.finish()
            return DefaultReduceScatter()(
                output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
            )
        is_read_at_once = self.sharded.is_read_at_once(output_tensor)
        future = native.run(output_tensor, input_tensor, factor_of(op, self._session.world_size))
        if is_read_at_once or async_op:
            future.wait()
        else:
            self._pending.add(future)
        return None

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp) -> None:
        row = [(each.name, each.row_numel) for each in self.sharded.parameters if each.is_trained]
        if tensor.numel() != sum(numel for _, numel in row) or tensor.dtype not in CARRIED:
            self._say_exact(tensor.dtype)
            dist.all_reduce(tensor, op=op, group=self.sharded.replicas)
            return
        self._replicas.all_reduce(tensor, row, factor_of(op, self._replicas.session.world_size))

    def native(self) -> "_C.ReduceScatter":
        """The reduce-scatter of the parameters that are trained now."""
        trained = [each for each in self.sharded.parameters if each.is_trained]
        key = tuple(each.name for each in trained)
        if key not in self._natives:
            row = [(each.name, each.row_numel, self._wire_of(each.name, each.tensor)) for each in trained]
            self._natives[key] = _C.ReduceScatter(
                hook=self._session.hook, index=self._index, is_last=self._is_last, row=row
            )
        return self._natives[key]

    def _say_exact(self, dtype: torch.dtype) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        why = (
            f"its gradients are {dtype}, which no wire carries"
            if dtype not in CARRIED
            else "a backward pass left out some of its parameters. model.set_reduce_scatter_unused_params(True) sends "
            "zeros for them instead"
        )
        warnings.warn(
            f"fusedcomm: the gradients of {self.sharded.name or 'the model'} are reduced by torch itself in some "
            "steps: " + why,
            stacklevel=2,
        )


def factor_of(op: dist.ReduceOp, world_size: int) -> float:
    """What multiplies the sum over ranks. Raises NotImplementedError for an op that is no sum."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if kind == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])
    raise NotImplementedError(f"fusedcomm: a reduce-scatter with {op} is no sum: use torch's own")
