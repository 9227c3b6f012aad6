"""The optimizer whose gradients are reduced: what each gradient's hook and synchronize() do."""

import contextlib
import dataclasses
import itertools
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fusedcomm.horovod.async_ops as async_ops
from fusedcomm.horovod.adasum_optimizer import TOO_MANY_PASSES, ZERO_GRAD_TOO_EARLY, new_parameters
from fusedcomm.horovod.checks import Max
from fusedcomm.horovod.compression import wire_of
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


@dataclasses.dataclass(slots=True)
class Gradient:
    """A parameter's gradient on its way. `whole`: the parameter's `.grad`, or a tensor that becomes its values. `sent`:
    `whole`, or a view of it that is contiguous."""

    whole: torch.Tensor
    sent: torch.Tensor


@dataclasses.dataclass(eq=False)
class Unit:
    """Parameters whose gradients are one operation. `ready`: their gradients, once they are ready in this step. `wait`,
    once submitted: waits for the operation and writes the gradients."""

    name: str
    parameters: list[torch.Tensor]
    is_group: bool
    ready: dict[torch.Tensor, Gradient] = dataclasses.field(default_factory=dict)
    wait: Callable[[], None] | None = None


def _hook_of(optimizer: "ReducedOptimizer", parameter: torch.Tensor) -> Callable[[Any, tuple], None]:
    """A hook of the node that adds to the parameter's gradient. It does not keep the optimizer alive, whose successor
    may have hooks on the same parameters."""
    alive = weakref.ref(optimizer)

    def hook(_: Any, arriving: tuple[torch.Tensor | None, ...]) -> None:
        if (found := alive()) is not None:
            found._on_gradient(parameter, arriving[0])

    return hook


def _empty_sparse(parameter: torch.Tensor, num_sparse_dims: int) -> torch.Tensor:
    indices = torch.empty((num_sparse_dims, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[num_sparse_dims:]), requires_grad=False)
    return torch.sparse_coo_tensor(indices, values, parameter.shape)


