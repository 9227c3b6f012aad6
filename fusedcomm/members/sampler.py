"""Which samples a rank takes while ranks come and go."""

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from fusedcomm.members.members import Members


class MembersSampler(Sampler[list[int]]):
    """A batch sampler whose batches follow the members: each step takes the next samples, whoever is there.

    ::

        sampler = fusedcomm.MembersSampler(dataset, members, batch_size=16)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)   # num_workers=0

    All ranks together go through one stream of samples, epoch after epoch, each in an order of its own. A step takes
    one batch for each rank, or for each of ``Members(microbatches=…)``. No sample comes again, and none is left out but
    those of a rank that was lost. A rank that joins goes on where the others are. A batch is drawn when it is asked
    for, so workers of a DataLoader, which ask in advance, would draw for ranks that may be gone: use num_workers=0.

    Iterating ends when the next step would begin in another epoch; the next iteration goes on there.

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
            raise ValueError(
                f"fusedcomm.MembersSampler: {len(dataset)} samples in batches of {batch_size} are not possible: use at "
                "least one of each"
            )
        self._num_samples, self._members, self.batch_size = len(dataset), members, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._orders: dict[int, list[int]] = {}
        self._step, self._num_drawn = -1, 0

    @property
    def epoch(self) -> int:
        """The epoch in which the present step begins, from 0 on."""
        return self._members.num_microbatches * self.batch_size // self._num_samples

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
                "was asked for: end the step first, with a backward pass that synchronizes gradients"
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
