"""Every collective, in each of its forms, gives exactly what its definition says."""

import pytest
import torch
from jobs import MOVED, REDUCED, SHAPES, all_values, job, values

import fusedcomm.horovod as hvd

SIZES = [2, 1, 3, 4]
SOME_SIZES = [1, 3, *(pytest.param(size, marks=pytest.mark.full) for size in (2, 4))]
FORMS = ["sync", "async", "in place", "async in place"]
OPS = {"Sum": hvd.Sum, "Average": hvd.Average, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}


def reduced(inputs: torch.Tensor, op: int) -> torch.Tensor:
    """What an allreduce of inputs[rank] gives. Averages of whole numbers are truncated."""
    if op == hvd.Sum:
        return inputs.sum(0).to(inputs.dtype)
    if op == hvd.Average:
        total = inputs.to(torch.float64).sum(0) / len(inputs)
        return (total if inputs.is_floating_point() else total.trunc()).to(inputs.dtype)
    if op == hvd.Product:
        return inputs.prod(0).to(inputs.dtype)
    return inputs.amin(0) if op == hvd.Min else inputs.amax(0)


def allreduce_in(form: str, tensor: torch.Tensor, **how) -> torch.Tensor:
    if form == "sync":
        return hvd.allreduce(tensor, **how)
    if form == "in place":
        return hvd.allreduce_(tensor, **how)
    start = hvd.allreduce_async if form == "async" else hvd.allreduce_async_
    return hvd.synchronize(start(tensor, **how))


def check_allreduces(rank, size, form, op):
    with job():
        for dtype in REDUCED:
            for shape in SHAPES:
                tensor = values(rank, shape, dtype)
                result = allreduce_in(form, tensor, op=OPS[op])
                expected = reduced(all_values(size, shape, dtype), OPS[op])
                if op == "Average" and dtype.is_floating_point:
                    torch.testing.assert_close(result, expected)
                else:
                    assert torch.equal(result, expected), f"{dtype} {shape}: {result} instead of {expected}"
                assert (result is tensor) == ("in place" in form)
                if "in place" not in form:
                    assert torch.equal(tensor, values(rank, shape, dtype)), "the input has changed"


@pytest.mark.sampled
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_an_allreduce_gives_the_reduction_of_all_ranks_values(ranks, form, op, size):
    ranks.run(check_allreduces, form, op, world_size=size)


def check_grouped_allreduces(rank, size, form):
    with job():
        tensors = [values(rank, shape, dtype, i) for i, (shape, dtype) in enumerate(zip(SHAPES, REDUCED, strict=True))]
        expected = [
            reduced(all_values(size, shape, dtype, i), hvd.Sum)
            for i, (shape, dtype) in enumerate(zip(SHAPES, REDUCED, strict=True))
        ]
        if form == "sync":
            results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        elif form == "in place":
            results = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
        else:
            start = hvd.grouped_allreduce_async if form == "async" else hvd.grouped_allreduce_async_
            results = hvd.synchronize(start(tensors, op=hvd.Sum))
        assert len(results) == len(tensors)
        for result, wanted, tensor in zip(results, expected, tensors, strict=True):
            assert torch.equal(result, wanted)
            assert (result is tensor) == ("in place" in form)


@pytest.mark.sampled
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_a_group_of_tensors_of_several_dtypes_is_reduced_as_one(ranks, form, size):
    ranks.run(check_grouped_allreduces, form, world_size=size)


def check_allgathers(rank, size):
    with job():
        for dtype in MOVED:
            for rest in [(), (3,), (2, 2)]:
                parts = [values(other, (2 * other + 1, *rest), dtype) for other in range(size)]
                expected = torch.cat(parts)
                assert torch.equal(hvd.allgather(parts[rank]), expected), dtype
                assert torch.equal(hvd.synchronize(hvd.allgather_async(parts[rank], name="x")), expected)
        nothing = [values(other, (0 if other % 2 else 3, 2)) for other in range(size)]
        assert torch.equal(hvd.allgather(nothing[rank]), torch.cat(nothing))
        group = [[values(other, (other + i, 2), salt=i) for i in range(1, 4)] for other in range(size)]
        for i, result in enumerate(hvd.grouped_allgather(group[rank])):
            assert torch.equal(result, torch.cat([theirs[i] for theirs in group]))


@pytest.mark.parametrize("size", SOME_SIZES)
def test_an_allgather_concatenates_in_rank_order_also_where_ranks_have_no_rows(ranks, size):
    ranks.run(check_allgathers, world_size=size)


def check_broadcasts(rank, size):
    with job():
        for root in range(size):
            for dtype in MOVED:
                expected = values(root, (3, 2), dtype)
                own = values(rank, (3, 2), dtype)
                assert torch.equal(hvd.broadcast(own, root), expected), dtype
                assert torch.equal(own, values(rank, (3, 2), dtype)), "the input has changed"
                assert hvd.broadcast_(own, root_rank=root) is own
                assert torch.equal(own, expected)
            handle = hvd.broadcast_async_(own := values(rank, ()), root, name="scalar")
            assert hvd.synchronize(handle) is own and torch.equal(own, values(root, ()))


@pytest.mark.parametrize("size", SOME_SIZES)
def test_a_broadcast_copies_any_ranks_tensor(ranks, size):
    ranks.run(check_broadcasts, world_size=size)


def rows_for(sender: int, receiver: int) -> int:
    return (sender + 2 * receiver) % 3


