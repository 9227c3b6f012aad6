"""Derivatives of the collectives."""

import pytest
import torch
from jobs import all_values, job, values

import fusedcomm.horovod as hvd

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def derivative(function, *inputs):
    """Gradients of the inputs, with this rank's gradient of the result given by `function`'s second value."""
    for each in inputs:
        each.requires_grad_()
    output, grad = function(*inputs)
    outputs = output if isinstance(output, (list, tuple)) else [output]
    grads = grad if isinstance(grad, list) else [grad]
    torch.autograd.backward(outputs, grads)
    return [each.grad for each in inputs]


def check_allreduce(rank, size):
    with job():
        for dtype in DTYPES:
            own, grad = values(rank, (3, 2), dtype), values(rank, (3, 2), dtype, salt=4)
            total = all_values(size, (3, 2), dtype, salt=4).sum(0)
            (got,) = derivative(lambda x, grad=grad: (hvd.allreduce(x, op=hvd.Sum), grad), own)
            assert torch.equal(got, total.to(dtype))
            (got,) = derivative(
                lambda x, grad=grad: (hvd.allreduce(x, op=hvd.Average), grad), values(rank, (3, 2), dtype)
            )
            torch.testing.assert_close(got, (total.double() / size).to(dtype))
            (got,) = derivative(
                lambda x, grad=grad: (
                    hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=2.0),
                    grad,
                ),
                values(rank, (3, 2), dtype),
            )
            assert torch.equal(got, 4 * total.to(dtype))
        pair = [values(rank, (2,)), values(rank, (3,))]
        grads = [values(rank, (2,), salt=1), values(rank, (3,), salt=2)]
        got = derivative(lambda *xs: (hvd.grouped_allreduce(list(xs), op=hvd.Sum), grads), *pair)
        for i, each in enumerate(got):
            assert torch.equal(each, all_values(size, (2 + i,), salt=1 + i).sum(0))


@pytest.mark.parametrize("size", [1, 3])
def test_the_gradient_of_an_allreduce_is_reduced_alike(ranks, size):
    ranks.run(check_allreduce, world_size=size)


def check_allgather(rank, size):
    with job():
        rows = [other + 1 for other in range(size)]
        begin = sum(rows[:rank])
        everyone = all_values(size, (sum(rows), 2), salt=3).sum(0) / size
        (got,) = derivative(
            lambda x: (hvd.allgather(x), values(rank, (sum(rows), 2), salt=3)), values(rank, (rows[rank], 2))
        )
        torch.testing.assert_close(got, everyone[begin : begin + rows[rank]])
        got = derivative(
            lambda *xs: (hvd.grouped_allgather(list(xs)), [values(rank, (sum(rows), 2), salt=3)] * 2),
            values(rank, (rows[rank], 2)),
            values(rank, (rows[rank], 2)),
        )
        for each in got:
            torch.testing.assert_close(each, everyone[begin : begin + rows[rank]])


@pytest.mark.parametrize("size", [1, 3])
def test_the_gradient_of_an_allgather_is_averaged_and_narrowed(ranks, size):
    ranks.run(check_allgather, world_size=size)


def check_broadcast(rank, size):
    with job():
        root = size - 1
        (got,) = derivative(lambda x: (hvd.broadcast(x, root), values(rank, (4,), salt=3)), values(rank, (4,)))
        average = all_values(size, (4,), salt=3).sum(0) / size
        torch.testing.assert_close(got, average if rank == root else torch.zeros(4))


@pytest.mark.parametrize("size", [1, 3])
def test_the_gradient_of_a_broadcast_is_averaged_on_the_root_and_zero_elsewhere(ranks, size):
    ranks.run(check_broadcast, world_size=size)


def check_alltoall(rank, size):
    with job():
        splits = [[(sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]
        num_sent, num_received = sum(splits[rank]), sum(splits[other][rank] for other in range(size))
        received_grads = [
            values(other, (sum(splits[sender][other] for sender in range(size)), 2), salt=2) for other in range(size)
        ]

        def call(x):
            output, _ = hvd.alltoall(x, splits[rank])
            return output, received_grads[rank]

        # Two rows more than are sent: their gradient is zero.
        (got,) = derivative(call, values(rank, (num_sent + 2, 2)))
        parts = [
            received_grads[other].split([splits[sender][other] for sender in range(size)])[rank]
            for other in range(size)
        ]
        assert torch.equal(got, torch.cat([*parts, torch.zeros(2, 2)]))
        assert num_received == received_grads[rank].shape[0]


@pytest.mark.parametrize("size", [1, 3])
def test_the_gradient_of_an_alltoall_goes_back_to_where_the_rows_came_from(ranks, size):
    ranks.run(check_alltoall, world_size=size)


def check_reducescatter(rank, size):
    with job():
        grads = torch.cat([values(other, (2, 3), salt=5) for other in range(size)])
        for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
            (got,) = derivative(
                lambda x, op=op: (hvd.reducescatter(x, op=op, prescale_factor=2.0), values(rank, (2, 3), salt=5)),
                values(rank, (2 * size, 3)),
            )
            assert torch.equal(got, 2 * factor * grads)
        got = derivative(
            lambda *xs: (hvd.grouped_reducescatter(list(xs), op=hvd.Sum), [values(rank, (2, 3), salt=5)] * 2),
            values(rank, (2 * size, 3)),
            values(rank, (2 * size, 3)),
        )
        assert all(torch.equal(each, size * grads) for each in got)


@pytest.mark.parametrize("size", [1, 3])
def test_the_gradient_of_a_reducescatter_is_gathered_and_scaled(ranks, size):
    ranks.run(check_reducescatter, world_size=size)


def check_no_grad(rank, size):
    with job(), torch.no_grad():
        weight = torch.nn.Parameter(values(rank, (3,)))
        assert not hvd.allreduce(weight, op=hvd.Sum).requires_grad
        before = weight._version
        hvd.broadcast_(weight, 0)
        assert weight._version > before, "autograd must see that it has changed"


def test_without_grad_mode_results_need_no_gradient(ranks):
    ranks.run(check_no_grad, world_size=2)
