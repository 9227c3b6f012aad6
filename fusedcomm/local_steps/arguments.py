"""The arguments of LocalSteps, checked."""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.autotune.auto import chosen
from fusedcomm.config import Config, Wire, check, combinations
from fusedcomm.local_steps import shards
from fusedcomm.local_steps.windows import seconds_of
from fusedcomm.native import _C

DELAY = 5
"""Steps that a message may travel, where nothing is given and `every` allows it."""
_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What all ranks must do alike, beside the wire."""

    every: int | str
    """Steps from one merge of a parameter to the next, or the time, as "20s"."""
    delay: int
    """Steps from a snapshot to its merge."""

    def record(self) -> dict[str, object]:
        """What ranks compare, and what a saved state must agree with."""
        return dataclasses.asdict(self)

    @property
    def period(self) -> str:
        """`every` in words."""
        return self.every if isinstance(self.every, str) else f"{self.every} steps"

    @property
    def seconds(self) -> float | None:
        """The time from one merge of a parameter to the next; None where steps are counted."""
        return seconds_of(self.every) if isinstance(self.every, str) else None

    def step_of(self, turn: int) -> int:
        """The steps after which the snapshot of a turn, counted from 0, is taken, where steps are counted."""
        assert not isinstance(self.every, str)
        return (turn + 1) * self.every


def schedule(every: int | str, delay: int | None) -> Schedule:
    """Raises ValueError for an argument that is out of range, and for a delay that is not below `every`."""
    if isinstance(every, str):
        seconds_of(every)
    else:
        check.whole("every", every, 1, _MOST, 'a whole number of steps, 1 or more, or a time like "20s"')
    if delay is None:
        delay = DELAY if isinstance(every, str) else min(DELAY, every - 1)
    check.whole("delay", delay, 0, _MOST, "a whole number of steps, 0 or more")
    if not isinstance(every, str) and delay >= every:
        raise ValueError(f"delay={delay} is not below every={every}: use delay={every - 1} or less, or a greater every")
    return Schedule(every, delay)


def configuration(config: "Config | Wire") -> Config:
    """The wire of the merges. Raises ValueError or TypeError if merges cannot be sent so."""
    found = chosen(config, "LocalSteps")
    assert isinstance(found, Config)  # neither a search nor "off"
    names = ("weighted", "compare_every", "compare", "sum", "feedback")
    combinations.refuse("LocalSteps", {name: getattr(found, name) for name in names})
    return found


def merged_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """The parameters that require gradients, with their names.

    Raises ValueError if the optimizer does not hold them, or if they cannot be merged.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        given = f"a {type(model).__name__} and a {type(optimizer).__name__}"
        raise TypeError(f"fusedcomm: LocalSteps takes a module and a torch.optim.Optimizer, not {given}")
    shards.reshard(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError("fusedcomm: no parameter of the model requires gradients, so there is nothing to merge")
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, parameter in named:
        if parameter.dtype not in _C.GRAD_DTYPES or parameter.layout != torch.strided:
            raise ValueError(
                f"fusedcomm: {name} is {parameter.dtype} and {parameter.layout}, which no merge carries: use dense "
                "float32, bfloat16 or float16"
            )
        if id(parameter) not in held:
            raise ValueError(
                f"fusedcomm: the optimizer does not hold {name}, so its steps do not train it: give it the model's "
                "parameters, or freeze this one"
            )
    devices = sorted({str(shards.local(parameter).device) for _, parameter in named})
    if len(devices) > 1:
        raise ValueError(f"fusedcomm: the parameters are on several devices, {devices}; one is supported")
    return named


def refuse_mates(every: int | str, model: nn.Module) -> None:
    """Raises ValueError for windows of time on ranks that make each step together."""
    time = every if isinstance(every, str) else None
    is_inside = isinstance(model, nn.Module) and shards.has_mates(model)
    combinations.refuse("LocalSteps", {"every as a time": time, "DDP or FSDP2 inside a host": is_inside})


def refuse_same_ranks(model: nn.Module, process_group: Any) -> None:
    """Raises ValueError if DDP gives the same ranks the same gradients in every step."""
    ranks = shards.ranks_of(process_group)
    if len(ranks) > 1 and isinstance(model, DistributedDataParallel) and ranks <= shards.ranks_of(model.process_group):
        raise ValueError(
            f"fusedcomm: this DistributedDataParallel averages the gradients of {model.process_group.size()} ranks in "
            "every step: give LocalSteps the plain module, or make DDP over the ranks of a host with process_group=…"
        )