def check_alltoalls(rank, size):
    with job():
        for dtype in MOVED:
            for rest in [(), (3,)]:
                sent = [
                    values(other, (sum(rows_for(other, to) for to in range(size)), *rest), dtype)
                    for other in range(size)
                ]
                splits = [[rows_for(other, to) for to in range(size)] for other in range(size)]
                expected = torch.cat([sent[other].split(splits[other])[rank] for other in range(size)])
                for given in (splits[rank], torch.tensor(splits[rank], dtype=torch.int32)):
                    result, received = hvd.alltoall(sent[rank], given)
                    assert torch.equal(result, expected), dtype
                    assert received.dtype is torch.int32
                    assert received.tolist() == [rows_for(other, rank) for other in range(size)]
        even = hvd.alltoall(values(rank, (2 * size, 2)))
        assert torch.equal(
            even, torch.cat([values(other, (2 * size, 2))[2 * rank : 2 * rank + 2] for other in range(size)])
        )
        result, received = hvd.synchronize(hvd.alltoall_async(values(rank, (size,))))
        assert received.tolist() == [1] * size and result.shape == (size,)


@pytest.mark.parametrize("size", SOME_SIZES)
def test_an_alltoall_sends_each_rank_its_rows(ranks, size):
    ranks.run(check_alltoalls, world_size=size)


def share(rows: int, size: int, rank: int) -> slice:
    """Rows of a rank after a reducescatter: the first ranks get one more."""
    short, num_longer = divmod(rows, size)
    begin = rank * short + min(rank, num_longer)
    return slice(begin, begin + short + (rank < num_longer))


def check_reducescatters(rank, size):
    with job():
        for dtype in REDUCED:
            for shape in [(4 * size,), (4 * size + 1, 2), (1, 3), (2, 2, 2)]:
                expected = all_values(size, shape, dtype).sum(0).to(dtype)[share(shape[0], size, rank)]
                result = hvd.reducescatter(values(rank, shape, dtype), op=hvd.Sum)
                assert torch.equal(result, expected), f"{dtype} {shape}"
        same = torch.full((size, 2), -3.0)
        assert torch.equal(hvd.synchronize(hvd.reducescatter_async(same, name="x")), same[:1])
        group = hvd.grouped_reducescatter([values(rank, (size + i, 2), salt=i) for i in range(3)], op=hvd.Sum)
        for i, result in enumerate(group):
            assert torch.equal(result, all_values(size, (size + i, 2), salt=i).sum(0)[share(size + i, size, rank)])


@pytest.mark.parametrize("size", SOME_SIZES)
def test_a_reducescatter_gives_each_rank_its_rows_of_the_sum(ranks, size):
    ranks.run(check_reducescatters, world_size=size)


def check_scaled(rank, size):
    with job():
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
            own = values(rank, (7,), dtype)
            everyone = all_values(size, (7,), dtype)
            both = hvd.allreduce(own, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5)
            assert torch.equal(both, everyone.sum(0).to(dtype)), dtype
            pre = hvd.allreduce(own, op=hvd.Sum, prescale_factor=0.5)
            halves = everyone / 2 if dtype.is_floating_point else (everyone / 2).trunc()
            assert torch.equal(pre, halves.sum(0).to(dtype)), dtype
            post = hvd.allreduce(own, op=hvd.Average, postscale_factor=float(size))
            assert torch.equal(post, everyone.sum(0).to(dtype)), dtype
            rows = hvd.reducescatter(values(rank, (size,), dtype), op=hvd.Sum, postscale_factor=2.0)
            assert torch.equal(rows, 2 * all_values(size, (size,), dtype).sum(0).to(dtype)[rank : rank + 1])
            grouped = hvd.grouped_allreduce([own, own], op=hvd.Sum, prescale_factor=4.0)
            assert all(torch.equal(each, 4 * everyone.sum(0).to(dtype)) for each in grouped)


@pytest.mark.parametrize("size", [1, 4])
def test_factors_apply_before_and_after_the_sum_and_whole_numbers_are_truncated(ranks, size):
    ranks.run(check_scaled, world_size=size)


def check_compressed(rank, size):
    with job():
        own = values(rank, (9,))
        result = hvd.allreduce(own, op=hvd.Sum, compression=hvd.Compression.fp16)
        assert result.dtype is torch.float32 and torch.equal(result, all_values(size, (9,)).sum(0))
        several = hvd.grouped_allreduce([own, own.double()], op=hvd.Sum, compression=hvd.Compression.fp16)
        assert [each.dtype for each in several] == [torch.float32, torch.float64]


def test_a_compression_changes_how_tensors_travel_and_not_their_dtype(ranks):
    ranks.run(check_compressed, world_size=3)


def check_polls(rank, size):
    with job():
        handles = []
        for i in range(20):
            handles.append(hvd.allreduce_async(values(rank, (1000,), salt=i), op=hvd.Sum))
        hvd.synchronize(handles[-1])
        for handle in handles[:-1]:
            hvd.synchronize(handle)
        late = hvd.allreduce_async(values(rank, (3,)), name="late")
        while not hvd.poll(late):
            pass
        hvd.synchronize(late)
        assert hvd.synchronize(late) is None, "a handle is synchronized once"


def test_a_handle_can_be_polled_until_it_is_done_and_is_synchronized_once(ranks):
    ranks.run(check_polls, world_size=2)


def check_adasum(rank, size):
    with job():
        # Orthogonal steps are added; equal ones are averaged.
        orthogonal = torch.zeros(size)
        orthogonal[rank] = float(rank + 1)
        added = hvd.allreduce(orthogonal, op=hvd.Adasum)
        torch.testing.assert_close(added, torch.arange(1.0, size + 1))
        same = torch.tensor([3.0, -4.0])
        torch.testing.assert_close(hvd.allreduce(same, op=hvd.Adasum), same)


@pytest.mark.parametrize("size", [1, 4])
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_equal(ranks, size):
    ranks.run(check_adasum, world_size=size)
