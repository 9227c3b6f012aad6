"""The optimizer whose gradients are reduced: what each gradient's hook and synchronize() do."""

import contextlib
import dataclasses
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

import fusedcomm.horovod.async_ops as async_ops
from fusedcomm.horovod.checks import REDUCED, Max, check_tensor
from fusedcomm.horovod.compression import Compression, wire_of
from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.handles import Pending, begin, synchronize, wait
from fusedcomm.horovod.objects import broadcast_object
from fusedcomm.horovod.process_sets import ProcessSet, member_of
from fusedcomm.horovod.served import Served, new_parameters
from fusedcomm.horovod.signature import Signature
from fusedcomm.horovod.sparse import sparse_allreduce_async
from fusedcomm.horovod.weighted import OptimizerWeight
from fusedcomm.horovod.world import World, world
from fusedcomm.native import _C
from fusedcomm.session.weights import ADDED_MEANS

UNKNOWN, DENSE = range(2)
"""Kinds of gradients. DENSE + n: sparse ones with n sparse dimensions."""
TOO_MANY_PASSES = (
    "a gradient was computed more than backward_passes_per_step={} times before step(): raise "
    "backward_passes_per_step to add gradients up"
)
ZERO_GRAD_TOO_EARLY = (
    "zero_grad() was called after backward() and before step() or synchronize(): the gradients are being reduced"
)
SECOND_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): the gradients "
    "are reduced twice. Write: with optimizer.skip_synchronize(): optimizer.step()"
)


@dataclasses.dataclass(eq=False, slots=True)
class Gradient:
    """A parameter's gradient. `passes_left`: backward passes of this step that it still misses. `whole`, once it is
    ready: the parameter's `.grad`, or a tensor that becomes its values. `sent`: `whole`, or a view of it that is
    contiguous."""

    parameter: torch.Tensor
    name: str
    passes_left: int = 0
    whole: torch.Tensor | None = None
    sent: torch.Tensor | None = None


@dataclasses.dataclass(eq=False)
class Unit:
    """Gradients that are one operation. `num_missing`: how many are not ready in this step. `is_sparse`: whether
    one of these is sparse. `sum`, once submitted: the operation, or functions that wait for the sparse sum of each
    gradient. `compressed`: what compress() gave for each; empty if they travel as they are. `signatures`: what is the
    same in every step, by wire."""

    name: str
    is_group: bool
    gradients: list[Gradient]
    num_missing: int = 0
    is_sparse: bool = False
    sum: Pending | list[Callable[[], torch.Tensor]] | None = None
    compressed: list[tuple[torch.Tensor, Any]] = dataclasses.field(default_factory=list)
    signatures: dict[str, Signature] = dataclasses.field(default_factory=dict)


def _none(_: Any) -> None:
    """Makes the result of a sum in place."""


def _hook_of(optimizer: "ReducedOptimizer", unit: Unit, index: int) -> Callable[[Any, tuple], None]:
    """A hook of the node that adds to a parameter's gradient, the unit's `index`th. It does not keep the optimizer
    alive, whose successor may have hooks on the same parameters, nor the unit."""
    alive, its = weakref.ref(optimizer), weakref.ref(unit)

    def hook(_: Any, arriving: tuple[torch.Tensor | None, ...]) -> None:
        if (found := alive()) is not None and not found.is_replaced:
            found._on_gradient(its(), index, arriving[0])

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