def split_list(values: list, num_parts: int) -> list[list]:
    """Parts as equal as possible, the first ones longer."""
    short, num_longer = divmod(len(values), num_parts)
    bounds = [i * short + min(i, num_longer) for i in range(num_parts + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(bounds)]


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
        """Arguments: see DistributedOptimizer(). names: of all parameters that it may ever have."""
        self._parameter_names = names
        self._compression = compression
        # The factor can differ from 1 for averages only.
        self._scales = (1.0 / gradient_predivide_factor, gradient_predivide_factor)
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
        # The nodes that have the hooks: autograd makes new ones when nobody holds these.
        self._nodes: list[torch.autograd.graph.Node] = []
        self.backward_passes_per_step = backward_passes_per_step
        self._add_hooks()

    def _add_hooks(self) -> None:
        """Gives hooks to the units that have none. Call it when no operation is under way."""
        for unit in self._units[self._num_hooked :]:
            for parameter in unit.parameters:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                node.register_hook(_hook_of(self, parameter))
                self._nodes.append(node)
        self._num_hooked = len(self._units)
        self.set_backward_passes_per_step(self.backward_passes_per_step)

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
        return [group for group in split_list(updated, groups) if group]

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on `passes` backward passes are added up: also for gradients of this step that are not yet on their
        way."""
        self.backward_passes_per_step = passes
        for unit in self._units:
            if unit.wait is None:
                unit.ready.clear()
        self._passes_left = {each: 0 if unit.wait else passes for each, unit in self._unit_of.items()}

    def _is_alone(self) -> bool:
        """Whether there is nothing to reduce. An elastic job may get ranks later and behaves the same with one."""
        return world().size == 1 and os.environ.get("HOROVOD_ELASTIC") != "1"

    def _on_gradient(self, parameter: torch.Tensor, arriving: torch.Tensor | None) -> None:
        """`arriving`: what autograd has just added to the gradient, and still holds."""
        # A parameter that was frozen after the forward pass has been given nothing.
        if not parameter.requires_grad or self._is_alone():
            return
        passes_left = self._passes_left[parameter]
        if passes_left <= 0:
            raise AssertionError(TOO_MANY_PASSES.format(self.backward_passes_per_step))
        self._passes_left[parameter] = passes_left - 1
        if passes_left > 1:
            return
        unit = self._unit_of[parameter]
        unit.ready[parameter] = self._gradient(parameter, arriving)
        if len(unit.ready) == len(unit.parameters):
            self._submit(unit, [unit.ready[each] for each in unit.parameters])

    def _submit(self, unit: Unit, gradients: list[Gradient]) -> None:
        if any(gradient.sent.is_sparse for gradient in gradients):
            unit.wait = self._submit_sparse(unit, gradients)
        else:
            unit.wait = self._submit_dense(unit, gradients)
        self._submitted.append(unit)

    def _gradient(self, parameter: torch.Tensor, arriving: torch.Tensor | None = None) -> Gradient:
        """The gradient as it travels; zeros, which become the parameter's gradient, if there is none in this step."""
        if parameter.grad is None:
            kind = self._kinds.get(parameter, UNKNOWN)
            parameter.grad = _empty_sparse(parameter, kind - DENSE) if kind > DENSE else torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            gradient = parameter.grad.to_dense().contiguous() if self.sparse_as_dense else parameter.grad
            return Gradient(gradient, gradient)
        # A copy, if what is still to be computed in this pass may read the gradient's memory.
        return Gradient(*_C.gradient_as_sent(parameter, arriving))

    def _submit_sparse(self, unit: Unit, gradients: list[Gradient]) -> Callable[[], None]:
        waits = []
        for parameter, gradient in zip(unit.parameters, gradients, strict=True):
            sparse = gradient.whole if gradient.whole.is_sparse else gradient.whole.to_sparse(1)
            name = self._parameter_names[parameter]
            waits.append((parameter, sparse_allreduce_async(sparse, name, self.op, self.process_set)))

        def wait() -> None:
            for parameter, each in waits:
                parameter.grad = each()

        return wait

    def _submit_dense(self, unit: Unit, gradients: list[Gradient]) -> Callable[[], None]:
        wire = wire_of(self._compression, gradients[0].sent)
        if wire:
            tensors, contexts = [each.sent for each in gradients], None
        else:
            pairs = [self._compression.compress(each.sent) for each in gradients]
            tensors, contexts = [tensor for tensor, _ in pairs], [context for _, context in pairs]
        names = [self._parameter_names[each] for each in unit.parameters]
        handle = async_ops.reduce_gradients(
            tensors, unit.name, names, self.op, self._scales, self.process_set, wire, unit.is_group
        )

        def wait() -> None:
            outputs = synchronize(handle)
            for i, (parameter, gradient) in enumerate(zip(unit.parameters, gradients, strict=True)):
                output = outputs[i] if contexts is None else self._compression.decompress(outputs[i], contexts[i])
                if output is not gradient.sent:
                    gradient.sent.copy_(output)
                self._receive(parameter, gradient.whole)

        return wait

    def _receive(self, parameter: torch.Tensor, reduced: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = reduced
        elif parameter.grad.is_sparse:
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
        for unit in self._units:
            if unit.wait is None:
                # Something may have changed a gradient since it was ready.
                self._submit(unit, [self._gradient(each) for each in unit.parameters])
        self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Waits for what was submitted and makes the next step ready, also after an error. Raises the first error."""
        failure: Exception | None = None
        for unit in self._submitted:
            try:
                unit.wait()
            except Exception as error:
                failure = failure or error
        self._forget()
        self._add_hooks()
        if failure is not None:
            raise failure

    def _forget(self) -> None:
        for unit in self._units:
            unit.ready.clear()
            unit.wait = None
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
        """Raises AssertionError while gradients are being reduced."""
        if self._submitted:
            raise AssertionError(ZERO_GRAD_TOO_EARLY)
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict) -> None:
        """Begins a step anew: what is being reduced is forgotten."""
        # Not waited for: the job may have failed.
        self._forget()
        self._is_synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]
