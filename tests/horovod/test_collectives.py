"""Every collective, in each of its forms and over process sets, gives exactly what its definition says, and so do
derivatives."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from jobs import MOVED, REDUCED, job, reduced, values
from sampling import few

import fusedcomm.horovod as hvd
from fusedcomm.horovod import operations
from fusedcomm.horovod import sparse as sparse_ops

Shape = tuple[int, ...]
FORMS = ["", "_async", "_", "_async_"]
"""Endings of a function's name. The last two work in place."""
SHAPES: list[Shape] = [(1,), (), (17,), (5, 3), (2, 3, 4), (0, 3)]


class Collective(NamedTuple):
    """A function of hvd with some arguments. Members of a process set are counted from 0.

    Attributes:
        how: the arguments of member `me` of a set of `ranks`.
        shapes: of the tensors that member `me` of `size` gives.
        result: of member `me`, from every member's tensor.
        gradient: that of member `me`'s tensor, from the gradients that the members' results have. None: there is none
            to be tested.
    """

    name: str
    forms: list[str]
    dtypes: list[torch.dtype]
    how: Callable[[list[int], int], dict]
    shapes: Callable[[int, int], list[Shape]]
    result: Callable[[list[torch.Tensor], int], torch.Tensor]
    gradient: Callable[[list[torch.Tensor], int], torch.Tensor] | None


def allreduce(op: int, before: float = 1.0, after: float = 1.0) -> Collective:
    derived = (lambda grads, me: reduced(grads, op, before * after)) if op in (hvd.Sum, hvd.Average) else None
    return Collective(
        "allreduce",
        FORMS,
        REDUCED,
        lambda ranks, me: dict(op=op, prescale_factor=before, postscale_factor=after),
        lambda me, size: SHAPES,
        lambda tensors, me: reduced(tensors, op, before, after),
        derived,
    )


def rows_of(tensor: torch.Tensor, size: int, me: int) -> torch.Tensor:
    """Rows of a member after a reducescatter: the first members get one more."""
    short, num_longer = divmod(tensor.shape[0], size)
    begin = me * short + min(me, num_longer)
    return tensor[begin : begin + short + (me < num_longer)]


def reducescatter(op: int, before: float = 1.0, after: float = 1.0) -> Collective:
    return Collective(
        "reducescatter",
        FORMS[:2],
        REDUCED,
        lambda ranks, me: dict(op=op, prescale_factor=before, postscale_factor=after),
        lambda me, size: [(4 * size,), (4 * size + 1, 2), (1, 3), (2, 2, 2)],
        lambda tensors, me: rows_of(reduced(tensors, op, before, after), len(tensors), me),
        lambda grads, me: torch.cat(grads) * (before * after * (len(grads) if op == hvd.Sum else 1)),
    )


def allgather() -> Collective:
    def rows(member: int) -> int:
        return 0 if member == 1 else member + 2

    return Collective(
        "allgather",
        FORMS[:2],
        MOVED,
        lambda ranks, me: {},
        lambda me, size: [(rows(me),), (rows(me), 3), (rows(me), 2, 2)],
        lambda tensors, me: torch.cat(tensors),
        lambda grads, me: reduced(grads, hvd.Average).split([rows(each) for each in range(len(grads))])[me],
    )


def broadcast(root: int) -> Collective:
    """root: a member; modulo the size."""

    def gradient(grads: list[torch.Tensor], me: int) -> torch.Tensor:
        return reduced(grads, hvd.Average) * (me == root % len(grads))

    return Collective(
        "broadcast",
        FORMS,
        MOVED,
        lambda ranks, me: dict(root_rank=ranks[root % len(ranks)]),
        lambda me, size: SHAPES,
        lambda tensors, me: tensors[root % len(tensors)],
        gradient,
    )


def splits_of(me: int, size: int, is_even: bool) -> list[int]:
    return [2] * size if is_even else [(me + 2 * to) % 3 for to in range(size)]


def alltoall(as_given: Callable[[list[int]], object]) -> Collective:
    """as_given: what is passed for a member's splits. None: as many rows for each."""
    is_even = as_given([1]) is None
    num_kept = 0 if is_even else 2  # rows that are not sent

    def result(tensors: list[torch.Tensor], me: int) -> torch.Tensor:
        size = len(tensors)
        return torch.cat([each.split([*splits_of(i, size, is_even), num_kept])[me] for i, each in enumerate(tensors)])

    def gradient(grads: list[torch.Tensor], me: int) -> torch.Tensor:
        size = len(grads)
        back = [each.split([splits_of(i, size, is_even)[to] for i in range(size)])[me] for to, each in enumerate(grads)]
        return torch.cat([*back, grads[me].new_zeros(num_kept, *grads[me].shape[1:])])

    return Collective(
        "alltoall",
        FORMS[:2],
        MOVED,
        lambda ranks, me: dict(splits=as_given(splits_of(me, len(ranks), is_even))),
        lambda me, size: [(sum(splits_of(me, size, is_even)) + num_kept, *rest) for rest in [(), (3,)]],
        result,
        gradient,
    )


