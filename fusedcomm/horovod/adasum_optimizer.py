"""The optimizer that reduces steps, not gradients: each rank steps by itself, and Adasum joins the steps."""

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch

from fusedcomm.horovod.async_ops import allreduce_async_
from fusedcomm.horovod.checks import Adasum
from fusedcomm.horovod.handles import synchronize
from fusedcomm.session.served import Place
from fusedcomm.session.surface import Spelled

TOO_MANY_PASSES = (
    "a gradient was computed more than backward_passes_per_step={} times before step(): raise "
    "backward_passes_per_step to add gradients up"
)
ZERO_GRAD_TOO_EARLY = (
    "zero_grad() was called after backward() and before step() or synchronize(): the gradients are being reduced"
)


def name_of_place(group: int, index: int) -> str:
    """The name of a parameter that was given none."""
    return f"allreduce.noname.{group}.{index}"


def new_parameters(
    param_groups: list[dict], known: Container[torch.Tensor], names: dict[torch.Tensor, str]
) -> list[torch.Tensor]:
    """The parameters that require a gradient and are not `known`. Adds those that have no name to `names`."""
    new = []
    for i, group in enumerate(param_groups):
        for j, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter not in known:
                names.setdefault(parameter, name_of_place(i, j))
                new.append(parameter)
    return new


class Served(Spelled):
    """What both distributed optimizers are for the other front ends; see fusedcomm/session/served.py."""

    serves_as = "a hvd.DistributedOptimizer"
    place: Place = "alone"
    is_replaced = False
    param_groups: list[dict]

    def served(self) -> list[torch.Tensor]:
        """Its parameters; empty once a newer optimizer has one of them."""
        return [] if self.is_replaced else [each for group in self.param_groups for each in group["params"]]

    def refuse_replaced(self) -> None:
        """Raises RuntimeError if a newer optimizer has the parameters."""
        if self.is_replaced:
            raise RuntimeError(
                "fusedcomm: a newer hvd.DistributedOptimizer reduces gradients of these parameters: step with that one"
            )


class AdasumOptimizer(Served):
    """Stands before an optimizer's class among the bases; see optimizer.py.

    1. When a parameter's gradient is ready, the inner optimizer steps that parameter alone.
    2. The change is reduced with Adasum, and the parameter put back to where it was.
    3. step() waits, and adds the reduced changes.
    """

    @property
    def weight(self) -> None:
        """None: with Adasum ranks have no weights. Setting it raises RuntimeError."""
        return None

    @weight.setter
    def weight(self, value: object) -> None:
        raise RuntimeError("optimizer.weight would do nothing with op=hvd.Adasum, which has no weights of ranks")

    def set_up(self, names: dict[torch.Tensor, str], compression: Any, backward_passes_per_step: int) -> None:
        """Arguments: see DistributedOptimizer(). names: of all parameters that it may ever have."""
        self._parameter_names = names
        self._compression = compression
        self._handles: dict[torch.Tensor, tuple[int, Any, torch.Tensor]] = {}
        self._hooks: dict[torch.Tensor, Any] = {}  # of the parameters that are updated
        self._add_hooks()
        self.set_backward_passes_per_step(backward_passes_per_step)

    def _add_hooks(self) -> None:
        """Also called in each step, for parameters that were thawed, or added to the optimizer, since the last one."""
        for each in new_parameters(self.param_groups, self._hooks, self._parameter_names):
            self._hooks[each] = each.register_post_accumulate_grad_hook(self._on_gradient)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on `passes` backward passes are added up before a parameter is stepped."""
        self.backward_passes_per_step = passes
        self._passes_left = dict.fromkeys(self._hooks, passes)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self.is_replaced:
            return
        if self._passes_left[parameter] <= 0:
            raise AssertionError(TOO_MANY_PASSES.format(self.backward_passes_per_step))
        self._passes_left[parameter] -= 1
        if self._passes_left[parameter] == 0:
            self._submit(parameter)

    @torch.no_grad()
    def _submit(self, parameter: torch.Tensor) -> None:
        start = parameter.detach().clone()
        all_parameters = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [each for each in group["params"] if each is parameter]
            super().step()  # type: ignore[misc]
        finally:
            for group, parameters in zip(self.param_groups, all_parameters, strict=True):
                group["params"] = parameters
        change = parameter.detach() - start
        # The rest of the backward pass may still read the parameter.
        parameter.data.copy_(start)
        compressed, context = self._compression.compress(change.contiguous())
        name = self._parameter_names[parameter]
        self._handles[parameter] = (allreduce_async_(compressed, name=name, op=Adasum), context, compressed)

    def synchronize(self) -> None:
        """Without effect: only step() can add the steps."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: step() cannot do without."""
        raise AssertionError("skip_synchronize() is not possible with op=hvd.Adasum: step() has to wait for the steps")
        yield

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Waits for the steps of all parameters and adds the reduced ones. Returns the closure's loss."""
        self.refuse_replaced()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._add_hooks()
        for parameter in self._hooks:
            if parameter not in self._handles:
                self._submit(parameter)
        try:
            for parameter, (handle, context, _) in self._handles.items():
                parameter.add_(self._compression.decompress(synchronize(handle), context).view_as(parameter))
        finally:
            self._handles.clear()
            self.set_backward_passes_per_step(self.backward_passes_per_step)
        return loss

    # The inner step runs the optimizer's hooks already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Raises AssertionError while steps are being reduced."""
        if self._handles:
            raise AssertionError(ZERO_GRAD_TOO_EARLY)
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]
