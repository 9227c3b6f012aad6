"""Buckets whose kernels are measured: where their elements lie."""

import dataclasses
import itertools

import torch
from codec import BLOCK, WHOLE

from fusedcomm.native import _C


@dataclasses.dataclass(frozen=True)
class Shape:
    """The elements of a bucket that are sent lossily and those that are sent exactly: (offset, numel) in elements. The
    offset of a hole is _C.HOLE."""

    lossy: list[tuple[int, int]]
    exact: list[tuple[int, int]]

    @property
    def numel(self) -> int:
        """Elements of the gradients, which lie one after another in memory."""
        return sum(numel for at, numel in (*self.lossy, *self.exact) if at != _C.HOLE)

    @property
    def lossy_numel(self) -> int:
        return sum(numel for _, numel in self.lossy)

    @property
    def exact_numel(self) -> int:
        return sum(numel for _, numel in self.exact)

    def layout(self, wire: str) -> "_C.BucketLayout":
        return _C.bucket_layout(wire, BLOCK, 1, self.exact_numel, self.lossy_numel, WHOLE)

    def views(self, grads: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The slices of both lists, zeros for their holes."""

        def of(slices: list[tuple[int, int]]) -> list[torch.Tensor]:
            return [grads.new_zeros(n) if at == _C.HOLE else grads[at : at + n] for at, n in slices]

        return of(self.lossy), of(self.exact)


def flat_shape(numel: int) -> Shape:
    return Shape([(0, numel)], [])


def ragged_shape(numel: int, num_tensors: int, seed: int = 0) -> Shape:
    """A DDP bucket: weights of uneven sizes, each followed by a small exempt tensor, end to end and thus unaligned."""
    generator = torch.Generator().manual_seed(seed)
    num_small = num_tensors // 2
    small = torch.randint(1, min(4096, numel // (8 * num_tensors)) + 2, (num_small,), generator=generator)
    num_large = num_tensors - num_small
    share = torch.randn(num_large, generator=generator).double().exp()
    spare = numel - int(small.sum()) - num_large
    large = 1 + (share / share.sum() * spare).floor().long()
    large[-1] += numel - int(small.sum()) - int(large.sum())
    numels = [n.item() for pair in itertools.zip_longest(large, small) for n in pair if n is not None]
    places = list(zip(itertools.accumulate(numels, initial=0), numels, strict=False))
    return Shape(_C.with_holes(places[0::2], 4), _C.with_holes(places[1::2], 4))
