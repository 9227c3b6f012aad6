"""The parameters that a distributed optimizer has, as the other front ends see them."""

from collections.abc import Container

import torch

from fusedcomm.session.served import Place
from fusedcomm.session.surface import Spelled


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
    """A distributed optimizer, as the other front ends see it; see fusedcomm/session/served.py."""

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
