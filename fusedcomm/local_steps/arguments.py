"""The arguments of LocalSteps, checked."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.autotune.auto import chosen
from fusedcomm.config import WITH_SCALES, Config, Feedback, Wire, check
from fusedcomm.literals import Merge, MergedState, MergeWeights
from fusedcomm.local_steps import shards
from fusedcomm.native import _C

MERGES: tuple[Merge, ...] = ("corrected", "nesterov", "blend", "average")
DECAY = 0.95
"""Of the residuals of wires with scales, where only the wire's name is given."""
DELAY = 5
"""Steps that a message may travel, where nothing is given and `every` allows it."""
MOST_GROUPS = 64
_MOST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What all ranks must do alike, beside the wire."""

    every: int
    """Steps from one merge of a parameter to the next."""
    delay: int
    """Steps from a snapshot to its merge."""
    merge: Merge
    fragments: int
    alpha: float
    """The local parameters' share in a blend; 0 for the other rules."""
    groups: int
    """Groups of blocks, one of which is merged at a time; 1: all parameters are merged."""
    seed: int
    weights: MergeWeights | None
    state: MergedState
    warmup: int
    """Steps at the beginning whose gradients are averaged."""

    def record(self) -> dict[str, object]:
        """What ranks compare, and what a saved state must agree with."""
        return dataclasses.asdict(self)

    def turn(self, number: int) -> tuple[int, int]:
        """(fragment, steps after the warm-up after which its snapshot is taken) of turn `number`, counted from 0."""
        fragment, period = number % self.fragments, number // self.fragments
        return fragment, period * self.every + (fragment + 1) * self.every // self.fragments


def schedule(
    every: int,
    delay: int | None,
    merge: Merge,
    fragments: int,
    alpha: float | None,
    sparse: float | None,
    seed: int,
    weights: MergeWeights | None,
    state: MergedState,
    warmup: int,
) -> Schedule:
    """Raises ValueError for an argument that is out of range, and for two that exclude each other."""
    check.whole("every", every, 1, _MOST, "a whole number of steps, 1 or more")
    check.choice("merge", merge, MERGES)
    check.whole("fragments", fragments, 1, _MOST, "a whole number, 1 or more")
    check.whole("warmup", warmup, 0, _MOST, "a whole number of steps, 0 or more")
    check.whole("seed", seed, 0, 2**63 - 1, "a whole number from 0 to 2^63 - 1")
    check.choice("state", state, ("local", "average"))
    if weights is not None:
        check.choice("weights", weights, ("steps", "given"))
    if delay is None:
        delay = 0 if merge == "average" or state == "average" else min(DELAY, every - 1)
    check.whole("delay", delay, 0, _MOST, "a whole number of steps, 0 or more")
    if delay >= every:
        raise ValueError(
            f"delay={delay} is not below every={every}: a merge must have ended before the next one of the same "
            f"parameters begins: use delay={every - 1} or less, or a greater every"
        )
    if fragments > every:
        raise ValueError(
            f"fragments={fragments} is more than every={every}: each fragment has a turn of its own within that many "
            f"steps: use at most {every} fragments"
        )
    if merge == "average" and delay:
        raise ValueError(
            f"merge='average' waits for every merge, so delay={delay} would do nothing: use delay=0, or "
            "merge='corrected'"
        )
    if state == "average" and delay:
        raise ValueError(
            f"state='average' averages the optimizer's state where nothing has changed it since, and with "
            f"delay={delay} steps have: use delay=0, or state='local'"
        )
    if alpha is not None and merge != "blend":
        raise ValueError(f"alpha={alpha!r} is for merge='blend', not for merge={merge!r}: leave it out")
    if merge == "blend":
        alpha = 0.5 if alpha is None else alpha
        check.number("alpha", alpha, 0, 1, "a number from 0, the merged parameters, to 1, the local ones")
    groups = _groups(sparse, merge, seed)
    return Schedule(every, delay, merge, fragments, float(alpha or 0), groups, seed, weights, state, warmup)


def _groups(sparse: float | None, merge: Merge, seed: int) -> int:
    if sparse is None:
        if seed:
            raise ValueError(f"seed={seed} chooses the blocks of sparse=…, which is not given: leave it out")
        return 1
    possible = f"a fraction of the blocks from 1/{MOST_GROUPS} to 0.5, or None for all"
    check.number("sparse", sparse, 1 / MOST_GROUPS, 0.5, possible)
    if merge == "nesterov":
        raise ValueError(
            "sparse=… merges other blocks each time, and the outer optimizer of merge='nesterov' needs all of them: "
            "use merge='corrected'"
        )
    return round(1 / sparse)


