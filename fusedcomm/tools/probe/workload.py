"""The step whose gradients are synchronized: a user's, from a script, or a synthetic one."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fusedcomm.tools.cost_model import Gradient, Workload
from fusedcomm.tools.errors import ProbeError
from fusedcomm.tools.probe.script import SHAPE
from fusedcomm.tools.probe.team import Team, cpu_s

Step = Callable[[nn.Module], Tensor]
Task = tuple[nn.Module, Step, torch.optim.Optimizer | None]
"""(model, step, optimizer). `step` runs the model's forward pass on a batch and returns the loss. The optimizer is None
if its time is not to be measured."""

PARAMETER_NUMEL = 1 << 20
"""Elements of each parameter of the synthetic model; its last one may have fewer."""


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
    in_ddp = _InPlaceOfDdp(model)
    try:
        loss = step(in_ddp)
    except (AttributeError, TypeError) as error:
        if type(in_ddp).__name__ not in str(error):
            raise
        raise ProbeError(
            f"step(model) needs more of the model than its forward pass ({error}): it also gets the DDP model, where "
            'getattr(model, "module", model) is the model itself'
        ) from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ProbeError(
            f"step(model) returned {_described(loss)}: it must return the loss, a tensor with one element that "
            "backward() can be called on"
        )
    if not in_ddp.num_calls:
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
        self.module, self.num_calls = module, 0

    def forward(self, *args: object, **kwargs: object) -> object:
        self.num_calls += 1
        return self.module(*args, **kwargs)


def _described(value: object) -> str:
    """What `value` is, for an error message. Never empty."""
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
        context.gradient, context.compute = gradient, compute
        return value.clone()

    @staticmethod
    def backward(context, output: Tensor) -> tuple:
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
        value = torch.zeros((), dtype=torch.float32, requires_grad=True, device=self.weights[0].device)
        for weight, gradient in zip(self.weights, self._gradients, strict=True):
            value = Layer.apply(value, weight, gradient, self._compute)
        return value


def synthetic(numel: int, device: torch.device) -> Task:
    """The task of a Synthetic model, without an optimizer. Its backward pass only writes gradients."""
    return Synthetic(numel, device), lambda model: model(), None


TUNING_ROUNDS, TUNING_STEPS = 3, 3
"""Rounds in which the synthetic backward pass approaches the time that it should take, and steps of a round."""
# Repeats of the work that is timed first.
TIMED_REPEATS = 2000


def tune_backward(team: Team, task: Task, backward_s: float) -> None:
    """Makes the backward pass of a synthetic task take `backward_s` on the slowest rank, gradients included. A
    collective call.

    The pass itself is timed, because a core is slower in it than in a loop that has the caches to itself. All ranks do
    the same work. If writing the gradients alone takes longer, they do none; the report then says so.
    """
    model, step, _ = task
    num_steps = TUNING_STEPS if backward_s < 1 else 1

    def taken_s() -> float:
        rows = _steps(team, model, step, None, {}, 0, num_steps)
        return min(team.slowest([row[1] for row in rows]))  # a disturbance makes steps longer, never shorter

    taken_s()  # does not count: memory is fresh
    writing_s = taken_s()
    if backward_s <= writing_s:
        return
    (of_one_s,) = team.slowest([_timed_work(team)])
    for _ in range(TUNING_ROUNDS):
        wanted_s = backward_s - writing_s
        model.num_repeats = max(1, round(wanted_s / len(model.weights) / of_one_s))
        of_one_s = max(taken_s() - writing_s, wanted_s / 4) / len(model.weights) / model.num_repeats
    model.num_repeats = max(1, round((backward_s - writing_s) / len(model.weights) / of_one_s))


def _timed_work(team: Team) -> float:
    """Seconds of one repeat of :func:`work`."""
    begin = time.perf_counter()
    work(TIMED_REPEATS, team.device)
    team.settle()
    return (time.perf_counter() - begin) / TIMED_REPEATS


# ---- measuring


MAX_STEPS = 50
"""Steps that count: at most; there are as many as fit the budget, and at least one."""


def measure_workload(team: Team, task: Task, budget_s: float) -> Workload:
    """Measures steps without synchronization, on all ranks at once. A collective call.

    The first three steps do not count, except the last one if there is no time for more. A step is as long as the
    slowest rank's. The shares of its parts are means over ranks.
    """
    model, step, optimizer = task
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    ready: dict[int, float] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, index=index: ready.__setitem__(index, time.perf_counter())
        )
        for index, parameter in enumerate(parameters)
    ]

    def timed(num_steps: int) -> list[list[float]]:
        return _steps(team, model, step, optimizer, ready, len(parameters), num_steps)

    began = time.perf_counter()

    def fitting(last: list[list[float]]) -> int:
        """How many steps as long as the `last` one fit what is left of the budget."""
        left_s, last_s = team.slowest([budget_s - (time.perf_counter() - began), sum(last[-1][:3])])
        return int(max(left_s, 0.0) / max(last_s, 1e-6))

    try:
        rows = timed(1)
        for most in (1, 1, MAX_STEPS):
            if (fits := fitting(rows)) > 0:
                rows = timed(min(fits, most))
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    # A step is as long as the slowest rank's; its parts are shares of that.
    steps_s = [sum(row[:3]) for row in rows]
    total_s = statistics.median(team.slowest(steps_s))
    shares = [
        statistics.median(row[part] / step_s for row, step_s in zip(rows, steps_s, strict=True)) for part in range(3)
    ]
    shares += [statistics.median(row[4 + index] / row[1] for row in rows) for index in range(len(parameters))]
    busy_cores = sum(row[3] for row in rows) / sum(steps_s)
    *shares, busy_cores = team.mean([*shares, busy_cores])
    forward_s, backward_s, optimizer_s = (total_s * share / sum(shares[:3]) for share in shares[:3])
    ready_s = [backward_s * min(share, 1.0) for share in shares[3:]]
    order = sorted(range(len(parameters)), key=lambda index: (ready_s[index], -index))
    gradients = [Gradient(parameters[index].numel(), ready_s[index], parameters[index].dim() <= 1) for index in order]
    return Workload(forward_s, backward_s, optimizer_s, gradients, busy_cores=busy_cores)


def _steps(team: Team, model: nn.Module, step: Step, optimizer, ready: dict, num_ready: int, num_steps: int) -> list:
    """A row for each step: seconds of forward, backward and optimizer, core seconds of all three, and for each gradient
    the seconds from the start of the backward pass until it was ready."""
    rows = []
    for _ in range(num_steps):
        team.barrier()
        ready.clear()
        begin, begin_cpu_s = time.perf_counter(), cpu_s()
        model.zero_grad()
        loss = step(model)
        team.settle()
        forward = time.perf_counter()
        loss.backward()
        team.settle()
        backward = time.perf_counter()
        if optimizer is not None:
            optimizer.step()
            team.settle()
        end, taken_cpu_s = time.perf_counter(), cpu_s() - begin_cpu_s
        # A parameter without a gradient is sent as zeros, at the end.
        since = [ready.get(index, backward) - forward for index in range(num_ready)]
        rows.append([forward - begin, backward - forward, end - backward, taken_cpu_s, *since])
    return rows
