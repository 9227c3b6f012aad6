"""The reduce-scatter that FSDP2 calls, and what waits for it."""

import contextlib
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from fusedcomm.fsdp.all_gather import waiting
from fusedcomm.fsdp.modules import CARRIED, Sharded, ShardedParameter
from fusedcomm.fsdp.replicas import ReplicaSums, plain, reduced
from fusedcomm.native import _C
from fusedcomm.session.served import Place, serve
from fusedcomm.session.session import Session

WireOf = Callable[[str, torch.Tensor], int]


class Pending:
    """The reduce-scatters under way whose outputs nobody reads before the backward pass ends.

    Each keeps its input, which is a module's whole gradient. There are at most MAX_UNDER_WAY, so that a slow network
    does not fill the memory with gradients that FSDP2 would have freed. Two keep the network busy.
    """

    MAX_UNDER_WAY = 2

    def __init__(self, weights: "_C.PassWeights | None" = None) -> None:
        self._futures: list[torch.futures.Future] = []
        self._weights = weights
        self._refused: torch.futures.Future | None = None

    def add(self, future: torch.futures.Future) -> None:
        """Within a backward pass: it returns when the future is done. Elsewhere this waits for it: a pipeline's
        schedule reduces when all its backward passes have ended."""
        if torch._C._current_graph_task_id() < 0:
            future.wait()
            return
        # Each time: of an earlier pass that failed, futures may be left, and its callback has not run.
        torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._futures.append(future)
        while len(self._futures) > self.MAX_UNDER_WAY:
            self.wait(self._futures.pop(0))

    def wait(self, future: torch.futures.Future) -> None:
        """Waits for one. Raises its error; that of weights when the pass ends, which FSDP2 needs for the next one."""
        try:
            future.wait()  # on cuda only the current stream waits
        except RuntimeError:
            if self._weights is None or not self._weights.is_refused or torch._C._current_graph_task_id() < 0:
                raise
            if self._refused is None:
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)
            self._refused = future

    def finish(self) -> None:
        """Waits. Raises the first error."""
        futures, self._futures = self._futures, []
        if self._refused is not None:
            for future in futures:  # they write to gradients
                with contextlib.suppress(RuntimeError):
                    future.wait()
            futures, self._refused = [self._refused], None
        for future in futures:
            future.wait()


