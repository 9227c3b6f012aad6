"""The parameters that an engine synchronises: their names, and the wires that they travel in."""

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from fusedcomm.config import Config
from fusedcomm.patterns import by_tensor


@dataclasses.dataclass(frozen=True)
class NamedParameter:
    name: str
    tensor: torch.Tensor
    wire: int
    """Its number, see csrc/engine/config.h."""
    other_names: tuple[str, ...] = ()
    """Of a tied parameter. Patterns know it by them, too; state, plan and the ranks by `name` alone."""


def named_parameters(named: Iterable[tuple[str, torch.Tensor]], configs: Sequence[Config]) -> list[NamedParameter]:
    """Those that require gradients first, then the others, which DDP may have had from before they were frozen. Wires
    by the first of `configs`.

    Args:
        named: a tied parameter once by each of its names.

    Raises:
        ValueError: a pattern has no effect on parameters that require gradients (on any, if all are frozen), or two
            disagree over a tied one, whichever of `configs` is used.
    """
    named = sorted(named, key=lambda pair: not pair[1].requires_grad)
    checked = [(name, tensor) for name, tensor in named if tensor.requires_grad] or named
    errors = []
    for each in configs:
        try:
            each.check_patterns(checked)
        except ValueError as error:
            errors.append(error)
    if len(errors) == len(configs):
        raise errors[0]
    parameters = [NamedParameter(name, tensor, 0, tuple(others)) for (name, *others), tensor in by_tensor(named)]
    return numbered(parameters, configs[0])


def numbered(parameters: Sequence[NamedParameter], config: Config) -> list[NamedParameter]:
    """With the wires that they have by `config`."""
    return [dataclasses.replace(p, wire=config.wire_number(p.name, p.tensor, p.other_names)) for p in parameters]


def trainable(parameters: Sequence[NamedParameter] | None) -> list[NamedParameter]:
    """Those that require gradients now."""
    return [p for p in parameters or [] if p.tensor.requires_grad]
