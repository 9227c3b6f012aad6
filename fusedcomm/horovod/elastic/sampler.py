"""A sampler whose epoch goes on where it was when the number of ranks changes."""

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

import fusedcomm.horovod.world as worlds


class ElasticSampler(Sampler):
    """Shares out the samples that this epoch has not processed yet.

    Call record_batch() after each step, set_epoch() at the *end* of an epoch (or before the first), and commit a state
    that holds the sampler. After a change of ranks the rest of the epoch is shared out anew: no committed sample comes
    again, and none is left out. Every rank gets as many: where their number cannot be divided, the last ranks repeat
    some.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: nothing of it is processed, and the order is another one."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Every rank has processed `batch_size` more samples of its own."""
        self.processed_num = min(self.processed_num + batch_size * self.num_replicas, len(self.dataset))

    def record_indices(self, indices: Any) -> None:
        """As record_batch(); only the number of indices counts."""
        self.record_batch(0, len(indices))

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its samples all ranks have processed."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continues where state_dict() was taken, perhaps with other ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        if worlds.world_if_any() is not None:  # else the ranks are about to meet again, and reset() follows
            self.reset()

    def reset(self) -> None:
        """Shares out what is not processed among the ranks that there are now."""
        found = worlds.world()
        self.num_replicas, self.rank = found.size, found.rank
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        indices = self.remaining_indices
        if indices:
            total = self.num_samples * self.num_replicas
            indices = (indices * math.ceil(total / len(indices)))[:total]
        return iter(indices[self.rank :: self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples
