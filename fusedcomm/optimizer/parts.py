"""Who owns which elements of the parameters, and how their gradients lie in rows, one for each rank.

A unit is what one reduce-scatter and one all-gather carry. Its rows have classes of elements, those of one wire of the
gradients and one of the updates, one after another. A parameter's elements have the order of its memory.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Sequence

import torch

from fusedcomm.session.checksums import is_dense

ELEMENTWISE = (
    *("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "Lion", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    "SignSGD",
)
"""Optimizers, by the name of their class, that treat each element by itself. Others own whole parameters."""
_REFUSED = {
    "LBFGS": "reads all parameters at once, and calls a closure",
    "SparseAdam": "needs sparse gradients",
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A parameter. `wire` and `update_wire` are the numbers of its wires; `whole`: one rank owns all of it. `layout`:
    without memory, with the shape and the strides that it had at first, which make the order of its elements."""

    name: str
    tensor: torch.Tensor
    wire: int
    update_wire: int
    whole: bool
    layout: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", torch.empty_like(self.tensor, device="meta"))

    @property
    def kind(self) -> tuple[int, int]:
        """The class of its elements."""
        return self.wire, self.update_wire

    @property
    def cost(self) -> int:
        """Estimated cost of its step, in arbitrary units: numel, for a matrix × its smaller side (Newton–Schulz)."""
        sides = self.tensor.shape
        return self.tensor.numel() * (min(sides) if len(sides) == 2 else 1)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Elements begin to end of parameter `target`, an index, at `offset` in the row of rank `owner`."""

    target: int
    begin: int
    end: int
    owner: int
    offset: int


@dataclasses.dataclass
class Unit:
    """Pieces of parameters that are exchanged together. `classes`: (wire, update's wire, elements in a row). `last`:
    the bucket of the reducer with which it is complete. `padding`: elements of all rows that are no parameter's."""

    dtype: torch.dtype
    last: int
    pieces: list[Piece]
    classes: list[tuple[int, int, int]]
    padding: int

    @property
    def row_numel(self) -> int:
        """Elements of a row."""
        return sum(numel for _, _, numel in self.classes)

    @property
    def targets(self) -> list[int]:
        """The parameters, each once."""
        return list(dict.fromkeys(piece.target for piece in self.pieces))


def is_whole(kind: type[torch.optim.Optimizer], whole: bool | None) -> bool:
    """Whether a rank owns whole parameters with this optimizer. whole: what the user says. Raises ValueError."""
    why = next((_REFUSED[each.__name__] for each in kind.__mro__ if each.__name__ in _REFUSED), None)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if why is None and closure is not None and closure.default is inspect.Parameter.empty:
        why = "calls a closure, which is a pass of its own"
    if why is not None:
        raise ValueError(f"fusedcomm: {kind.__name__} {why}: use it without a ShardedOptimizer")
    return kind.__name__ not in ELEMENTWISE if whole is None else whole


def units(buckets: Sequence[Sequence[int]], targets: Sequence[Target], num_ranks: int, cap: int) -> list[Unit]:
    """Cuts units.

    Args:
        buckets: indices of targets, in the order in which their gradients come.
        cap: most bytes of gradients of a unit of several matrices of one shape for each rank.
    """
    found: list[Unit] = []
    waiting: list[tuple[int, int]] = []  # (bucket, target) of those that one rank owns
    for bucket, members in enumerate(buckets):
        apart = [i for i in members if not targets[i].whole]
        waiting += [(bucket, i) for i in members if targets[i].whole]
        if apart:
            found.append(_cut(bucket, apart, targets, num_ranks))
    found += _whole_units(waiting, targets, num_ranks, cap)
    return sorted(found, key=lambda unit: unit.last)


def _cut(last: int, members: list[int], targets: Sequence[Target], num_ranks: int) -> Unit:
    """A unit in which each rank owns as many elements as any other, wherever they begin."""
    pieces, classes, padding, base = [], [], 0, 0
    for kind in dict.fromkeys(targets[i].kind for i in members):
        of_kind = [i for i in members if targets[i].kind == kind]
        total = sum(targets[i].tensor.numel() for i in of_kind)
        numel = -(-total // num_ranks)
        at = 0
        for i in of_kind:
            begin, end = 0, targets[i].tensor.numel()
            while begin < end:
                owner, offset = divmod(at, numel)
                until = min(end, begin + numel - offset)
                pieces.append(Piece(i, begin, until, owner, base + offset))
                at += until - begin
                begin = until
        classes.append((*kind, numel))
        padding += num_ranks * numel - total
        base += numel
    return Unit(targets[members[0]].tensor.dtype, last, pieces, classes, padding)


def _whole_units(waiting: list[tuple[int, int]], targets: Sequence[Target], num_ranks: int, cap: int) -> list[Unit]:
    """Units in which each rank owns whole parameters: as many of one shape each, so that nothing is padded and the work
    is even; what is left over by its size."""
    alike: dict[tuple, list[tuple[int, int]]] = {}
    for bucket, i in waiting:
        key = targets[i].tensor.dtype, targets[i].kind, tuple(targets[i].tensor.shape)
        alike.setdefault(key, []).append((bucket, i))
    sets, rest = [], []
    for found in alike.values():
        even = len(found) // num_ranks * num_ranks
        sets += [found[begin : begin + num_ranks] for begin in range(0, even, num_ranks)]
        rest += found[even:]
    sets.sort(key=lambda each: max(each))
    rows: list[tuple[torch.dtype, list[list[tuple[int, int]]]]] = []  # of each unit, what each rank owns
    for each in sets:
        dtype = targets[each[0][1]].tensor.dtype
        nbytes = sum(targets[i].tensor.nbytes for _, i in each)
        is_full = not rows or rows[-1][0] != dtype or _nbytes(rows[-1][1], targets) + nbytes > cap
        if is_full:
            rows.append((dtype, [[] for _ in range(num_ranks)]))
        for owned, member in zip(rows[-1][1], each, strict=True):
            owned.append(member)
    for dtype in dict.fromkeys(targets[i].tensor.dtype for _, i in rest):
        of_dtype = [member for member in rest if targets[member[1]].tensor.dtype == dtype]
        rows.append((dtype, _balanced(of_dtype, targets, num_ranks)))
    return [_of_rows(dtype, owned, targets) for dtype, owned in rows]


def _nbytes(rows: list[list[tuple[int, int]]], targets: Sequence[Target]) -> int:
    return sum(targets[i].tensor.nbytes for owned in rows for _, i in owned)


def _balanced(members: list[tuple[int, int]], targets: Sequence[Target], num_ranks: int) -> list[list[tuple[int, int]]]:
    """The greatest first, each to the rank that has least: of elements, because a row is as long as the longest, and of
    work where these are equal."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    loads = [(0, 0)] * num_ranks
    for member in sorted(members, key=lambda each: (-targets[each[1]].tensor.numel(), each)):
        rank = min(range(num_ranks), key=lambda each: loads[each])
        rows[rank].append(member)
        target = targets[member[1]]
        loads[rank] = loads[rank][0] + target.tensor.numel(), loads[rank][1] + target.cost
    return rows


def _of_rows(dtype: torch.dtype, rows: list[list[tuple[int, int]]], targets: Sequence[Target]) -> Unit:
    kinds = list(dict.fromkeys(targets[i].kind for owned in rows for _, i in owned))
    pieces, classes, base = [], [], 0
    for kind in kinds:
        longest = 0
        for owner, owned in enumerate(rows):
            offset = 0
            for _, i in owned:
                if targets[i].kind != kind:
                    continue
                numel = targets[i].tensor.numel()
                pieces.append(Piece(i, 0, numel, owner, base + offset))
                offset += numel
            longest = max(longest, offset)
        classes.append((*kind, longest))
        base += longest
    last = max(bucket for owned in rows for bucket, _ in owned)
    used = sum(piece.end - piece.begin for piece in pieces)
    return Unit(dtype, last, pieces, classes, len(rows) * base - used)


def index_by_id(targets: Sequence[Target]) -> dict[int, int]:
    """The index of each target by the id of its tensor."""
    return {id(target.tensor): i for i, target in enumerate(targets)}


def laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor`, which has the shape of `like`, or a copy of it that lies in memory as `like` does."""
    sides = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if all(size == 1 or stride == other for size, stride, other in sides):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of `flat`, which has the elements of `like` in the order of its memory, with its shape."""
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def refuse(targets: Iterable[Target], is_sparse: Callable[[torch.Tensor], bool]) -> None:
    """Raises ValueError, with the name, for a parameter that no owner can step."""
    device: tuple[str, torch.device] | None = None
    for target in targets:
        tensor = target.tensor
        if is_sparse(tensor):
            raise ValueError(f"fusedcomm: {target.name} has sparse gradients: a ShardedOptimizer takes dense ones")
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"fusedcomm: {target.name} is {tensor.dtype}: use float32, bfloat16 or float16")
        if device is not None and tensor.device != device[1]:
            raise ValueError(f"fusedcomm: {target.name} is on {tensor.device} and {device[0]} on {device[1]}: use one")
        if tensor.numel() != math.prod(tensor.shape) or not is_dense(tensor):
            raise ValueError(f"fusedcomm: {target.name} has gaps in memory: make it contiguous")
        device = device or (target.name, tensor.device)
