"""States that elastic training saves in memory, restores after a lost rank, and gives to new workers."""

import copy
from collections.abc import Callable
from typing import Any

import torch

import fusedcomm.horovod.elastic.files as files
import fusedcomm.horovod.membership as membership
import fusedcomm.horovod.world as worlds
from fusedcomm.horovod.elastic.handlers import StateHandler, handlers_of
from fusedcomm.horovod.errors import HostsUpdatedInterrupt
from fusedcomm.horovod.objects import allgather_object, broadcast_object
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
        self._write_file()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt if ranks of an elastic job were lost or join, on all ranks at the same of these
        calls. Every rank makes as many."""
        if membership.end_step():
            raise HostsUpdatedInterrupt(skip_sync=False)

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

    def saved(self) -> Any:
        """The content of the commit's file; None: no file."""
        return None

    def load_saved(self, saved: Any) -> None:
        """Makes what saved() has returned in an earlier process the saved state, and restores it."""

    def _write_file(self) -> None:
        if (path := files.path()) is not None and worlds.world().local_rank == 0:
            saved = self.saved()
            if saved is not None:
                files.write(path, {"num_commits": self._num_commits, "saved": saved})

    def read_file(self) -> None:
        """Continues from the file of an earlier process of this job, if this one has not committed yet."""
        if self._num_commits == 0 and (found := files.read()) is not None:
            self.load_saved(found["saved"])
            self._num_commits = found["num_commits"]


class ObjectState(State):
    """Attributes by name: ObjectState(hvd.broadcast_object, hvd.rank, epoch=0).epoch. Those that have a handler, as
    models, optimizers and samplers do, are saved when they are set; the others can be pickled."""

    _handlers: dict[str, StateHandler]

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        object.__setattr__(self, "_handlers", handlers_of(kwargs))
        super().__init__(bcast_object, get_rank)
        self._saved_state = {name: value for name, value in kwargs.items() if name not in self._handlers}
        for name, value in kwargs.items():
            object.__setattr__(self, name, value)
        self._save_attributes()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in self._handlers:
            self._handlers[name].set_value(value)

    def save(self) -> None:
        """Keeps copies of the handlers' values, and deep ones of the other attributes that it was given at first."""
        for handler in self._handlers.values():
            handler.save()
        self._save_attributes()

    def _save_attributes(self) -> None:
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Goes back to what the last save() kept, in place where a value has a handler."""
        for handler in self._handlers.values():
            handler.restore()
        self._restore_attributes()

    def _restore_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Gives all values of the rank that has committed most to all ranks, and saves them. A collective call."""
        root_rank = self.newest_rank()
        for handler in self._handlers.values():
            handler.root_rank = root_rank
            handler.sync()
        if self._saved_state:
            self._save_attributes()
            self._saved_state = self._bcast_object(self._saved_state, root_rank)
            self._restore_attributes()

    def reset(self) -> None:
        """The ranks have changed: tells the handlers."""
        for handler in self._handlers.values():
            handler.reset()

    def saved(self) -> Any:
        """The copies that the last save() kept: {"handlers": by name, "plain": by name}."""
        return {"handlers": {name: each.saved for name, each in self._handlers.items()}, "plain": self._saved_state}

    def load_saved(self, saved: Any) -> None:
        """Takes over what saved() has returned, but for handlers that this state lacks, and restores it."""
        for name, handler in self._handlers.items():
            if name in saved["handlers"]:
                handler.saved = saved["handlers"][name]
        self._saved_state.update(saved["plain"])
        self.restore()


class TorchState(ObjectState):
    """TorchState(model, optimizer, sampler=sampler, epoch=0): each is an attribute."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        named = {"model": model, "optimizer": optimizer}
        kwargs.update({name: value for name, value in named.items() if value is not None})
        super().__init__(broadcast_object, rank, **kwargs)
