"""The optimizer whose gradients are reduced."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

import fusedcomm.horovod.async_ops as async_ops
from fusedcomm.horovod.checks import Average, Sum
from fusedcomm.horovod.compression import config_of_gradients
from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.handles import synchronize
from fusedcomm.horovod.process_sets import ProcessSet, member_of
from fusedcomm.horovod.step_reducer import Options, StepReducer
from fusedcomm.horovod.world import world
from fusedcomm.session.served import Place
from fusedcomm.session.surface import Spelled
from fusedcomm.session.weights import ADDED_MEANS, AddedPasses, give

Groups = int | list[list[torch.Tensor]] | None

TOO_MANY_PASSES = (
    "a gradient was computed more than backward_passes_per_step times before step(): raise backward_passes_per_step to "
    "add gradients up"
)
ZERO_GRAD_TOO_EARLY = (
    "zero_grad() was called after backward() and before step() or synchronize(): the gradients are being reduced"
)
ADDED_TOO_LATE = (
    "add_param_group() was called after backward() and before step() or synchronize(): the gradients of the other "
    "parameters are being reduced"
)
SECOND_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): the gradients "
    "are reduced twice. Write: with optimizer.skip_synchronize(): optimizer.step()"
)


def name_of_place(group: int, index: int) -> str:
    """The name of a parameter that was given none."""
    return f"allreduce.noname.{group}.{index}"


def _refuse(failure: str) -> NoReturn:
    """Raises what a backward pass raises whose gradient the reducer refuses; see Steps in reducer.h."""
    raise HorovodInternalError(failure) if failure else AssertionError(TOO_MANY_PASSES)


class ReducedOptimizer(Spelled):
    """Stands before an optimizer's class among the bases; see optimizer.py."""

    serves_as = "a hvd.DistributedOptimizer"
    place: Place = "alone"
    is_replaced = False
    param_groups: list[dict]
    reducer: StepReducer | None
    _passes: AddedPasses | None
    _given: float | None

    def set_up(
        self,
        names: dict[torch.Tensor, str],
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: Groups,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        weighted: str | None = None,
    ) -> None:
        """Arguments: see DistributedOptimizer(). names: of all parameters that it may ever have."""
        self._parameter_names = names
        self._compression, self._predivide = compression, gradient_predivide_factor
        self.op, self.process_set, self.sparse_as_dense = op, process_set, sparse_as_dense
        self.backward_passes_per_step = backward_passes_per_step
        self._groups, self._weighted = groups, weighted
        self._is_synchronized, self._should_synchronize = False, True
        self.reducer, self._passes, self._given = None, None, None
        self._make_reducer()

    def _make_reducer(self) -> None:
        if not self.process_set.included():
            return
        named = self._named()
        config = None
        if self.op in (Average, Sum):
            dtypes = {each.dtype for _, each in named if each.requires_grad}
            config = config_of_gradients(self._compression, dtypes, self._predivide, self._weighted)
        if config is None and self._weighted is not None:
            raise ValueError(
                f"weighted={self._weighted!r} is not possible with a compressor of your own: use a compression with a "
                "wire, hvd.Compression.fp16 for example"
            )
        if config is None:
            return
        options = Options(config, self.op == Sum, self._groups, self.sparse_as_dense, world().settings.check)
        self.reducer = StepReducer(named, options, self.process_set, self.backward_passes_per_step, _refuse)
        self.reducer.native.is_on, self.reducer.weight = not self._is_alone(), self._given
        if self._weighted == "sum":
            reducer = self.reducer
            self._passes = AddedPasses(lambda: reducer.session.weights)  # type: ignore[union-attr]

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that may have gradients, in their order. Names those that have no name."""
        found = {}
        for i, group in enumerate(self.param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter.is_floating_point() or parameter.is_complex():
                    found[self._parameter_names.setdefault(parameter, name_of_place(i, j))] = parameter
        return list(found.items())

    def _is_alone(self) -> bool:
        """Whether there is nothing to reduce. An elastic job may get ranks later and behaves the same with one. Weights
        need the reducer in any case."""
        found = world()
        return found.size == 1 and not found.settings.elastic and self._weighted is None

    def served(self) -> list[torch.Tensor]:
        """Its parameters; empty once a newer optimizer has one of them."""
        return [] if self.is_replaced else [each for group in self.param_groups for each in group["params"]]

    def replace(self) -> None:
        """A newer optimizer has one of the parameters."""
        self.is_replaced = True
        if self.reducer is not None:
            self.reducer.end()

    # ---- weights

    @property
    def weight(self) -> float | None:
        """What this rank weighs in the backward passes to come, until it is set again. None: not set yet. Setting it
        raises TypeError for what is no number and no tensor, and RuntimeError without
        ``DistributedOptimizer(…, weighted=…)``. The first time it is a collective call."""
        return self._given

    @weight.setter
    def weight(self, value: float | torch.Tensor) -> None:
        if self._weighted is None:
            raise RuntimeError(
                "optimizer.weight would do nothing, because ranks weigh equally: give hvd.DistributedOptimizer(…, "
                "weighted='mean'), or weighted='sum' where losses are sums, on every rank"
            )
        if self.reducer is None:
            return  # this rank is not in the process set
        self.reducer.open()
        assert self.reducer.session is not None
        self._given = self.reducer.weight = give(self.reducer.session.weights, value)
        if self._passes is not None:
            self._passes.announce(each for _, each in self._named())

    # ---- the step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on `passes` backward passes are added up: also for gradients of this step that are not yet on their
        way."""
        if passes > 1 and self._weighted == "mean":
            raise ValueError(ADDED_MEANS)
        self.backward_passes_per_step = passes
        if self.reducer is not None:
            self.reducer.native.set_every(passes)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. Gradients that this step has not computed count as zeros."""
        if self.is_replaced:
            raise RuntimeError(
                "fusedcomm: a newer hvd.DistributedOptimizer reduces gradients of these parameters: step with that one"
            )
        self._is_synchronized = True
        is_alone = self._is_alone()
        if self.reducer is None:
            if self.process_set.included() and not is_alone:
                self._reduce_by_operations()
            return
        self.reducer.native.is_on = not is_alone
        if self._passes is not None:
            self._end_step_of_sums(self.reducer, self._passes)
        elif not is_alone:
            self.reducer.end_step()

    def _end_step_of_sums(self, reducer: StepReducer, passes: AddedPasses) -> None:
        """Ends a step whose passes add up their weights. A rank whose passes were all dropped weighs 0."""
        reducer.open()
        assert reducer.session is not None
        weights = reducer.session.weights
        passes.forget_dropped()
        has_none = not weights.has_noted and self._given is not None and math.isfinite(self._given)
        if has_none:
            weights.set(0.0)
        reducer.end_step()
        weights.forget_passes()
        if has_none:
            weights.set(self._given)

    @torch.no_grad()
    def _reduce_by_operations(self) -> None:
        """For what no wire does: a compressor of the user's, and other reductions than sums."""
        found, _ = member_of(self.process_set)
        named = [(name, each) for name, each in self._named() if each.requires_grad]
        for name, each in named:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
            elif each.grad.is_sparse:
                raise ValueError(
                    f"the gradient of {name} is sparse, which this compression or op does not take: use "
                    "hvd.Compression.none with hvd.Average or hvd.Sum"
                )
        sent = [self._compression.compress((each.grad / self._predivide).contiguous()) for _, each in named]
        handles = [
            async_ops.allreduce_async_(
                tensor, name=name, op=self.op, postscale_factor=self._predivide, process_set=self.process_set
            )
            for (name, _), (tensor, _) in zip(named, sent, strict=True)
        ]
        for (_, each), (_, context), handle in zip(named, sent, handles, strict=True):
            each.grad.copy_(self._compression.decompress(synchronize(handle), context))

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() does not synchronize within: after a call to synchronize(), to clip gradients for example."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronizes and steps. A closure's gradients are reduced whenever the optimizer has called it."""
        if not self._should_synchronize:
            self._is_synchronized = False
            return super().step(closure)  # type: ignore[misc]
        if self._is_synchronized:
            warnings.warn(SECOND_SYNCHRONIZE, stacklevel=2)
        if closure is None:
            self.synchronize()
            self._is_synchronized = False
            return super().step()  # type: ignore[misc]

        def synchronized_closure() -> Any:
            with torch.enable_grad():
                loss = closure()
            self.synchronize()
            return loss

        try:
            return super().step(synchronized_closure)  # type: ignore[misc]
        finally:
            self._is_synchronized = False

    # The inner step runs the optimizer's hooks already.
    step.hooked = True  # type: ignore[attr-defined]

    def _has_begun_step(self) -> bool:
        return self.reducer is not None and self.reducer.native.has_begun_step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Raises AssertionError while gradients are being reduced."""
        if self._has_begun_step():
            raise AssertionError(ZERO_GRAD_TOO_EARLY)
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def add_param_group(self, param_group: dict) -> None:
        """Adds parameters, whose gradients are reduced from now on. Call it on every rank between the same steps: a
        collective call once there was a step. Raises AssertionError while gradients are being reduced, and
        HorovodInternalError if another rank is in a step."""
        if self._has_begun_step():
            raise AssertionError(ADDED_TOO_LATE)
        super().add_param_group(param_group)  # type: ignore[misc]
        if (older := self.reducer) is not None:
            older.agree_on_number(len(self._named()))
            older.end()
            if self._passes is not None:
                self._passes.remove()
            self._make_reducer()

    def load_state_dict(self, state_dict: dict) -> None:
        """Begins a step anew: what is being reduced is forgotten."""
        if self.reducer is not None and self._has_begun_step():
            # The sums under way are not waited for: the job may have failed.
            self.reducer.leave("load_state_dict() was called within a step")
        self._is_synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]