def configuration(config: "Config | Wire", groups: int) -> Config:
    """The wire of the merges: a wire's name has error feedback where the wire has scales.

    Raises ValueError or TypeError if merges cannot be sent so.
    """
    if isinstance(config, str) and config in WITH_SCALES:
        config = Config(config, feedback=Feedback(decay=DECAY))
    found = chosen(
        config,
        no_search="config='auto' searches with gradients, and merges are too seldom for that: name the wire",
        no_off="config='off' would merge nothing: name the wire of the merges",
    )
    assert isinstance(found, Config)  # neither a search nor "off"
    if found.weighted is not None:
        raise ValueError(
            f"Config(weighted={found.weighted!r}) weighs backward passes, and here are none: use "
            "LocalSteps(weights='steps'), or weights='given'"
        )
    if found.checks.verify_every:
        raise ValueError(
            f"Checks(verify_every={found.checks.verify_every}) verifies buckets of backward passes, and here are none: "
            "leave it out"
        )
    if found.sum == "direct":
        raise ValueError(
            "sum='direct' adds everything in the wire, and a merge has numbers that must stay exact: use sum='auto'"
        )
    if groups > 1 and found.name_patterns:
        raise ValueError(
            f"wires={found.wires!r} chooses wires by parameters' names, and sparse=… sends blocks of several "
            "parameters together: leave one of them out"
        )
    return found


def targets(
    model: nn.Module, optimizer: torch.optim.Optimizer, masters: Mapping[str, torch.Tensor] | None
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, parameter, what the optimizer changes) of every parameter that requires gradients; the last one is the
    parameter itself, or its master copy.

    Raises ValueError if the optimizer does not hold them, or if they cannot be merged.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fusedcomm: LocalSteps takes a module and a torch.optim.Optimizer, not a {type(model).__name__} and a "
            f"{type(optimizer).__name__}"
        )
    shards.reshard(model)
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise ValueError("fusedcomm: no parameter of the model requires gradients, so there is nothing to merge")
    masters = dict(masters or {})
    unknown = sorted(masters.keys() - {name for name, _ in named})
    if unknown:
        raise ValueError(f"masters[{unknown[0]!r}] is of no parameter that requires gradients: use the model's names")
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    found = []
    for name, parameter in named:
        target = masters.get(name, parameter)
        _check_target(name, parameter, target)
        if id(target) not in held:
            raise ValueError(
                f"fusedcomm: the optimizer does not hold {name}, so its steps do not train it: give it the model's "
                "parameters, freeze this one, or name the optimizer's own copies with masters={name: tensor}"
            )
        found.append((name, parameter, target))
    devices = sorted({str(shards.local(target).device) for _, _, target in found})
    if len(devices) > 1:
        raise ValueError(f"fusedcomm: the parameters are on several devices, {devices}; one is supported")
    return found


def _check_target(name: str, parameter: torch.Tensor, target: torch.Tensor) -> None:
    shards.refuse_other_layout(name, parameter, target)
    if target.shape != parameter.shape:
        raise ValueError(f"masters[{name!r}] has shape {tuple(target.shape)}, the parameter {tuple(parameter.shape)}")
    if target.dtype not in _C.GRAD_DTYPES or target.layout != torch.strided:
        raise ValueError(
            f"fusedcomm: {name} is {target.dtype} and {target.layout}, which no merge carries: use dense float32, "
            "bfloat16 or float16 parameters"
        )


def refuse_same_ranks(model: nn.Module, process_group: Any) -> None:
    """Raises ValueError if DDP gives the same ranks the same gradients in every step."""
    ranks = shards.ranks_of(process_group)
    if len(ranks) > 1 and isinstance(model, DistributedDataParallel) and ranks <= shards.ranks_of(model.process_group):
        raise ValueError(
            f"fusedcomm: this DistributedDataParallel averages the gradients of {model.process_group.size()} ranks in "
            "every step, so their parameters are equal and there is nothing to merge: give LocalSteps the plain "
            "module, or make DDP over the ranks of a host with process_group=…"
        )
