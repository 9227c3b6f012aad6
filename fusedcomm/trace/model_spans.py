"""Records when a module's forward and backward passes and its optimizers' steps ran, while a trace is taken.

forward     the module's forward pass
backward    from the first gradient of the module's outputs until all gradients of the pass are there
wait        from there until DDP returns: it waits for buckets. Absent if the pass synchronizes nothing, as in no_sync
optimizer   a step of an optimizer that has a parameter of the module
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn.parallel.distributed import _find_tensors
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from fusedcomm.native import _C

STAGES = ("forward", "backward", "wait", "optimizer")


class ModelSpan(NamedTuple):
    """The fields that a document takes from a :class:`_C.TraceSpan`, too."""

    stage: str
    """One of STAGES."""
    step: int
    begin_ms: float
    """Since the beginning of the trace."""
    end_ms: float


class ModelRecorder:
    """Has hooks on the module, its outputs and torch's optimizers only within :meth:`record`.

    Args:
        synchronizer: takes the stamps, on the calling thread's stream, and numbers the steps.
    """

    def __init__(self, synchronizer: "_C.Synchronizer", module: nn.Module) -> None:
        self._synchronizer, self._module = synchronizer, module
        self._hooks = contextlib.ExitStack()
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._spans: list[tuple[str, int, _C.Stamp, _C.Stamp]] = []
        self._forwards: list[_C.Stamp] = []
        """The beginnings of forward passes under way. Checkpointing may run one within another pass."""
        self._passes: set[int] = set()
        """The backward passes under way, by autograd's number of them."""
        self._optimizers: dict[int, _C.Stamp] = {}
        """The beginnings of steps under way, by the optimizer's id."""
        self._step = max(0, synchronizer.step - 1)
        """The step of the latest pass, to which the optimizer's next step belongs."""

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        with self._hooks:
            for handle in (
                self._module.register_forward_pre_hook(self._begin_forward, prepend=True),
                self._module.register_forward_hook(self._end_forward, always_call=True),
                register_optimizer_step_pre_hook(self._begin_optimizer),
                register_optimizer_step_post_hook(self._end_optimizer),
            ):
                self._hooks.callback(handle.remove)
            yield

    def spans(self, origin: "_C.Stamp") -> list[ModelSpan]:
        """The spans since the stamp `origin`. On an accelerator it waits until the device has reached them."""
        return [
            ModelSpan(stage, step, begin.ms_since(origin), end.ms_since(origin))
            for stage, step, begin, end in self._spans
        ]

    def _add(self, stage: str, step: int, begin: "_C.Stamp") -> None:
        """Adds a span that ends now."""
        self._spans.append((stage, step, begin, self._synchronizer.engine.stamp()))

    def _begin_forward(self, module: nn.Module, inputs: tuple) -> None:
        self._step = self._synchronizer.step
        self._forwards.append(self._synchronizer.engine.stamp())

    def _end_forward(self, module: nn.Module, inputs: tuple, outputs: object) -> None:
        self._add("forward", self._step, self._forwards.pop())
        for output in _find_tensors(outputs):
            if output.requires_grad:
                self._hooks.callback(output.register_hook(self._begin_backward).remove)

    def _begin_backward(self, gradient: torch.Tensor) -> None:
        number = torch._C._current_graph_task_id()
        if number in self._passes:  # another output's gradient
            return
        self._passes.add(number)
        self._step = self._synchronizer.step
        self._at_end(functools.partial(self._end_backward, number, self._step, self._synchronizer.engine.stamp()))

    def _end_backward(self, number: int, step: int, begin: "_C.Stamp") -> None:
        self._passes.discard(number)
        self._add("backward", step, begin)
        if self._synchronizer.step == step:  # the last bucket was not handed over
            return
        # DDP queues the callback in which it waits during the pass; with static_graph from within a callback, which was
        # queued after this one. The end of the pass is therefore noted in the callback after the next.
        noted = functools.partial(self._add, "wait", step, self._synchronizer.engine.stamp())
        self._at_end(functools.partial(self._at_end, noted))

    @staticmethod
    def _at_end(callback: functools.partial) -> None:
        """Calls `callback` at the end of the backward pass under way, after the callbacks that are queued already."""
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        groups = optimizer.param_groups
        if any(id(parameter) in self._parameters for group in groups for parameter in group["params"]):
            self._optimizers[id(optimizer)] = self._synchronizer.engine.stamp()

    def _end_optimizer(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        begin = self._optimizers.pop(id(optimizer), None)
        if begin is not None:
            self._add("optimizer", self._step, begin)
