"""Sparse tensors are summed exactly, whatever indices the ranks have."""

import pytest
import torch
from jobs import job, values

import fusedcomm.horovod as hvd


def sparse(rank: int, salt: int = 0) -> torch.Tensor:
    """Rows of a table of 10 × 3, one of them twice, on each rank others; none at all on rank 2."""
    rows = [] if rank == 2 else [(rank + i * i + salt) % 10 for i in range(4)] + [(rank + salt) % 10]
    return torch.sparse_coo_tensor(torch.tensor([rows]).long(), values(rank, (len(rows), 3), salt=salt), (10, 3))


def check_sums(rank, size):
    with job():
        waits = [hvd.sparse_allreduce_async(sparse(rank, salt), f"t{salt}", hvd.Sum) for salt in range(5)]
        waits.append(hvd.sparse_allreduce_async(sparse(rank), op=hvd.Average))
        for salt, wait in enumerate(waits[:5]):
            result = wait()
            assert result.is_sparse and result.is_coalesced()
            assert torch.equal(result.to_dense(), sum(sparse(other, salt).to_dense() for other in range(size)))
        average = waits[5]().to_dense()
        torch.testing.assert_close(average, sum(sparse(other).to_dense() for other in range(size)) / size)
        some = hvd.sparse_allreduce_async(torch.eye(4).to_sparse() * (rank + 1), "matrix", hvd.Sum)()
        assert torch.equal(some.to_dense(), torch.eye(4) * (size * (size + 1) // 2))


@pytest.mark.parametrize("size", [1, 4])
def test_sparse_tensors_are_summed(ranks, size):
    ranks.run(check_sums, world_size=size)


def check_local_coalescing(rank, size):
    with job():
        rows = torch.tensor([[3] * 1000])
        gathered = []
        own = torch.sparse_coo_tensor(rows, torch.ones(1000, 2), (10, 2))

        from fusedcomm.horovod import async_ops, sparse

        original = async_ops.allgather_async
        sparse.async_ops.allgather_async = lambda tensor, *rest: (
            gathered.append(tensor.shape[0]),
            original(tensor, *rest),
        )[1]
        try:
            result = hvd.sparse_allreduce_async(own, "x", hvd.Sum)()
        finally:
            sparse.async_ops.allgather_async = original
        assert gathered == [1, 1]
        assert torch.equal(result.to_dense()[3], torch.full((2,), 1000.0 * size))


def test_an_index_travels_once_from_each_rank(ranks):
    ranks.run(check_local_coalescing, world_size=2)
