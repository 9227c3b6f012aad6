"""The optimizer whose gradients are reduced: what each gradient's hook and synchronize() do."""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fusedcomm.horovod.async_ops as async_ops
from fusedcomm.horovod.adasum_optimizer import TOO_MANY_PASSES, ZERO_GRAD_TOO_EARLY, new_parameters
from fusedcomm.horovod.checks import Average, Max
from fusedcomm.horovod.compression import Compression, wire_of
from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.handles import synchronize
from fusedcomm.horovod.objects import broadcast_object
from fusedcomm.horovod.process_sets import ProcessSet
from fusedcomm.horovod.sparse import sparse_allreduce_async
from fusedcomm.horovod.world import World, world
from fusedcomm.native import _C

UNKNOWN, DENSE = range(2)
"""Kinds of gradients. DENSE + n: sparse ones with n sparse dimensions."""
SECOND_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): the gradients "
    "are reduced twice. Write: with optimizer.skip_synchronize(): optimizer.step()"
)


@dataclasses.dataclass(eq=False)
class Unit:
    """Parameters whose gradients are one operation. `num_ready`: those whose gradient is ready in this step. `wait`,
    once submitted: waits for the operation and writes the gradients."""

    name: str
    parameters: list[torch.Tensor]
    is_group: bool
    num_ready: int = 0
    wait: Callable[[], None] | None = None


def _empty_sparse(parameter: torch.Tensor, num_sparse_dims: int) -> torch.Tensor:
    indices = torch.empty((num_sparse_dims, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[num_sparse_dims:]), requires_grad=False)
    return torch.sparse_coo_tensor(indices, values, parameter.shape)


