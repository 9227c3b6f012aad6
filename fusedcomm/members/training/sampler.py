"""Which samples a rank takes while ranks come and go."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from fusedcomm.members.members import Members
from fusedcomm.members.training.place import check_state


class MembersSampler(Sampler[list[int]]):
    """A batch sampler whose batches follow the members: each step takes the next samples, whoever is there.

    ::

        sampler = fusedcomm.MembersSampler(dataset, members, batch_size=16)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)   # num_workers=0

    All ranks together go through one stream of samples, epoch after epoch, each in an order of its own. A step takes
    one batch for each rank, or for each of ``Members(microbatches=…)``. No sample comes again, and none is left out but
    those of a rank that was lost. A rank that joins goes on where the others are. A batch is drawn when it is asked
    for, so workers of a DataLoader, which ask in advance, would draw for ranks that may be gone: use num_workers=0.

    Iterating ends when the next step would begin in another epoch; the next iteration goes on there. ``len()`` is the
    number of this rank's batches from here to that end, if the ranks stay.

    Args:
        dataset: with a length, equal on all ranks.
        batch_size: samples of a batch.
        shuffle: whether each epoch has a random order, by `seed`, equal on all ranks; else the dataset's.

    Raises:
        ValueError: the dataset is empty, or batch_size is not positive.
    """

    def __init__(
        self, dataset: Sized, members: Members, batch_size: int, *, shuffle: bool = True, seed: int = 0
    ) -> None:
        if len(dataset) == 0 or batch_size < 1:
            raise ValueError(f"fusedcomm.MembersSampler: {len(dataset)} samples in batches of {batch_size}")
        self._num_samples, self._members, self.batch_size = len(dataset), members, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._orders: dict[int, list[int]] = {}
        self._step, self._num_drawn = -1, 0

    @property
    def epoch(self) -> int:
        """The epoch in which the present step begins, from 0 on."""
        return self._members.num_microbatches * self.batch_size // self._num_samples

    def __len__(self) -> int:
        members = self._members
        num_left = (self.epoch + 1) * self._num_samples - members.num_microbatches * self.batch_size
        return -(-num_left // ((members.microbatches or members.size) * self.batch_size)) * members.portion[1]

    def state_dict(self) -> dict[str, int]:
        """The place in the data, for a checkpoint; equal on all ranks, and good for any number of them. Save it between
        steps."""
        return {"num_microbatches": self._members.num_microbatches, "epoch": self.epoch, **self._order()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where the state was saved. Load it on every rank, before the first step.

        Raises ValueError for the state of a sampler with other arguments, and for what is no state of one;
        RuntimeError as :meth:`Members.load_state_dict`.
        """
        check_state(state, {"num_microbatches", "epoch", *self._order()}, "MembersSampler")
        for name, value in self._order().items():
            if state[name] != value:
                raise ValueError(
                    f"fusedcomm.MembersSampler: the state was saved with {name}={state[name]!r}, and here it is "
                    f"{value!r}: use the same, or begin anew without the state"
                )
        self._members.go_on_at(self._members.step, state["num_microbatches"])

    def _order(self) -> dict[str, int]:
        """What the order of samples depends on."""
        return {
            "num_samples": self._num_samples,
            "batch_size": self.batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        while self.epoch == epoch:  # it changes between steps only
            yield self._draw()

    def _draw(self) -> list[int]:
        first, count = self._members.portion
        if self._step != self._members.step:
            self._step, self._num_drawn = self._members.step, 0
        if self._num_drawn == count:
            raise RuntimeError(
                f"fusedcomm.MembersSampler: this rank's part of step {self._step} is {count} batches, and another "
                "was asked for: end the step first, with a backward pass that synchronizes gradients. Workers of a "
                "DataLoader ask in advance: use num_workers=0"
            )
        begin = (self._members.num_microbatches + first + self._num_drawn) * self.batch_size
        self._num_drawn += 1
        return [self._at(place) for place in range(begin, begin + self.batch_size)]

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, self._num_samples)
        if not self._shuffle:
            return within
        if epoch not in self._orders:
            self._orders = {kept: order for kept, order in self._orders.items() if kept >= epoch - 1}
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._orders[epoch] = torch.randperm(self._num_samples, generator=generator).tolist()
        return self._orders[epoch][within]
