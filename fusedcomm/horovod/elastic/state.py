"""States that elastic training saves in memory, restores after a lost rank, and gives to new workers."""

import copy
from collections.abc import Callable
from typing import Any

import fusedcomm.horovod.elastic.files as files
import fusedcomm.horovod.rendezvous as rendezvous
import fusedcomm.horovod.world as worlds
from fusedcomm.horovod.errors import HostsUpdatedInterrupt
from fusedcomm.horovod.objects import allgather_object


class State:
    """The state that elastic.run() works with. Subclasses give save(), restore(), sync() and reset()."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], None]] = []
        self._updates: list[tuple[int, bool]] = []  # (generation or timestamp, whether hosts were only removed)
        self._last_update = 0
        self._num_commits = 0

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Functions to call whenever the ranks have changed, such as one that sets the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The ranks have met again: calls reset() and what register_reset_callbacks() was given."""
        self._updates.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """The hosts have changed. update_res: 1 if hosts were only removed; other values: some were added."""
        self._updates.append((timestamp, update_res == 1))

    def commit(self) -> None:
        """Saves the state, and lets changes of the hosts interrupt the training. Call it on every rank after the same
        steps."""
        self._num_commits += 1
        self.save()
        self._write_file()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks together if rank 0 knows of a change. A collective call if the job
        is elastic."""
        if not worlds.world().settings.elastic:
            return
        if self._rank() == 0 and (update := rendezvous.update()) is not None:
            self._updates.append(update)
        newer = [(when, removed) for when, removed in self._updates if when > self._last_update]
        self._updates.clear()
        last = max((when for when, _ in newer), default=self._last_update)
        previous, last, only_removed = self._bcast_object((self._last_update, last, all(each for _, each in newer)))
        self._last_update = last
        if last > previous:
            raise HostsUpdatedInterrupt(only_removed)

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
    """Attributes that can be pickled: ObjectState(hvd.broadcast_object, hvd.rank, epoch=0).epoch."""

    def __init__(self, bcast_object: Callable[..., Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self.save()

    def save(self) -> None:
        """Keeps deep copies of the attributes that it was given at first."""
        self._saved_state = {name: copy.deepcopy(getattr(self, name)) for name in self._saved_state}

    def restore(self) -> None:
        """Sets the attributes to copies of what the last save() kept."""
        for name, value in self._saved_state.items():
            setattr(self, name, copy.deepcopy(value))

    def sync(self) -> None:
        """Gives the attributes of the rank that has committed most to all ranks. A collective call."""
        self.sync_attributes(self.newest_rank())

    def sync_attributes(self, root_rank: int) -> None:
        """Gives the attributes of `root_rank` to all ranks, and saves them. A collective call."""
        if self._saved_state:
            ObjectState.save(self)  # not a subclass's, which saves more
            self._saved_state = self._bcast_object(self._saved_state, root_rank)
            ObjectState.restore(self)

    def saved(self) -> Any:
        """The kept attributes by name."""
        return self._saved_state

    def load_saved(self, saved: Any) -> None:
        """Takes over the attributes that saved() has returned, and restores them."""
        self._saved_state.update(saved)
        self.restore()
