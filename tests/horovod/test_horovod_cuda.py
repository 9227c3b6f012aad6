"""Horovod's calls with tensors on a GPU, or on the simulated accelerator: results are there, and equal those of tensors
on a CPU. On the simulated one whatever misses a wait ends its process."""

import on_streams
import pytest
import torch
from jobs import all_values, job, values

import fusedcomm.horovod as hvd

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that this torch can use"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32]


@pytest.fixture(params=[pytest.param("cuda", marks=GPU), pytest.param(on_streams.DEVICE, marks=pytest.mark.check)])
def run(request):
    """Runs a function on two ranks; its first argument is the device's name, another one if that is given."""

    def run(function, *args, device=request.param):
        ranks = request.getfixturevalue("ranks_on_streams" if device == on_streams.DEVICE else "ranks")
        backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", on_streams.DEVICE: on_streams.BACKEND}[device]
        return ranks.run(function, device, *args, world_size=2, backend=backend)

    run.device = request.param
    return run


def late(tensor, device):
    """The tensor on the device, written only after a delay on the current stream; the simulated one's are random."""
    result = torch.zeros_like(tensor, device=device)
    if device == "cuda":
        torch.cuda._sleep(20_000_000)
    result.copy_(tensor)
    return result


def collectives(rank, size, device):
    with job(HOROVOD_FUSION_THRESHOLD="2000"):
        for dtype in DTYPES:
            mine, every = values(rank, (5, 3), dtype), all_values(size, (5, 3), dtype)
            total = every.sum(0).to(dtype)
            results = {
                "allreduce": (hvd.allreduce(late(mine, device), op=hvd.Sum), total),
                "allreduce, Max": (hvd.allreduce(late(mine, device), op=hvd.Max), every.amax(0)),
                "broadcast": (hvd.broadcast(late(mine, device), root_rank=1), every[1]),
                "allgather": (hvd.allgather(late(mine, device)), every.flatten(0, 1)),
                "reducescatter": (
                    hvd.reducescatter(late(mine[: 2 * size], device), op=hvd.Sum),
                    total[2 * rank : 2 * rank + 2],
                ),
            }
            in_place = late(mine, device)
            handle = hvd.allreduce_async_(in_place, op=hvd.Sum)
            results["allreduce_async_"] = (hvd.synchronize(handle), total)
            assert results["allreduce_async_"][0] is in_place
            for name, (result, wanted) in results.items():
                assert result.device.type == device, name
                assert torch.equal(result.cpu(), wanted), f"{name} {dtype}: {result} instead of {wanted}"
            group = [late(values(rank, (n,), dtype, n), device) for n in (1, 17, 300)]
            for result, n in zip(hvd.grouped_allreduce(group, op=hvd.Sum), (1, 17, 300), strict=True):
                assert torch.equal(result.cpu(), all_values(size, (n,), dtype, n).sum(0).to(dtype))
        joined, splits = hvd.alltoall(late(values(rank, (size,)), device), torch.ones(size, dtype=torch.int32))
        assert joined.device.type == device and splits.tolist() == [1] * size
        assert torch.equal(joined.cpu(), all_values(size, (size,))[:, rank])


def test_collectives(run):
    run(collectives)


def derivatives(rank, size, device):
    mine, factors = late(values(rank, (4, 3)), device).requires_grad_(), values(rank, (4, 3), salt=1)
    with job(HOROVOD_FUSION_THRESHOLD="2000"):
        for result in (hvd.allreduce(mine, op=hvd.Sum), hvd.reducescatter(mine, op=hvd.Sum)):
            given = factors[: result.shape[0]].to(device)
            result.backward(given)
        reduced = all_values(size, (4, 3), salt=1).sum(0)
        gathered = size * all_values(size, (4, 3), salt=1)[:, :2].flatten(0, 1)
        assert torch.equal(mine.grad.cpu(), reduced + gathered)


def test_derivatives(run):
    run(derivatives)


def joins(rank, size, device):
    with job(HOROVOD_FUSION_THRESHOLD="2000"):
        if rank == 1:
            result = hvd.allreduce(late(values(rank, (3000,)), device), op=hvd.Sum)
            assert torch.equal(result.cpu(), values(rank, (3000,)))
        assert hvd.join() == 1


def test_a_rank_that_has_joined_adds_nothing(run):
    run(joins)


def on_other_streams(rank, size, device):
    """Every call from a stream of its own, which is still writing the input, and reads the result."""
    wrong = 0
    with job(HOROVOD_FUSION_THRESHOLD="2000"):
        for step in range(8):
            for dtype in DTYPES:
                with torch.Stream(torch.device(device, torch.accelerator.current_device_index())):
                    tensor = late(values(rank, (3000,), dtype, step), device)
                    result = hvd.allreduce(tensor, op=hvd.Sum, name=f"of {dtype}")
                    wrong += (result.cpu() != all_values(size, (3000,), dtype, step).sum(0).to(dtype)).sum().item()
    return wrong


def test_calls_from_other_streams(run):
    assert run(on_other_streams) == [0, 0]


def trained(rank, size, device, compression):
    """(the parameters, how often the host has waited for the simulated accelerator in the last steps)"""
    torch.manual_seed(0)
    waits = 0
    with job(HOROVOD_FUSION_THRESHOLD="2000"):
        model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.ReLU(), torch.nn.Linear(40, 20)).to(device)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5),
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, compression),
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for step in range(4):
            optimizer.zero_grad()
            batch = values(rank, (4, 3), salt=step).to(device)
            before = on_streams.waits()
            model(batch).square().mean().backward()
            optimizer.step()
            if step > 1:
                waits += on_streams.waits() - before
        return [parameter.detach().cpu() for parameter in model.parameters()], waits


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "int8", "int4"])
def test_an_optimizer_trains_as_on_a_cpu_and_the_host_does_not_wait(run, compression):
    on_device, on_cpu = run(trained, compression), run(trained, compression, device="cpu")
    (first, waits), (second, _), (on_cpu, _) = *on_device, on_cpu[0]
    assert waits == 0
    for a, b, wanted in zip(first, second, on_cpu, strict=True):
        assert torch.equal(a, b)
        if run.device == on_streams.DEVICE:
            assert torch.equal(a, wanted)
        else:
            torch.testing.assert_close(a, wanted, rtol=2e-2 if compression.endswith("16") else 1e-5, atol=1e-2)
