"""Horovod's calls with tensors on a GPU: results are on the GPU, and equal those of tensors on a CPU."""

import pytest
import torch
from jobs import all_values, job, values

import fusedcomm.horovod as hvd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that this torch can use"),
]

BACKEND = "cpu:gloo,cuda:nccl"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64]


def late(tensor):
    """The tensor on the GPU, written only after a delay on the current stream."""
    result = torch.zeros_like(tensor, device="cuda")
    torch.cuda._sleep(20_000_000)
    result.copy_(tensor)
    return result


def collectives(rank, size):
    with job():
        for dtype in DTYPES:
            mine, every = values(rank, (5, 3), dtype), all_values(size, (5, 3), dtype)
            results = {
                "allreduce": (hvd.allreduce(late(mine), op=hvd.Sum), every.sum(0).to(dtype)),
                "broadcast": (hvd.broadcast(late(mine), root_rank=1), every[1]),
                "allgather": (hvd.allgather(late(mine)), every.flatten(0, 1)),
                "reducescatter": (
                    hvd.reducescatter(late(mine[: 2 * size]), op=hvd.Sum),
                    every.sum(0).to(dtype)[2 * rank : 2 * rank + 2],
                ),
            }
            in_place = late(mine)
            handle = hvd.allreduce_async_(in_place, op=hvd.Sum)
            results["allreduce_async_"] = (hvd.synchronize(handle), every.sum(0).to(dtype))
            assert results["allreduce_async_"][0] is in_place
            for name, (result, wanted) in results.items():
                assert result.is_cuda, name
                assert torch.equal(result.cpu(), wanted), f"{name} {dtype}: {result} instead of {wanted}"
            group = [late(values(rank, (n,), dtype, n)) for n in (1, 17, 300)]
            for result, n in zip(hvd.grouped_allreduce(group, op=hvd.Sum), (1, 17, 300), strict=True):
                assert torch.equal(result.cpu(), all_values(size, (n,), dtype, n).sum(0).to(dtype))
        joined, splits = hvd.alltoall(late(values(rank, (size,))), torch.ones(size, dtype=torch.int32))
        assert joined.is_cuda and splits.tolist() == [1] * size
        assert torch.equal(joined.cpu(), all_values(size, (size,))[:, rank])


def test_collectives(ranks):
    ranks.run(collectives, world_size=2, backend=BACKEND)


def on_other_streams(rank, size):
    """Every call from a stream of its own, which is still writing the input, and reads the result."""
    wrong = 0
    with job():
        for step in range(8):
            for dtype in DTYPES:
                with torch.cuda.stream(torch.cuda.Stream()):
                    tensor = late(values(rank, (3000,), dtype, step))
                    result = hvd.allreduce(tensor, op=hvd.Sum, name=f"of {dtype}")
                    wrong += (result.cpu() != all_values(size, (3000,), dtype, step).sum(0).to(dtype)).sum().item()
    return wrong


def test_calls_from_other_streams(ranks):
    assert ranks.run(on_other_streams, world_size=2, backend=BACKEND) == [0, 0]


def trained(rank, size, device, compression):
    torch.manual_seed(0)
    with job():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to(device)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5),
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(4):
            optimizer.zero_grad()
            model(values(rank, (4, 3), salt=step).to(device)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "int8", "int4"])
def test_an_optimizer_trains_as_on_a_cpu(ranks, compression):
    on_gpu = ranks.run(trained, "cuda", compression, world_size=2, backend=BACKEND)
    on_cpu = ranks.run(trained, "cpu", compression, world_size=2, backend=BACKEND)
    for a, b, wanted in zip(*on_gpu, on_cpu[0], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, wanted, rtol=2e-2 if compression.endswith("16") else 1e-5, atol=1e-2)