COLLECTIVES = [
    *(allreduce(op) for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product)),
    *(allreduce(hvd.Sum, *factors) for factors in [(2.0, 0.5), (0.5, 1.0), (1.0, -4.0)]),
    allreduce(hvd.Average, after=8.0),
    *(reducescatter(op, *factors) for op in (hvd.Sum, hvd.Average) for factors in [(1.0, 1.0), (2.0, -0.5)]),
    allgather(),
    *(broadcast(root) for root in range(3)),
    *(alltoall(given) for given in (list, lambda splits: torch.tensor(splits, dtype=torch.int32), lambda splits: None)),
]
GROUPED = ("allreduce", "allgather", "reducescatter")


class Members:
    """The ranks of a process set, this one's place among them, and what they do with a collective."""

    def __init__(self, process_set: hvd.ProcessSet, collective: Collective) -> None:
        self.process_set, self.ranks, self.me = process_set, process_set.ranks, process_set.rank()
        self.collective, self.how = collective, collective.how(process_set.ranks, process_set.rank())

    def numbers(self, shapes: list[Shape], dtype: torch.dtype, salt: int) -> list[torch.Tensor]:
        """Every member's. Averages of floats are whole numbers, too."""
        found = [values(rank, shape, dtype, salt) for rank, shape in zip(self.ranks, shapes, strict=True)]
        is_exact = not dtype.is_floating_point or self.how.get("op") == hvd.Product
        return found if is_exact else [each * len(found) for each in found]

    def inputs(self, dtype: torch.dtype, number: int) -> list[torch.Tensor]:
        """Every member's tensor of that number."""
        size = len(self.ranks)
        return self.numbers([self.collective.shapes(each, size)[number] for each in range(size)], dtype, number)

    def call(self, form: str, given: object, is_group: bool = False) -> object:
        function = getattr(hvd, ("grouped_" if is_group else "") + self.collective.name + form)
        found = function(given, **self.how, process_set=self.process_set)
        return hvd.synchronize(found) if "async" in form else found

    def check_single(self, form: str, dtype: torch.dtype, number: int) -> None:
        every = self.inputs(dtype, number)
        own, wanted = every[self.me].clone(), self.collective.result(every, self.me)
        version = own._version
        found = self.call(form, own)
        if isinstance(found, tuple):  # of an alltoall
            found, received = found
            splits = [splits_of(each, len(every), self.how["splits"] is None) for each in range(len(every))]
            assert received.dtype is torch.int32 and received.tolist() == [each[self.me] for each in splits]
        assert found.dtype == dtype and torch.equal(found, wanted), f"{found} instead of {wanted}"
        is_in_place = form.endswith("_")
        assert (found is own) == is_in_place == (own._version > version), "autograd must see a change"
        assert is_in_place or torch.equal(own, every[self.me]), "the input has changed"

    def check_group(self, form: str) -> None:
        """A group has several dtypes."""
        numbers = range(len(self.collective.shapes(0, 1)))
        dtypes = list(itertools.islice(itertools.cycle(self.collective.dtypes), len(numbers)))
        every = [self.inputs(dtype, number) for dtype, number in zip(dtypes, numbers, strict=True)]
        own = [tensors[self.me].clone() for tensors in every]
        results = self.call(form, own, is_group=True)
        assert isinstance(results, list)
        for found, tensors, given in zip(results, every, own, strict=True):
            assert torch.equal(found, self.collective.result(tensors, self.me))
            assert (found is given) == form.endswith("_")

    def check_gradient(self, is_group: bool, dtype: torch.dtype, number: int) -> None:
        every = self.inputs(dtype, number)
        shapes = [self.collective.result(every, each).shape for each in range(len(every))]
        grads = self.numbers(shapes, dtype, salt=4)
        own = every[self.me].clone().requires_grad_()
        found = self.call("", [own, own] if is_group else own, is_group)
        assert isinstance(found, list) == is_group
        outputs = [found[0]] if isinstance(found, tuple) else found if is_group else [found]
        torch.autograd.backward(outputs, [grads[self.me]] * len(outputs))
        wanted = self.collective.gradient(grads, self.me).to(dtype) * len(outputs)
        assert torch.equal(own.grad, wanted), f"{own.grad} instead of {wanted}"

    def cases(self) -> Iterator[tuple]:
        """(check, its arguments)."""
        dtypes, numbers = self.collective.dtypes, range(len(self.collective.shapes(0, 1)))
        yield from ((self.check_single, *case) for case in in_turn(self.collective.forms, dtypes, numbers))
        is_grouped = self.collective.name in GROUPED
        if is_grouped:
            yield from ((self.check_group, form) for form in self.collective.forms)
        if self.collective.gradient is not None:
            floats = [dtype for dtype in dtypes if dtype.is_floating_point]
            yield from ((self.check_gradient, *case) for case in in_turn([False, is_grouped], floats, numbers))


def in_turn(*lists: Sequence) -> Iterator[tuple]:
    """Every entry of every list, the longest list's twice. A result depends on each of them, and not on a pair."""
    longest = max(map(len, lists))
    for i in range(2 * longest):
        yield tuple(entries[(i + shift * (i // longest)) % len(entries)] for shift, entries in enumerate(lists))


def check_all(rank: int, size: int) -> dict[str, str]:
    """What is wrong, by case."""
    sets = [] if size < 3 else [hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))]
    wrong = {}
    with job(process_sets=sets):
        for process_set in [hvd.global_process_set, *(each for each in sets if each.included())]:
            for collective in COLLECTIVES:
                members = Members(process_set, collective)
                for check, *args in members.cases():
                    try:
                        check(*args)
                    except AssertionError as error:
                        where = f"{check.__name__}{tuple(args)} of {collective.name}, {members.how}, {process_set}"
                        wrong[where] = str(error)
    return wrong


@pytest.mark.parametrize("size", few([1, 2, 3, 4], 1, 3))
def test_a_collective_and_its_derivative_give_what_their_definitions_say(ranks, size):
    assert ranks.run(check_all, world_size=size) == [{}] * size


def check_handles(rank, size):
    with job():
        handles = [hvd.allreduce_async(values(rank, (1000,), salt=i), op=hvd.Sum) for i in range(20)]
        for i in (19, *range(19)):
            expected = sum(values(other, (1000,), salt=i) for other in range(size))
            assert torch.equal(hvd.synchronize(handles[i]), expected)
        late = hvd.allreduce_async(values(rank, (3,)), name="late")
        while not hvd.poll(late):
            pass
        hvd.synchronize(late)
        assert hvd.synchronize(late) is None, "a handle is synchronized once"
        with torch.no_grad():
            weight = torch.nn.Parameter(values(rank, (3,)))
            assert not hvd.allreduce(weight, op=hvd.Sum).requires_grad
            assert hvd.broadcast_(weight, 0) is weight


def test_handles_end_in_any_order_and_can_be_polled(ranks):
    ranks.run(check_handles, world_size=2)


# ---- sparse tensors


def sparse(rank: int, salt: int = 0) -> torch.Tensor:
    """Rows of a table of 10 × 3, one of them twice, on each rank others; none at all on rank 2."""
    rows = [] if rank == 2 else [(rank + i * i + salt) % 10 for i in range(4)] + [(rank + salt) % 10]
    return torch.sparse_coo_tensor(torch.tensor([rows]).long(), values(rank, (len(rows), 3), salt=salt), (10, 3))


def check_sparse(rank, size):
    with job():
        waits = [hvd.sparse_allreduce_async(sparse(rank, salt), f"t{salt}", hvd.Sum) for salt in range(5)]
        waits.append(hvd.sparse_allreduce_async(sparse(rank) * size, op=hvd.Average))
        for salt, wait in zip((0, 1, 2, 3, 4, 0), waits, strict=True):
            result = wait()
            assert result.is_sparse and result.is_coalesced()
            assert torch.equal(result.to_dense(), sum(sparse(other, salt).to_dense() for other in range(size)))
        some = hvd.sparse_allreduce_async(torch.eye(4).to_sparse() * (rank + 1), "matrix", hvd.Sum)()
        assert torch.equal(some.to_dense(), torch.eye(4) * (size * (size + 1) // 2))


@pytest.mark.parametrize("size", [1, 4])
def test_sparse_tensors_are_summed_whatever_indices_the_ranks_have(ranks, size):
    ranks.run(check_sparse, world_size=size)


def check_coalesced(rank, size):
    gathered = []

    def begin(call):
        gathered.extend(tensor.shape[0] for tensor in call.given)
        return operations.begin(call)

    with job(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_ops, "begin", begin)
        own = torch.sparse_coo_tensor(torch.tensor([[3] * 1000]), torch.ones(1000, 2), (10, 2))
        result = hvd.sparse_allreduce_async(own, "x", hvd.Sum)()
        assert gathered == [1, 1] and torch.equal(result.to_dense()[3], torch.full((2,), 1000.0 * size))


def test_an_index_travels_once_from_each_rank(ranks):
    ranks.run(check_coalesced, world_size=2)
