"""States that elastic training saves in memory, restores after a lost rank, and gives to new workers."""

import copy
from collections.abc import Callable
from typing import Any

import torch

import fusedcomm.horovod.membership as membership
from fusedcomm.horovod.elastic.sampler import ElasticSampler
from fusedcomm.horovod.errors import HostsUpdatedInterrupt
from fusedcomm.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from fusedcomm.horovod.state import rank


class State:
    """The state that elastic.run() works with. Subclasses give save(), restore(), sync() and reset()."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._reset_callbacks: list[Callable[[], None]] = []
        self._num_commits = 0

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions to call whenever the ranks have changed, such as one that sets the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have met again: calls reset() and what register_reset_callbacks() was given."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, and lets changes of the hosts interrupt the training. Call it on every rank after the same
        steps."""
        self._num_commits += 1
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt if ranks of an elastic job were lost or join, on all ranks at the same of these
        calls. Every rank makes as many."""
        if membership.end_step():
            raise HostsUpdatedInterrupt

    def newest_rank(self) -> int:
        """The rank that has committed most often, the first of several. A collective call. The others' counts become
        that one's."""
        counts = allgather_object(self._num_commits, name="elastic.commits")
        self._num_commits = max(counts)
        return counts.index(self._num_commits)

    def save(self) -> None:
        """Keeps a copy of the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what the last save() kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives the state of the rank that has committed most to all ranks. A collective call."""
        raise NotImplementedError

    def reset(self) -> None:
        """The ranks have changed."""


class ObjectState(State):
    """Attributes by name: ObjectState(hvd.broadcast_object, hvd.rank, epoch=0).epoch.

    What has state_dict() and load_state_dict(), as models, optimizers, schedulers and samplers do, is saved when it is
    set, and restored in place; the others are copied, and can be pickled."""

    _saved: dict[str, Any]

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        object.__setattr__(self, "_saved", dict.fromkeys(kwargs))
        super().__init__(bcast_object, get_rank)
        for name, value in kwargs.items():
            object.__setattr__(self, name, value)
        self.save()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in self._saved and _has_state(value):
            self._saved[name] = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Keeps deep copies of the attributes that it was given at first, or of their states."""
        for name in self._saved:
            value = getattr(self, name)
            self._saved[name] = copy.deepcopy(value.state_dict() if _has_state(value) else value)

    def restore(self) -> None:
        """Goes back to what the last save() kept."""
        for name, saved in self._saved.items():
            # Some load_state_dict() keep what they are given.
            value, kept = getattr(self, name), copy.deepcopy(saved)
            value.load_state_dict(kept) if _has_state(value) else object.__setattr__(self, name, kept)

    def sync(self) -> None:
        """Gives all values of the rank that has committed most to all ranks, and saves them. A collective call."""
        root_rank, plain = self.newest_rank(), {}
        for name in self._saved:
            value = getattr(self, name)
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank)
            else:
                plain[name] = value.state_dict() if _has_state(value) else value
        for name, found in (self._bcast_object(plain, root_rank) if plain else plain).items():
            value = getattr(self, name)
            value.load_state_dict(found) if _has_state(value) else object.__setattr__(self, name, found)
        self.save()

    def reset(self) -> None:
        """The ranks have changed: shares out anew what samplers have not processed."""
        for name in self._saved:
            if isinstance(sampler := getattr(self, name), ElasticSampler):
                sampler.reset()


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class TorchState(ObjectState):
    """TorchState(model, optimizer, sampler=sampler, epoch=0): each is an attribute."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        named = {"model": model, "optimizer": optimizer}
        kwargs.update({name: value for name, value in named.items() if value is not None})
        super().__init__(broadcast_object, rank, **kwargs)
