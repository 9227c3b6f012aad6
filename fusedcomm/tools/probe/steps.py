"""Real steps of the user's model with each choice, in turns."""

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.attaching import is_sharded
from fusedcomm.autotune.turns import Turns
from fusedcomm.ddp.attach import attach
from fusedcomm.ddp.handle import Handle
from fusedcomm.ranks.hosts import OwnHost
from fusedcomm.session.checksums import checksums
from fusedcomm.tools.errors import ProbeError
from fusedcomm.tools.probe.choices import Candidate, Seen, config_of, own_cap_mb, way_of
from fusedcomm.tools.probe.team import Team

if TYPE_CHECKING:
    from fusedcomm.fsdp.handle import FsdpHandle

Step = Callable[[nn.Module], Tensor]
Task = tuple[nn.Module, Step, torch.optim.Optimizer | None]
"""(model, step, optimizer). `step` runs the model's forward pass on a batch and returns the loss. The optimizer is None
if its time is not to be measured."""

WARMUP_STEPS = 2
"""DDP rebuilds its buckets after the first step."""
STEPS_OF_A_TURN = 2
"""Steps that count in a turn. One step before them does not count, because the previous choice has left other data in
the caches."""
MIN_TURNS, MAX_TURNS, MAX_ALONE = 2, 30, 20
"""Turns of each choice, and most steps without synchronization."""
MIN_CHOICES = 2
"""Choices that take steps however little time there is: DDP's own all-reduce and one other."""
MAX_BUCKETS_NBYTES = 2 << 30
"""Limit for the buckets of all choices that take turns together: each choice has a DDP with its own buckets."""


def fsdp2_of(model: nn.Module) -> ModuleType | None:
    """The functions for a model of FSDP2, sharded.py; None for another model."""
    if not is_sharded(model):
        return None
    from fusedcomm.tools.probe import sharded  # imports FSDP2, which takes a while

    return sharded


@contextlib.contextmanager
def synchronized(
    team: Team, model: nn.Module, choice: Candidate, init_sync: bool = False
) -> Iterator[tuple[nn.Module, "Handle | FsdpHandle | None"]]:
    """The model in DDP, of FSDP2 itself, with gradients synchronized by this choice, and fusedcomm's handle, which is
    None for DDP's own all-reduce. init_sync: with DDP all ranks get rank 0's parameters. A collective call."""
    config = config_of(choice)
    if (fsdp2 := fsdp2_of(model)) is not None:
        with fsdp2.attached(model, config) as resting:
            yield model, resting
        return
    ddp = DistributedDataParallel(
        model, process_group=team.group, init_sync=init_sync, bucket_cap_mb=own_cap_mb(choice)
    )
    handle = None if config is None else attach(ddp, config, quiet=True, in_turns=True)
    try:
        yield ddp, handle
    finally:
        if handle is not None:
            handle.detach()
        model.zero_grad()
        del ddp  # this removes its hooks on the parameters, too


def take_steps(
    team: Team, module: nn.Module, task: Task, num_steps: int, check: Callable[[], None] | None = None
) -> list[float]:
    """Seconds of each step on the slowest rank. All ranks begin a step together. A collective call.

    Args:
        module: the model, in DDP or as it is.
        check: is called after each backward pass.
    """
    _, step, optimizer = task
    seconds = []
    for _ in range(num_steps):
        team.barrier()
        begin = time.perf_counter()
        module.zero_grad()
        step(module).backward()
        if check is not None:
            team.settle()
            check()
        if optimizer is not None:
            optimizer.step()
        team.settle()
        seconds.append(time.perf_counter() - begin)
    return team.slowest(seconds)


def alone(team: Team, task: Task, budget_s: float) -> list[float]:
    """Seconds of steps without synchronization on the slowest rank, as many as fit the budget, at least one. A
    collective call."""
    began, model, fsdp2 = time.perf_counter(), task[0], fsdp2_of(task[0])
    # Gradients differ between ranks, so the optimizer gets zeros: parameters stay equal on all of them.
    zeros = functools.partial(model.zero_grad, set_to_none=False)
    with contextlib.nullcontext() if fsdp2 is None else fsdp2.without_collectives(model):
        *_, last_s = take_steps(team, model, task, WARMUP_STEPS, zeros)
        (left_s,) = team.slowest([budget_s - (time.perf_counter() - began)])
        found = take_steps(team, model, task, round(min(max(left_s / last_s, 1), MAX_ALONE)), zeros)
    model.zero_grad()
    return found