class ReducedOptimizer:
    """Stands before an optimizer's class among the bases; see optimizer.py."""

    param_groups: list[dict]

    def set_up(
        self,
        names: dict[torch.Tensor, str],
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: int | list[list[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._parameter_names = names
        self._compression = compression
        self._how = dict(op=op, process_set=process_set)
        if op == Average:
            self._how.update(
                prescale_factor=1.0 / gradient_predivide_factor, postscale_factor=gradient_predivide_factor
            )
        self.op, self.process_set, self.sparse_as_dense = op, process_set, sparse_as_dense
        self._is_synchronized, self._should_synchronize = False, True
        self._units: list[Unit] = []
        self._unit_of: dict[torch.Tensor, Unit] = {}
        self._submitted: list[Unit] = []
        # The same on every rank; see _agree_on_kinds().
        self._kinds: dict[torch.Tensor, int] = {}
        self._kinds_agreed_in: World | None = None
        self._num_steps_agreed = 0
        if process_set.included():
            self._make_units(groups)
        self._num_hooked = 0  # the first of `_units`
        self._native: _C.GradientSubmitter | None = None
        self._hooks: list[Any] = []
        self.backward_passes_per_step = backward_passes_per_step
        self._add_hooks()

    def _add_hooks(self) -> None:
        """Gives hooks to the units that have none. Call it when no operation is under way."""
        without = self._units[self._num_hooked :]
        self._num_hooked = len(self._units)
        if without and self._is_native():
            if self._native is not None:
                self._native.detach()
            self._native = self._native_hooks()
        else:
            parameters = [each for unit in without for each in unit.parameters]
            self._hooks += [each.register_post_accumulate_grad_hook(self._on_gradient) for each in parameters]
        self.set_backward_passes_per_step(self.backward_passes_per_step)

    def _is_native(self) -> bool:
        """Whether native hooks submit the gradients. That does not change once a parameter has a hook."""
        if self._hooks or self._native is not None:
            return self._native is not None
        # The debug mode looks at what the calls of handles.py submit.
        is_possible = not self._is_alone() and not world().settings.check
        return is_possible and (self._compression is Compression.none or bool(self._wire()))

    def _wire(self) -> str:
        """The wire in which all gradients are summed; empty: none."""
        return wire_of(self._compression, next(iter(self._unit_of)))

    def _native_hooks(self) -> "_C.GradientSubmitter":
        """Hooks that submit dense gradients without the GIL. A compressor written in Python needs others."""
        index_of = {each: i for i, each in enumerate(self._unit_of)}
        return _C.GradientSubmitter(
            parameters=[(each, self._parameter_names[each]) for each in self._unit_of],
            units=[([index_of[each] for each in unit.parameters], unit.is_group) for unit in self._units],
            op=self.op,
            prescale=self._how.get("prescale_factor", 1.0),
            postscale=self._how.get("postscale_factor", 1.0),
            set_id=self.process_set.process_set_id,
            wire=self._wire(),
        )

    def _make_units(self, groups: int | list[list[torch.Tensor]] | None) -> None:
        updated = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        if groups is None:
            self._units = [Unit(self._parameter_names[each], [each], is_group=False) for each in updated]
        else:
            for parameters in self._grouped(updated, groups):
                self._units.append(Unit(self._parameter_names[parameters[0]], parameters, is_group=True))
        self._unit_of = {each: unit for unit in self._units for each in unit.parameters}

    def _add_new_units(self) -> None:
        """Adds a unit for each parameter that was thawed, or added to the optimizer, since the last step. Its gradient
        of this step is submitted by synchronize(), later ones by its hook."""
        for each in new_parameters(self.param_groups, self._unit_of, self._parameter_names):
            self._unit_of[each] = Unit(self._parameter_names[each], [each], is_group=False)
            self._units.append(self._unit_of[each])

    def _grouped(self, updated: list[torch.Tensor], groups: int | list) -> list[list[torch.Tensor]]:
        """The groups, in the order of the set's first rank, which all ranks have to share."""
        if isinstance(groups, list):
            wanted = set(updated)
            lists = [[each for each in group if each in wanted] for group in groups]
            alone = wanted.difference(each for group in lists for each in group)
            return [group for group in lists if group] + [[each] for each in updated if each in alone]
        root = self.process_set.ranks[0]
        names = [self._parameter_names[each] for each in updated]
        names = broadcast_object(names, root, name="optimizer.groups", process_set=self.process_set)
        order = {name: i for i, name in enumerate(names)}
        updated = sorted(updated, key=lambda each: order.get(self._parameter_names[each], len(order)))
        # As equal as possible, the first ones longer.
        short, num_longer = divmod(len(updated), groups)
        bounds = [i * short + min(i, num_longer) for i in range(groups + 1)]
        return [updated[begin:end] for begin, end in zip(bounds, bounds[1:], strict=False) if begin < end]

    def set_backward_passes_per_step(self, passes: int) -> None:
        self.backward_passes_per_step = passes
        if self._native is not None:
            self._native.set_passes(passes)
        self._passes_left = dict.fromkeys(self._unit_of, passes)

    def _is_alone(self) -> bool:
        """Whether there is nothing to reduce. An elastic job may get ranks later and behaves the same with one."""
        return world().size == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._is_alone():
            return
        if self._passes_left[parameter] <= 0:
            raise AssertionError(TOO_MANY_PASSES.format(self.backward_passes_per_step))
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            unit = self._unit_of[parameter]
            unit.num_ready += 1
            if unit.num_ready == len(unit.parameters):
                self._submit(unit)

    def _submit(self, unit: Unit) -> None:
        gradients = [self._gradient(each) for each in unit.parameters]
        if any(gradient.is_sparse for gradient in gradients):
            unit.wait = self._submit_sparse(unit, gradients)
        else:
            unit.wait = self._submit_dense(unit, gradients)
        self._submitted.append(unit)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """The gradient as it travels; zeros, which become the parameter's gradient, if there is none in this step."""
        if parameter.grad is None:
            kind = self._kinds.get(parameter, UNKNOWN)
            parameter.grad = _empty_sparse(parameter, kind - DENSE) if kind > DENSE else torch.zeros_like(parameter)
        if parameter.grad.is_sparse and self.sparse_as_dense:
            return parameter.grad.to_dense()
        return parameter.grad

    def _submit_sparse(self, unit: Unit, gradients: list[torch.Tensor]) -> Callable[[], None]:
        waits = []
        for parameter, gradient in zip(unit.parameters, gradients, strict=True):
            gradient = gradient if gradient.is_sparse else gradient.to_sparse(1)
            name = self._parameter_names[parameter]
            waits.append((parameter, sparse_allreduce_async(gradient, name, self.op, self.process_set)))

        def wait() -> None:
            for parameter, each in waits:
                parameter.grad = each()

        return wait

    def _submit_dense(self, unit: Unit, gradients: list[torch.Tensor]) -> Callable[[], None]:
        how = dict(self._how)
        if wire := wire_of(self._compression, gradients[0]):
            how["wire"] = wire
            sent = [(gradient.contiguous(), None) for gradient in gradients]
        else:
            sent = [self._compression.compress(gradient.contiguous()) for gradient in gradients]
        tensors = [tensor for tensor, _ in sent]
        if unit.is_group:
            handle = async_ops.grouped_allreduce_async_(tensors, name=unit.name, **how)
        else:
            handle = async_ops.allreduce_async_(tensors[0], name=unit.name, **how)

        def wait() -> None:
            outputs = synchronize(handle)
            outputs = outputs if unit.is_group else [outputs]
            for parameter, output, (_, context) in zip(unit.parameters, outputs, sent, strict=True):
                self._receive(parameter, output if wire else self._compression.decompress(output, context))

        return wait

    def _receive(self, parameter: torch.Tensor, reduced: torch.Tensor) -> None:
        if parameter.grad.is_sparse:
            parameter.grad = reduced.to_sparse(parameter.grad.sparse_dim())
        elif parameter.grad is not reduced:
            parameter.grad.copy_(reduced)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. Gradients that this step has not computed count as zeros."""
        self._is_synchronized = True
        if self._is_alone() or not self.process_set.included():
            return
        self._add_new_units()
        if not self._units:
            return
        self._agree_on_kinds()
        hooked, unhooked = self._units[: self._num_hooked], self._units[self._num_hooked :]
        for unit in [*(hooked if self._native is None else self._left_by_native()), *unhooked]:
            if unit.wait is None:
                self._submit(unit)
        self._finish()

    def _left_by_native(self) -> list[Unit]:
        """Submits what the hooks have not, zeros for gradients that this step has not computed. Returns the units with
        sparse gradients, which are none of its."""
        for parameter, kind in self._kinds.items():
            if kind > DENSE and parameter.grad is None:
                self._gradient(parameter)
        self._native.submit_missing()
        parameters = list(self._unit_of)
        left = [self._unit_of[parameters[i]] for i in self._native.missing()]
        return list(dict.fromkeys(left))

    @torch.no_grad()
    def _finish(self) -> None:
        """Waits for what was submitted and makes the next step ready, also after an error. Raises the first error."""
        failure = self._finish_native()
        for unit in self._submitted:
            try:
                unit.wait()
            except Exception as error:
                failure = failure or error
        self._forget()
        self._add_hooks()
        if failure is not None:
            raise failure

    def _finish_native(self) -> Exception | None:
        """Waits for what the hooks have submitted. Returns the first error."""
        if self._native is None:
            return None
        coordinator, error = world().coordinator, ""
        for handle, _ in self._native.take_handles():
            error = error or (coordinator.failure if handle < 0 else coordinator.wait(handle).error)
        if error:
            return HorovodInternalError(error)
        self._native.write_back()
        return None

    def _forget(self) -> None:
        if self._native is not None:
            self._native.reset()
        for unit in self._units:
            unit.num_ready, unit.wait = 0, None
        self._submitted.clear()
        self.set_backward_passes_per_step(self.backward_passes_per_step)

    def _agree_on_kinds(self) -> None:
        """Tells every rank which parameters have sparse gradients, which a rank that has computed none cannot know.
        Once after each init and whenever there are new parameters; in a model with sparse gradients, until every
        parameter has had a gradient somewhere. Raises HorovodInternalError if the ranks do so in different steps."""
        found = world()
        known = self._kinds.values()
        if self._kinds_agreed_in is not found:
            self._num_steps_agreed = 0
        elif len(known) == len(self._unit_of) and (max(known) <= DENSE or UNKNOWN not in known):
            self._num_steps_agreed += 1
            return
        kinds = [self._kind_of(each) for each in self._unit_of]
        told = torch.tensor([*kinds, self._num_steps_agreed, -self._num_steps_agreed], dtype=torch.int32)
        name = f"optimizer.kinds.{self._units[0].name}"
        handle = async_ops.allreduce_async_(told, name=name, op=Max, process_set=self.process_set)
        *agreed, most, minus_least = synchronize(handle).tolist()
        if most != -minus_least:
            raise HorovodInternalError(
                f"fusedcomm: the parameters that {type(self).__name__} reduces have changed after {-minus_least} steps "
                f"on one rank and after {most} on another: thaw parameters, and call add_param_group(), on every rank "
                "in the same step"
            )
        self._kinds = dict(zip(self._unit_of, agreed, strict=True))
        self._kinds_agreed_in, self._num_steps_agreed = found, 0

    def _kind_of(self, parameter: torch.Tensor) -> int:
        known = self._kinds.get(parameter, UNKNOWN)
        if known != UNKNOWN or parameter.grad is None:
            return known
        return DENSE + parameter.grad.sparse_dim() if parameter.grad.is_sparse else DENSE

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

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._submitted or (self._native is not None and self._native.outstanding()):
            raise AssertionError(ZERO_GRAD_TOO_EARLY)
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict) -> None:
        # Not waited for: the job may have failed.
        self._forget()
        self._is_synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]
