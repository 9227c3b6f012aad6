"""Handlers of a state's values: models, optimizers and samplers know how to be saved and synced."""

import copy
from typing import Any

import torch

from fusedcomm.horovod.elastic.sampler import ElasticSampler
from fusedcomm.horovod.objects import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Saves, restores and syncs one value. `saved`: the copy of its state that restore() goes back to. `root_rank`: the
    rank whose value sync() gives to all."""

    root_rank = 0

    def __init__(self, value: Any) -> None:
        self.value = value
        self.saved: Any = None
        self.save()

    def save(self) -> None:
        """Keeps a copy of what the value's state_dict() returns."""
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Makes the value what it was at the last save()."""
        # Some load_state_dict() keep what they are given.
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def sync(self) -> None:
        """Gives the value of the rank `root_rank` to all, and saves it. A collective call."""
        raise NotImplementedError

    def reset(self) -> None:
        """The ranks have changed."""

    def set_value(self, value: Any) -> None:
        """Holds and saves another value."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """A torch.nn.Module: its parameters and buffers."""

    def sync(self) -> None:
        """Broadcasts parameters and buffers, and saves them. A collective call."""
        broadcast_parameters(self.value.state_dict(), root_rank=self.root_rank)
        self.save()


class OptimizerStateHandler(StateHandler):
    """A torch.optim.Optimizer: its state and options."""

    def sync(self) -> None:
        """Broadcasts state and options, and saves them. A collective call."""
        broadcast_optimizer_state(self.value, root_rank=self.root_rank)
        self.save()


class SamplerStateHandler(StateHandler):
    """An ElasticSampler: its epoch, and how much of that is processed."""

    def sync(self) -> None:
        """Broadcasts the epoch and its processed indices, and saves them. A collective call."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), self.root_rank, name="elastic.sampler"))
        self.save()

    def reset(self) -> None:
        """The ranks have changed: shares out what is not processed."""
        self.value.reset()


_registry: list[tuple[type, type]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type]]:
    """Pairs of a type of values and the class of their handlers; the first that fits is taken."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type]]) -> None:
    """Replaces the pairs that get_handler_registry() returns, for states that are made from now on."""
    global _registry
    _registry = registry


def handlers_of(values: dict[str, Any]) -> dict[str, StateHandler]:
    """A handler for each value whose type the registry has, by name."""
    found = {}
    for name, value in values.items():
        if (handler := next((handler for kind, handler in _registry if isinstance(value, kind)), None)) is not None:
            found[name] = handler(value)
    return found