def in_turns(
    team: Team, task: Task, choices: Sequence[Candidate], own_host: OwnHost, budget_s: float
) -> dict[Candidate, Seen]:
    """Takes steps with each of the choices. Choices for which the budget is too small are left out, the last ones
    first; MIN_CHOICES are tried whatever it takes. A collective call.

    Every choice has its own DDP around the same module. The choices take turns, so a disturbance of seconds affects all
    of them alike. A DDP's hooks on parameters do nothing unless the last forward pass was its own.

    Args:
        choices: DDP's own all-reduce first; the others are compared with it.
        own_host: of one rank if all ranks are on one host, or if hosts have different numbers of ranks.

    Raises:
        ProbeError: on every rank, if gradients differ between ranks after a backward pass.
    """
    numel = sum(parameter.numel() for parameter in task[0].parameters() if parameter.requires_grad)
    together = max(MIN_CHOICES, MAX_BUCKETS_NBYTES // (4 * numel))
    baseline, others = choices[0], list(choices[1:])
    seen: dict[Candidate, Seen] = {}
    began = time.perf_counter()
    while others:
        group, others = [baseline, *others[: together - 1]], others[together - 1 :]
        (left_s,) = team.slowest([budget_s - (time.perf_counter() - began)])
        if len(seen) >= MIN_CHOICES and left_s <= 0:
            break
        share_s = left_s * (len(group) - 1) / (len(group) - 1 + len(others))
        found = _turns(team, task, group, own_host, share_s, MIN_CHOICES if not seen else 1)
        seen = found | seen
        if len(found) < len(group):
            break
    return {choice: seen[choice] for choice in choices if choice in seen}


def _turns(
    team: Team, task: Task, choices: Sequence[Candidate], own_host: OwnHost, budget_s: float, least: int
) -> dict[Candidate, Seen]:
    """Takes steps with the choices that fit the budget, and with the first `least` ones in any case."""
    began = time.perf_counter()
    with contextlib.ExitStack() as stack:
        modules: list[tuple[nn.Module, Handle | FsdpHandle | None]] = []
        of_a_round_s = longest_s = 0.0
        for choice in choices:
            needs_s = MIN_TURNS * of_a_round_s + (WARMUP_STEPS + MIN_TURNS * (1 + STEPS_OF_A_TURN)) * longest_s
            (left_s,) = team.slowest([budget_s - (time.perf_counter() - began)])
            if len(modules) >= least and needs_s > left_s:
                break
            modules.append(stack.enter_context(synchronized(team, task[0], choice)))
            check = functools.partial(check_gradients, team, task[0], way_of(choice))
            with _running(modules[-1][1]):
                take_steps(team, modules[-1][0], task, 1, check)
                (last_s,) = take_steps(team, modules[-1][0], task, WARMUP_STEPS - 1)
            of_a_round_s += (1 + STEPS_OF_A_TURN) * last_s
            longest_s = max(longest_s, last_s)
        (left_s,) = team.slowest([budget_s - (time.perf_counter() - began)])
        num_turns = round(min(max(left_s / of_a_round_s, MIN_TURNS), MAX_TURNS))
        turns = Turns(range(len(modules)), num_turns, STEPS_OF_A_TURN)
        while not turns.finished:
            module, handle = modules[turns.candidate]
            with _running(handle):
                seconds = take_steps(team, module, task, turns.num_steps)
            turns.record(seconds[-turns.timed :])
        sent = [_sent(team, module, handle, own_host) for module, handle in modules]
    off = [statistics.mean(turn) for turn in turns.seen[0]]
    return {
        choice: Seen(
            [step_s for turn in of_choice for step_s in turn],
            [statistics.mean(turn) / off_s for turn, off_s in zip(of_choice, off, strict=True)],
            *nbytes,
        )
        for choice, of_choice, nbytes in zip(choices, turns.seen.values(), sent, strict=False)
    }


def _running(handle: "Handle | FsdpHandle | None") -> contextlib.AbstractContextManager:
    """Context of steps that go through `handle`, as those of its DDP do in any case."""
    if handle is None or isinstance(handle, Handle):
        return contextlib.nullcontext()
    meshes: Any = handle.runs
    return meshes.running()


def _sent(
    team: Team, module: nn.Module, handle: "Handle | FsdpHandle | None", own_host: OwnHost
) -> tuple[int, int | None]:
    """Bytes of a step that (a rank sends, its host sends to other hosts; None if that is not known)."""
    if (fsdp2 := fsdp2_of(module)) is not None:
        of_rank, of_host = fsdp2.sent(handle, own_host.num_links)
        return of_rank, of_rank if own_host.num_ranks == 1 else of_host
    if handle is None:
        numel = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
        ring = round(2 * (team.world_size - 1) / team.world_size * 4 * numel)
        return ring, ring * own_host.num_links
    assert isinstance(handle, Handle)
    plan = handle.plan()
    if own_host.num_ranks == 1:
        return plan.sent_nbytes, plan.sent_nbytes
    between = plan.sent_between_hosts_nbytes
    return plan.sent_nbytes, None if between is None else between * own_host.num_ranks


def check_gradients(team: Team, model: nn.Module, way: str) -> None:
    """Checks that the gradients of all ranks are equal, bit for bit; not with FSDP2, where each has its own. A
    collective call.

    Args:
        way: what has synchronized them, for the message.

    Raises:
        ProbeError: on every rank; names a rank and a parameter with another gradient.
    """
    if is_sharded(model):
        return
    named = [(name, parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None]
    values = [each.coalesce().values() if each.is_sparse else each for _, each in named]
    own = checksums([torch.nan_to_num(each) for each in values], team.device)  # NaNs of all kinds count alike
    everybodys = team.gather(own.tolist())
    for rank, theirs in enumerate(everybodys):
        for (name, _), first, other in zip(named, everybodys[0], theirs, strict=False):
            if first != other:
                raise ProbeError(
                    f"with {way} the gradient of {name} on rank {rank} differs from that on rank 0 after the backward "
                    "pass, where all ranks must have the same: nothing is recommended. Please report it, with the "
                    "output of `fusedcomm doctor`"
                )
