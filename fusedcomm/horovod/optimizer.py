"""DistributedOptimizer: reduces gradients over the ranks while the backward pass runs, and steps with the result."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch

from fusedcomm.horovod.checks import Average, Sum
from fusedcomm.horovod.compression import Compression, OfGradients, check_compression, config_of_gradients
from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.operations import Call, begin, checked, told_to_others
from fusedcomm.horovod.order import synchronize
from fusedcomm.horovod.process_sets import ProcessSet, global_process_set, members_of
from fusedcomm.horovod.step_reducer import Groups, Options, StepReducer, error_of
from fusedcomm.horovod.world import world
from fusedcomm.session.served import Place, refuse_served, serve, servers_of
from fusedcomm.session.surface import Spelled

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
    raise error_of(failure) if failure else AssertionError(TOO_MANY_PASSES)


class ReducedOptimizer(Spelled):
    """Stands before an optimizer's class among the bases; see DistributedOptimizer()."""

    serves_as = "a hvd.DistributedOptimizer"
    place: Place = "alone"
    is_replaced = False
    param_groups: list[dict]
    reducer: StepReducer | None

    def set_up(self, names: dict[torch.Tensor, str], options: Options, backward_passes_per_step: int) -> None:
        """names: of all parameters that it may ever have."""
        self._parameter_names, self._options = names, options
        self.process_set, self._was_included = options.process_set, options.process_set.included()
        self.backward_passes_per_step = backward_passes_per_step
        self._is_synchronized, self._should_synchronize = False, True
        self.reducer = None
        self._make_reducer()

    def _make_reducer(self) -> None:
        if not self.process_set.included():
            return
        options, named, config = self._options, self._named(), None
        devices = sorted({str(each.device) for _, each in named})
        if len(devices) > 1:
            raise ValueError(
                f"the optimizer's parameters are on several devices, {', '.join(devices)}: make a DistributedOptimizer "
                "for those of each device"
            )
        for _, each in named[:1]:
            members_of(self.process_set).check(each.device)
        if options.op in (Average, Sum):
            dtypes = {each.dtype for _, each in named if each.requires_grad}
            config = config_of_gradients(options.compression, dtypes)
        if config is None:
            return
        self.reducer = StepReducer(named, config, options, self.backward_passes_per_step, _refuse)
        self.reducer.native.is_on = not self._is_alone()

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that may have gradients, in their order. Names those that have no name."""
        found = {}
        for i, group in enumerate(self.param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter.is_floating_point() or parameter.is_complex():
                    found[self._parameter_names.setdefault(parameter, name_of_place(i, j))] = parameter
        return list(found.items())

    def _is_alone(self) -> bool:
        """Whether there is nothing to reduce. An elastic job may get ranks later and behaves the same with one."""
        found = world()
        return found.size == 1 and not found.settings.elastic

    def served(self) -> list[torch.Tensor]:
        """Its parameters; empty once a newer optimizer has one of them."""
        return [] if self.is_replaced else [each for group in self.param_groups for each in group["params"]]

    def replace(self) -> None:
        """A newer optimizer has one of the parameters."""
        self.is_replaced = True
        if self.reducer is not None:
            self.reducer.end()

    def has_other_ranks(self) -> bool:
        """Whether this rank was in the process set when this object was made, and is no longer, or the other way
        round."""
        return self.process_set.included() != self._was_included

    # ---- the step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on `passes` backward passes are added up: also for gradients of this step that are not yet on their
        way."""
        self.backward_passes_per_step = passes
        if self.reducer is not None:
            self.reducer.native.set_passes(passes)

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. Gradients that this step has not computed count as zeros. Raises
        ValueError if the process set is no longer in use, or has this rank only before or after a change of ranks."""
        if self.is_replaced:
            raise RuntimeError(
                "fusedcomm: a newer hvd.DistributedOptimizer reduces gradients of these parameters: step with that one"
            )
        if self.has_other_ranks():
            where, before = ("outside of", "in") if self._was_included else ("in", "outside of")
            raise ValueError(
                f"fusedcomm: the ranks have changed, and rank {world().rank} is {where} {self.process_set}, but was "
                f"{before} it when this optimizer was made: make a new hvd.DistributedOptimizer, on every rank, of an "
                "optimizer that is none, when the ranks have met again"
            )
        self._is_synchronized = True
        is_alone = self._is_alone()
        if self.reducer is None:
            if self.process_set.included() and not is_alone:
                self._reduce_by_operations()
            return
        self.reducer.native.is_on = not is_alone
        if not is_alone:
            self.reducer.end_step()

    @torch.no_grad()
    def _reduce_by_operations(self) -> None:
        """For what no wire does: a compressor of the user's, and other reductions than sums."""
        options = self._options
        trained = [(name, each) for name, each in self._named() if each.requires_grad]
        how = dict(op=options.op, prescale=1.0, postscale=options.predivide)
        calls: list[Call[torch.Tensor]] = [Call("allreduce", None, name, self.process_set, how) for name, _ in trained]
        contexts = []
        with contextlib.ExitStack() as told:  # without one gradient this rank begins none, and the others wait for all
            for call in calls:
                told.enter_context(told_to_others(call))
            for call, (name, each) in zip(calls, trained, strict=True):
                if each.grad is None:
                    each.grad = torch.zeros_like(each)
                elif each.grad.is_sparse:
                    raise ValueError(
                        f"the gradient of {name} is sparse, which this compression or op does not take: use "
                        "hvd.Compression.none with hvd.Average or hvd.Sum"
                    )
                call.given, context = options.compression.compress((each.grad / options.predivide).contiguous())
                checked(call)
                contexts.append(context)
        handles = [begin(call, in_place=True) for call in calls]
        try:
            for (_, each), handle, context in zip(trained, handles, contexts, strict=True):
                each.grad.copy_(options.compression.decompress(synchronize(handle), context))
        finally:
            for handle in handles:  # the next step has the same names, which are pending until then
                with contextlib.suppress(HorovodInternalError):
                    synchronize(handle)

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
            self._make_reducer()

    def load_state_dict(self, state_dict: dict) -> None:
        """Begins a step anew: what is being reduced is forgotten."""
        if self.reducer is not None and self._has_begun_step():
            # The sums under way are not waited for: the job may have failed.
            self.reducer.leave("load_state_dict() was called within a step")
        self._is_synchronized, self._should_synchronize = False, True
        super().load_state_dict(state_dict)  # type: ignore[misc]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """An optimizer that steps with gradients reduced over the ranks. It takes over `optimizer`'s parameters, options
    and state. Parameters that are thawed, or given to add_param_group(), on every rank in the same step are reduced
    from then on, each by itself, also with groups. Arguments are Horovod's, but for:

    compression: any of compression.py.
    backward_passes_per_step: the gradients of so many backward passes are added up, and not divided by this number.
    gradient_predivide_factor: without effect, unless the compressor is your own.

    It takes the place of an older one with one of its parameters, whose step() then raises RuntimeError.

    Raises TypeError for a `compression` that is none, ValueError for other arguments that are not possible, before
    hvd.init(), and if something else synchronizes a parameter. Its synchronize() and step() raise HorovodInternalError
    if the ranks disagree or one is lost, and a backward pass raises AssertionError if it is one too many for
    backward_passes_per_step.
    """
    check_compression(compression)
    if gradient_predivide_factor != 1.0 and (op != Average):
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor} is possible with op=hvd.Average only")
    if op not in (Average, Sum) and isinstance(compression, OfGradients):
        raise ValueError(f"{compression} is for op=hvd.Average and hvd.Sum: use hvd.Compression.none")
    if num_groups != 0:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError(f"backward_passes_per_step={backward_passes_per_step} is not possible: it must be at least 1")
    names = parameter_names(optimizer, named_parameters)
    _check_groups(groups)
    named = [(names[each], each) for group in optimizer.param_groups for each in group["params"]]
    if process_set.included():
        refuse_served(named, ReducedOptimizer.serves_as, replaces=ReducedOptimizer)
    reduced = _taken_over(optimizer)
    for older in servers_of(parameter for _, parameter in named):
        if process_set.included() or (isinstance(older, ReducedOptimizer) and older.has_other_ranks()):
            older.replace()  # type: ignore[attr-defined]  # others have been refused
    if process_set.included():
        refuse_served(named, ReducedOptimizer.serves_as, hooks=True)
    options = Options(compression, op, gradient_predivide_factor, groups, sparse_as_dense, process_set)
    reduced.set_up(names, options, backward_passes_per_step)
    if process_set.included():
        serve(reduced)
    return reduced


def _taken_over(optimizer: torch.optim.Optimizer) -> Any:
    """An object of a new class, ReducedOptimizer before the optimizer's own, with its name. It shares the optimizer's
    options and state."""
    inner = type(optimizer)
    if isinstance(optimizer, ReducedOptimizer):
        raise ValueError(f"DistributedOptimizer: this {inner.__name__} is a distributed optimizer already")
    cls = type(inner.__name__, (ReducedOptimizer, inner), {"__module__": __name__})
    new = cls.__new__(cls)
    # A learning rate scheduler sets `step` on the object it was given; here it would hide the method of the class.
    new.__dict__.update((name, value) for name, value in vars(optimizer).items() if name != "step")
    return new


def parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Names of the optimizer's parameters. Raises ValueError if one has none, or for entries that are no pairs, or if a
    name is used twice."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named_parameters is None:
        return {
            parameter: name_of_place(i, j)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        }
    named = list(named_parameters)
    if not all(isinstance(each, tuple) and len(each) == 2 for each in named):
        raise ValueError("named_parameters must be pairs (name, parameter): pass model.named_parameters()")
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else None:
        raise ValueError(f"named_parameters must have different names; these are used twice: {', '.join(twice)}")
    by_parameter = {parameter: name for name, parameter in named}
    unnamed = [tuple(parameter.shape) for parameter in own if parameter not in by_parameter]
    if unnamed:
        raise ValueError(
            f"named_parameters lack {len(unnamed)} of the optimizer's {len(own)} parameters, the first of shape "
            f"{unnamed[0]}: pass model.named_parameters()"
        )
    return by_parameter


def _check_groups(groups: Groups) -> None:
    """Raises ValueError for groups that are neither a number of at least 1 nor lists of different tensors."""
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups <= 0:
            raise ValueError(f"groups={groups!r} is not possible: pass a number of at least 1, or lists of parameters")
        return
    seen: set[int] = set()
    for group in groups:
        for parameter in group:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError(f"groups: a group has a {type(parameter).__name__}; expected parameters")
            if id(parameter) in seen:
                raise ValueError(f"groups: a parameter of shape {tuple(parameter.shape)} is in two groups")
            seen.add(id(parameter))