class ReducedOptimizer(Served):
    """Stands before an optimizer's class among the bases; see optimizer.py."""

    _weight: OptimizerWeight | None

    @property
    def weight(self) -> float | None:
        """What this rank weighs in the backward passes to come, until it is set again. None: not set yet. Setting it
        raises TypeError for what is no number and no tensor, and RuntimeError without
        ``DistributedOptimizer(…, weighted=…)``."""
        return None if self._weight is None else self._weight.value

    @weight.setter
    def weight(self, value: float | torch.Tensor) -> None:
        if self._weight is None and self._is_weighted:
            return  # this rank is not in the process set
        if self._weight is None:
            raise RuntimeError(
                "optimizer.weight would do nothing, because ranks weigh equally: give hvd.DistributedOptimizer(…, "
                "weighted='mean'), or weighted='sum' where losses are sums, on every rank"
            )
        self._weight.set(value)
        self._weight.passes.announce(each for group in self.param_groups for each in group["params"])

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
        weighted: str | None = None,
    ) -> None:
        """Arguments: see DistributedOptimizer(). names: of all parameters that it may ever have."""
        self._parameter_names = names
        self._compression = compression
        self._is_compressed = compression is not Compression.none
        # The factor can differ from 1 for averages only.
        self._scales = (1.0 / gradient_predivide_factor, gradient_predivide_factor)
        self.op, self.process_set, self.sparse_as_dense = op, process_set, sparse_as_dense
        self._is_synchronized, self._should_synchronize = False, True
        self._is_weighted, self._weight = weighted is not None, None
        self._units: list[Unit] = []
        self._gradients: dict[torch.Tensor, Gradient] = {}
        self._submitted: list[Unit] = []
        # The same on every rank; see _agree_on_kinds().
        self._kinds: dict[torch.Tensor, int] = {}
        self._kinds_agreed_in: World | None = None
        self._num_steps_agreed = 0
        if process_set.included():
            self._make_units(groups)
            if weighted is not None:
                name = f"optimizer.{self._units[0].name}" if self._units else "optimizer"
                self._weight = OptimizerWeight(weighted == "sum", name, process_set)
        self._num_hooked = 0  # the first of `_units`
        # The nodes that have the hooks: autograd makes new ones when nobody holds these.
        self._nodes: list[torch.autograd.graph.Node] = []
        self.backward_passes_per_step = backward_passes_per_step
        self._add_hooks()
        self._begin_step()

    def _add_hooks(self) -> None:
        """Gives hooks to the units that have none."""
        for unit in self._units[self._num_hooked :]:
            for index, gradient in enumerate(unit.gradients):
                node = torch.autograd.graph.get_gradient_edge(gradient.parameter).node
                node.register_hook(_hook_of(self, unit, index))
                self._nodes.append(node)
        self._num_hooked = len(self._units)

    def _make_units(self, groups: int | list[list[torch.Tensor]] | None) -> None:
        updated = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        if groups is None:
            for each in updated:
                self._add_unit([each], is_group=False)
        else:
            for parameters in self._grouped(updated, groups):
                self._add_unit(parameters, is_group=True)

    def _add_unit(self, parameters: list[torch.Tensor], is_group: bool) -> None:
        gradients = [Gradient(each, self._parameter_names[each]) for each in parameters]
        self._units.append(Unit(gradients[0].name, is_group, gradients))
        self._gradients.update(zip(parameters, gradients, strict=True))

    def _add_new_units(self) -> None:
        """Adds a unit for each parameter that was thawed, or added to the optimizer, since the last step. Its gradient
        of this step is submitted by synchronize(), later ones by its hook."""
        for each in new_parameters(self.param_groups, self._gradients, self._parameter_names):
            self._add_unit([each], is_group=False)
            if self._weight is not None:
                self._weight.passes.announce([each])

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
        if passes > 1 and self._weight is not None and not self._weight.of_sums:
            raise ValueError(ADDED_MEANS)
        self.backward_passes_per_step = passes
        for unit in self._units:
            if unit.sum is None:
                unit.num_missing, unit.is_sparse = len(unit.gradients), False
            for gradient in unit.gradients:
                gradient.passes_left = passes if unit.sum is None else 0

    def _is_alone(self) -> bool:
        """Whether there is nothing to reduce. An elastic job may get ranks later and behaves the same with one."""
        found = world()
        return found.size == 1 and not found.settings.elastic

    def _on_gradient(self, unit: Unit, index: int, arriving: torch.Tensor | None) -> None:
        """`arriving`: what autograd has just added to the gradient, and still holds."""
        gradient = unit.gradients[index]
        # A parameter that was frozen after the forward pass has been given nothing.
        if not gradient.parameter.requires_grad or self._is_alone():
            return
        if gradient.passes_left <= 0:
            raise AssertionError(TOO_MANY_PASSES.format(self.backward_passes_per_step))
        gradient.passes_left -= 1
        if gradient.passes_left > 0:
            return
        self._make_ready(unit, gradient, arriving)
        unit.num_missing -= 1
        if unit.num_missing == 0:
            self._submit(unit)

    def _make_ready(self, unit: Unit, gradient: Gradient, arriving: torch.Tensor | None = None) -> None:
        """Sets what travels: zeros, which become the parameter's gradient, if there is none in this step."""
        parameter = gradient.parameter
        found = parameter.grad
        if found is None:
            kind = self._kinds.get(parameter, UNKNOWN)
            found = _empty_sparse(parameter, kind - DENSE) if kind > DENSE else torch.zeros_like(parameter)
            parameter.grad = found
        if found.is_sparse:
            gradient.whole = gradient.sent = found.to_dense().contiguous() if self.sparse_as_dense else found
            unit.is_sparse = not self.sparse_as_dense
        else:
            # A copy, if what is still to be computed in this pass may read the gradient's memory.
            gradient.whole, gradient.sent = _C.gradient_as_sent(parameter, arriving)

    def _submit(self, unit: Unit) -> None:
        if self._weight is not None:
            self._weight.send()
            for gradient in unit.gradients:
                self._weight.apply_to(gradient.sent)
        if unit.is_sparse:
            unit.sum = [self._submit_sparse(gradient) for gradient in unit.gradients]
        else:
            unit.sum = self._submit_dense(unit)
        self._submitted.append(unit)

    def _submit_sparse(self, gradient: Gradient) -> Callable[[], torch.Tensor]:
        sparse = gradient.whole if gradient.whole.is_sparse else gradient.whole.to_sparse(1)
        return sparse_allreduce_async(sparse, gradient.name, self.op, self.process_set)

    def _submit_dense(self, unit: Unit) -> Pending:
        found, _ = member_of(self.process_set)
        tensors, wire = [gradient.sent for gradient in unit.gradients], ""
        if self._is_compressed:
            wire = wire_of(self._compression, tensors[0])
            if not wire:
                unit.compressed = [self._compression.compress(tensor) for tensor in tensors]
                tensors = [tensor for tensor, _ in unit.compressed]
        signature = unit.signatures.get(wire)
        if unit.compressed or signature is None:
            for tensor in tensors:
                check_tensor("allreduce", tensor, REDUCED)
        if signature is None:
            signature = unit.signatures[wire] = Signature(
                kind="allreduce",
                name=f"grouped.{unit.name}" if unit.is_group else unit.name,
                op=self.op,
                prescale=self._scales[0],
                postscale=self._scales[1],
                wire=wire,
                tensor_names=tuple(gradient.name for gradient in unit.gradients),
            ).of(tensors)
        return begin(found, signature, tensors, tensors, _none, tensors, self.process_set.process_set_id)

    def _receive(self, unit: Unit) -> None:
        """Waits for the unit's sums and writes the gradients. A group with a sparse one travels as sparse ones."""
        if isinstance(unit.sum, list):
            for gradient, result in zip(unit.gradients, unit.sum, strict=True):
                gradient.parameter.grad = result() if gradient.whole.is_sparse else result().to_dense()
            return
        wait(unit.sum)
        for gradient, (tensor, context) in zip(unit.gradients, unit.compressed, strict=False):
            output = self._compression.decompress(tensor, context)
            if output is not gradient.sent:
                gradient.sent.copy_(output)
        for gradient in unit.gradients:
            parameter, reduced = gradient.parameter, gradient.whole
            found = parameter.grad
            if found is None:
                parameter.grad = reduced
            elif found.is_sparse:
                parameter.grad = reduced.to_sparse(found.sparse_dim())
            elif found is not reduced:
                found.copy_(reduced)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. Gradients that this step has not computed count as zeros."""
        self.refuse_replaced()
        self._is_synchronized = True
        if self._is_alone() and self._weight is not None:
            self._weigh(self._units)
        if self._is_alone() or not self.process_set.included():
            return
        self._add_new_units()
        if not self._units:
            return
        self._agree_on_kinds()
        for unit in self._units:
            if unit.sum is None:
                unit.is_sparse = False
                for gradient in unit.gradients:
                    # Something may have changed a gradient since it was ready.
                    self._make_ready(unit, gradient)
                self._submit(unit)
        self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Waits for what was submitted and makes the next step ready, also after an error. Raises the first error."""
        failure: Exception | None = None
        for unit in self._submitted:
            try:
                self._receive(unit)
            except Exception as error:
                failure = failure or error
        if self._weight is not None:
            try:
                self._weigh(self._submitted)
            except Exception as error:
                failure = failure or error
        self._add_hooks()
        self._begin_step()
        if failure is not None:
            raise failure

    @torch.no_grad()
    def _weigh(self, units: list[Unit]) -> None:
        """Makes weighted means of averages."""
        factor = self._weight.factor(self._is_alone())
        for unit in units:
            for gradient in unit.gradients:
                found = gradient.parameter.grad
                if found is not None:
                    found.mul_(factor) if factor else found.zero_()

    def _begin_step(self) -> None:
        for gradient in self._gradients.values():
            gradient.whole = gradient.sent = None
        for unit in self._units:
            unit.sum, unit.compressed = None, []
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
        elif len(known) == len(self._gradients) and (max(known) <= DENSE or UNKNOWN not in known):
            self._num_steps_agreed += 1
            return
        kinds = [self._kind_of(each) for each in self._gradients]
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
        self._kinds = dict(zip(self._gradients, agreed, strict=True))
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
        # The sums under way are not waited for: the job may have failed.
        self._begin_step()
        self._is_synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]
