"""The step whose gradients are synchronized: a user's, from a script, or a synthetic one."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusedcomm.tools.errors import ProbeError
from fusedcomm.tools.probe.script import SHAPE
from fusedcomm.tools.probe.steps import Task, fsdp2_of, take_steps
from fusedcomm.tools.probe.team import Team

PARAMETER_NUMEL = 1 << 20
"""Elements of each parameter of the synthetic model; its last one may have fewer."""
TIMED_REPEATS = 2000
"""Repeats of the synthetic work that are timed first."""


# ---- a user's step


def checked(task: object, device: torch.device) -> Task:
    """`task` with three parts. Runs one step on `device`. Raises ProbeError that says what is wrong with the task."""
    if not isinstance(task, tuple) or len(task) not in (2, 3):
        raise ProbeError(f"make() returned {_described(task)}: {SHAPE}")
    model, step, optimizer = (*task, None)[:3]
    if not isinstance(model, nn.Module) or not callable(step):
        raise ProbeError(f"make() returned {_described(task)}: {SHAPE}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ProbeError(f"make()'s third result is a {type(optimizer).__name__}: leave it out, or return an Optimizer")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ProbeError("make()'s model has no parameter with requires_grad: there is nothing to synchronize")
    dtypes = {str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
    if dtypes != {"torch.float32"}:
        raise ProbeError(f"make()'s model has parameters of {', '.join(sorted(dtypes))}: use torch.float32 only")
    elsewhere = [(name, p.device) for name, p in model.named_parameters() if p.device.type != device.type]
    if elsewhere:
        raise ProbeError(f"make()'s model has {elsewhere[0][0]} on {elsewhere[0][1]}: this rank's device is {device}")
    fsdp2 = fsdp2_of(model)
    in_ddp = _InPlaceOfDdp(model) if fsdp2 is None else fsdp2.unattached(model)
    calls: list[nn.Module] = []
    counting = in_ddp.register_forward_pre_hook(lambda module, _: calls.append(module))
    try:
        loss = step(in_ddp)
    except (AttributeError, TypeError) as error:
        if in_ddp is model or type(in_ddp).__name__ not in str(error):
            raise
        raise ProbeError(
            f"step(model) needs more of the model than its forward pass ({error}): it also gets the DDP model, where "
            'getattr(model, "module", model) is the model itself'
        ) from error
    counting.remove()
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ProbeError(
            f"step(model) returned {_described(loss)}: it must return the loss, a tensor with one element that "
            "backward() can be called on"
        )
    if not calls:
        raise ProbeError(
            "step(model) does not call the model that it is given. DDP cannot synchronize another model, and every "
            "choice would seem to need no communication: call the model that is given"
        )
    loss.backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    model.zero_grad()
    if unused:
        raise ProbeError(
            f"step(model) does not use {len(unused)} parameter(s), {unused[0]} for example, which DDP would wait for: "
            "freeze them (requires_grad_(False)), or use them in the loss"
        )
    return model, step, optimizer


class _InPlaceOfDdp(nn.Module):
    """Wraps a model as DDP does later: it has none of the model's attributes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.module(*args, **kwargs)


def _described(value: object) -> str:
    """A few words about `value`, for an error message. Never empty."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}{'' if value.requires_grad else ' without a gradient'}"
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"


# ---- a synthetic step


class Layer(torch.autograd.Function):
    """Returns a copy of its input. Its backward pass calls `compute` and gives `parameter` a copy of `gradient`."""

    @staticmethod
    def forward(context, value: Tensor, parameter: Tensor, gradient: Tensor, compute: Callable[[], object]) -> Tensor:
        """`value` float32 []. `gradient` has the shape of `parameter`."""
        context.gradient, context.compute = gradient, compute
        return value.clone()

    @staticmethod
    def backward(context, output: Tensor) -> tuple:
        """The gradients of `value` and `parameter`."""
        context.compute()
        # The copy is fresh memory, as in a real backward pass.
        return output, context.gradient.clone(), None, None


def work(num_repeats: int, device: torch.device) -> None:
    """Keeps a core busy, with little reading and writing of memory."""
    values = torch.ones(1 << 14, dtype=torch.float32, device=device)
    for _ in range(num_repeats):
        values.mul_(1.0)


class Synthetic(nn.Module):
    """A model of `numel` elements in parameters of PARAMETER_NUMEL. Its backward pass writes gradients and, for each
    parameter, does :func:`work` with `num_repeats`, which is 0 at first."""

    def __init__(self, numel: int, device: torch.device) -> None:
        super().__init__()
        numels = [PARAMETER_NUMEL] * (numel // PARAMETER_NUMEL)
        if numel % PARAMETER_NUMEL or not numels:
            numels.append(numel % PARAMETER_NUMEL or 1)
        # Two dimensions: parameters of one dimension are exempt from wires with scales.
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(1, numel, dtype=torch.float32, device=device)) for numel in numels
        )
        self._gradients = [torch.randn(1, numel, dtype=torch.float32, device=device) for numel in numels]
        self.num_repeats, self._device = 0, device

    def _compute(self) -> None:
        work(self.num_repeats, self._device)

    def forward(self) -> Tensor:
        """Returns float32 [], on which backward() can be called."""
        value = torch.zeros((), dtype=torch.float32, requires_grad=True, device=self.weights[0].device)
        for weight, gradient in zip(self.weights, self._gradients, strict=True):
            value = Layer.apply(value, weight, gradient, self._compute)
        return value


def synthetic(numel: int, device: torch.device) -> Task:
    """The task of a Synthetic model, without an optimizer. Its backward pass only writes gradients."""
    return Synthetic(numel, device), lambda model: model(), None


TUNING_ROUNDS, TUNING_STEPS = 3, 3
"""Rounds in which the synthetic backward pass approaches the time that it should take, and steps of a round."""


def tune_backward(team: Team, task: Task, backward_s: float) -> None:
    """Makes a step of a synthetic task, which is little but a backward pass, take `backward_s` seconds on the slowest
    rank, gradients included. A collective call.

    The steps themselves are timed, because a core is slower in them than in a loop that has the caches to itself. All
    ranks do the same work. If writing the gradients alone takes longer, they do none; the report then says so.
    """
    model = task[0]

    def taken_s() -> float:
        # A disturbance makes steps longer, never shorter.
        return min(take_steps(team, model, task, TUNING_STEPS if backward_s < 1 else 1))

    taken_s()  # does not count: memory is fresh
    writing_s = taken_s()
    wanted_s = backward_s - writing_s
    if wanted_s <= 0:
        return
    begin = time.perf_counter()
    work(TIMED_REPEATS, team.device)
    team.settle()
    (of_one_s,) = team.slowest([(time.perf_counter() - begin) * len(model.weights) / TIMED_REPEATS])
    for _ in range(TUNING_ROUNDS):
        model.num_repeats = max(1, round(wanted_s / of_one_s))
        of_one_s = max(taken_s() - writing_s, wanted_s / 4) / model.num_repeats
    model.num_repeats = max(1, round(wanted_s / of_one_s))