class FusedReduceScatter:
    """torch's interface of a custom reduce-scatter: see torch.distributed.fsdp's ReduceScatter.

    Args:
        session: of the ranks over which gradients are sharded; None if there is one.
        replicas: None if no all-reduce follows.
        index: of the module among all of the model.
        before: the modules on the same mesh that reduce later in a backward pass, which ends with the first module, as
            a rule the model itself.
        wire_of: the number of a parameter's wire in the reduce-scatter.
    """

    serves_as = "fusedcomm.attach"
    place: Place = "in hosts"

    def __init__(
        self,
        session: Session | None,
        replicas: ReplicaSums | None,
        sharded: Sharded,
        index: int,
        before: Sequence[Sharded],
        wire_of: WireOf,
    ) -> None:
        self.sharded = sharded
        self._session, self._index, self._before = session, index, before
        self._replicas = replicas
        self._wire_of = wire_of
        self._native: _C.Rows | None = None
        self._row: list[int] = []  # the parameters that are trained: freezing one changes the rows
        self._factor = 1.0 if session is None else 1.0 / session.world_size  # of the latest reduce-scatter
        self.num_calls = 0  # reduce-scatters so far, or all-reduces where there are none
        self._pending: Pending | None = None
        self._has_warned = False

    def use(self, pending: Pending) -> None:
        """Sets what is shared by the modules of a mesh. Called before the first reduce-scatter."""
        self._pending = pending
        serve(self)

    def served(self) -> list[torch.Tensor]:
        """See :class:`fusedcomm.session.served.Server`."""
        return [each.tensor for each in self.sharded.parameters] if self.sharded.uses(self) else []

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        memory = torch.empty(size, dtype=dtype, device=device)
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
            self._say_exact(input_tensor.dtype, self._session)
            self._pending.finish()
            is_waited_for = self.sharded.device.type == "cpu" and not async_op
            what = f"torch's own reduce-scatter of {self.sharded.title}"
            with waiting(self._session, what) if is_waited_for else contextlib.nullcontext():
                return DefaultReduceScatter()(
                    output_tensor=output_tensor, input_tensor=input_tensor, group=group, op=op, async_op=async_op
                )
        is_read_at_once = self.sharded.is_read_at_once(output_tensor)
        self._factor = factor_of(op, self._session.world_size)
        self.num_calls += 1
        is_last = self._is_last
        future = native.reduce_scatter(rows=input_tensor, own=output_tensor, factor=self._factor, is_last=is_last)
        if is_last:
            self._session.synchronizer.step = self.num_calls
        if is_read_at_once or async_op or self.sharded.device.type != "cpu":
            self._pending.wait(future)
        else:
            self._pending.add(future)
        return None

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp) -> None:
        row = [(each.name, each.row_numel) for each in self.sharded.parameters if each.is_trained]
        if tensor.numel() != sum(numel for _, numel in row) or tensor.dtype not in CARRIED:
            self._say_exact(tensor.dtype, self._replicas.session)
            dist.all_reduce(tensor, op=op, group=self.sharded.replicas)
            return
        factor = factor_of(op, self._replicas.session.world_size)
        if self._session is None:
            self.num_calls += 1
        else:
            self._replicas.weigh_as(self._session.weights)
        if self._is_last:
            self._replicas.session.synchronizer.begin_pass()  # parameters change after it, so any moment of it will do
        future = self._replicas.all_reduce(tensor, row, factor, self._is_last)
        if future is not None:
            self._pending.wait(future)

    @property
    def _is_last(self) -> bool:
        return not any(each.is_trained for each in self._before)

    def native(self) -> "_C.Rows":
        """The reduce-scatter of the parameters that are trained now."""
        row = [i for i, each in enumerate(self.sharded.parameters) if each.is_trained]
        if self._native is None:
            pieces = [(p.name, p.row_numel, self._wire_of(p.name, p.tensor)) for p in self.sharded.parameters]
            self._native = _C.Rows(synchronizer=self._session.synchronizer, index=self._index, pieces=pieces)
        elif row == self._row:
            return self._native
        else:
            self._pending.finish()
        self._native.set_row(row)
        self._row = row
        return self._native

    # ---- residuals of error feedback

    def with_residuals(self) -> list[ShardedParameter]:
        """The parameters, frozen ones included, whose residuals are kept: those of the all-reduce."""
        if self._replicas is None or not self._replicas.session.keeps_residuals:
            return []
        return [p for p in self.sharded.parameters if self._replicas.wire_of(p.name, p.tensor) != _C.EXACT_WIRE]

    def residuals(self) -> dict[str, torch.Tensor]:
        """This rank's residuals, in the unit of gradients before the reduce-scatter: fp32 [row_numel]. A parameter
        without one is missing, because nothing has been left out of it."""
        own = {p.name for p in self.with_residuals()}
        if not own:
            return {}
        found = self._replicas.session.synchronizer.residuals(own)
        return {name: values / self._unit_of_sums for name, values in found.items()}

    def restore(self, residuals: dict[str, torch.Tensor]) -> None:
        """Replaces the residuals of this module: see residuals()."""
        scaled = {name: row * self._unit_of_sums for name, row in residuals.items()}
        self._replicas.session.synchronizer.restore_residuals(scaled, {p.name for p in self.sharded.parameters})

    @property
    def _unit_of_sums(self) -> float:
        """The factor by which the reduce-scatter multiplies a gradient that is the same on every rank."""
        return self._factor * (1 if self._session is None else self._session.world_size)

    def _say_exact(self, dtype: torch.dtype, session: Session) -> None:
        """Warns that torch reduces itself. Raises RuntimeError with weights, which torch does not know."""
        if self._has_warned:
            return
        why = (
            f"its gradients are {dtype}, which no wire carries"
            if dtype not in CARRIED
            else "a backward pass left out some of its parameters. model.set_reduce_scatter_unused_params(True) sends "
            "zeros for them instead"
        )
        if session.weights is not None:
            raise RuntimeError(
                f"fusedcomm: gradients of {self.sharded.title} cannot be weighted (weighted="
                f"{session.config.weighted!r}), because torch itself would reduce them: {why}"
            )
        self._has_warned = True
        warnings.warn(
            f"fusedcomm: the gradients of {self.sharded.name or 'the model'} are reduced by torch itself in some "
            "steps: " + why,
            stacklevel=2,
        )


def factor_of(op: dist.ReduceOp, world_size: int) -> float:
    """The factor of the sum over ranks. Raises NotImplementedError for an op that is no sum."""
    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.SUM:
        return 1.0
    if kind == dist.ReduceOp.AVG:
        return 1.0 / world_size
    if kind == dist.ReduceOp.PREMUL_SUM:
        return float(op.__getstate__()[1])
    raise NotImplementedError(f"fusedcomm: a reduce-scatter with {op} is no sum: use torch's own")
