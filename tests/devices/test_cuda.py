"""On a GPU, over NCCL: the same bits as on a CPU, DDP's contract, no races, and what is refused.

Several ranks share one GPU. This shows whether results are right, and nothing about speed.
"""

import gc
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from models import Gradients, Mlp, Sparse, integers, mean_of_integers, synchronize, worst
from patience import HANG_S
from test_engine_on_ptx import CONFIGS
from torch.nn.parallel import DistributedDataParallel
from traces import read

import fusedcomm
from fusedcomm import env
from fusedcomm.config import Chunks, Config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that this torch can use"),
]

BACKEND = "cpu:gloo,cuda:nccl"
SHAPES = ((61, 50), (301,), (7,), (5000,), (1,))


# --- the same bits as on the CPU ------------------------------------------------------------------------------------


def both_devices(rank, world_size, config, dtype, exact_sum):
    """Returns (gradients' bits, non-finite elements, the same by parameter) from a CPU over gloo, and from a GPU over
    NCCL. Each takes several steps, because DDP rebuilds its buckets."""
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    if exact_sum:  # integers, so that the transport's order of addition does not matter
        gradients = [(gradient * 4).round() for gradient in gradients]
    gradients[0].view(-1)[3] = -torch.inf
    gradients[3][17 * rank : 17 * rank + 2] = torch.nan
    results = []
    for device in ("cpu", "cuda"):
        model = Gradients(*SHAPES, dtype=dtype).to(device)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.016)
        comm = fusedcomm.attach(ddp, config)
        num_steps = 4 if config.feedback else 2  # a residual shows in the next step
        seen = synchronize(ddp, [gradient.to(device) for gradient in gradients], steps=num_steps)
        stats = comm.stats()
        comm.detach()
        # Sums in place keep NaNs as they are, and which NaN a sum gives depends on the device.
        values = torch.cat([gradient.flatten() for gradient in seen]).cpu()
        bits = torch.where(values.isnan(), torch.tensor(torch.nan, dtype=dtype), values).view(torch.uint8)
        results.append((bits, stats.nonfinite, stats.nonfinite_by_parameter))
    return results


# Every dtype needs kernels of its own, so only these run with each dtype. test_kernels.py covers each kernel.
WIDELY = ("fp32", "bf16 two-shot chunked", "int8", "int4 all lossy")
CASES = [(name, 4 if config.needs_two_levels else 2, torch.float32) for name, config in CONFIGS.items()]
CASES += [(name, world_size, torch.float32) for name in WIDELY for world_size in (1, 4)]
CASES += [(name, 2, dtype) for name in WIDELY for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("name", "world_size", "dtype"), CASES, ids=str)
def test_gradients_and_counts_are_those_of_the_cpu(ranks, name, world_size, dtype):
    in_wire_order = CONFIGS[name].sum in ("two-shot", "one-shot") or (name == "int8" and world_size > 1)
    exact_sum = not in_wire_order and world_size > 2
    for cpu, gpu in ranks.run(both_devices, CONFIGS[name], dtype, exact_sum, world_size=world_size, backend=BACKEND):
        assert torch.equal(cpu[0], gpu[0])
        assert cpu[1:] == gpu[1:]
        assert cpu[1] > 0


def big_bucket(rank, world_size, wire):
    """Many chunks of a bucket larger than the workspaces, on all multiprocessors."""
    shape = (5 << 20,)
    gradients = [integers(rank, shape).cuda() for _ in range(2)]
    ddp = DistributedDataParallel(Gradients(shape, shape).cuda())
    comm = fusedcomm.attach(ddp, Config(wire, sum="two-shot", wires={"1d": wire}, chunks=Chunks(1 << 20)))
    seen = synchronize(ddp, gradients, steps=3)
    comm.detach()
    mean = mean_of_integers(world_size, shape).cuda()
    return [(gradient - mean).abs().max().item() for gradient in seen]


@pytest.mark.parametrize(("wire", "bound"), [("bf16", 0.0), ("fp16", 0.0), ("int8", 2 * 8 / 127)])
def test_a_bucket_of_many_chunks(ranks, wire, bound):
    for errors in ranks.run(big_bucket, wire, world_size=2, backend=BACKEND):
        assert worst(errors) <= bound


def torn_down(rank, world_size, hosts):
    """Detaches and drops the handle while the device is still busy with work from before the bucket."""
    shape = (300, 500)
    ddp = DistributedDataParallel(Gradients(shape).cuda())
    comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot", hosts=hosts))
    gradients = [integers(rank, shape).cuda()]
    synchronize(ddp, gradients, steps=2)
    ddp.zero_grad(set_to_none=True)
    torch.cuda._sleep(1_000_000_000)
    ddp(gradients).backward()
    comm.detach()
    del comm
    gc.collect()
    return torch.equal(ddp.module.weights[0].grad, mean_of_integers(world_size, shape).cuda())


@pytest.mark.parametrize("hosts", [None, [[0, 1], [2, 3]]], ids=["one level", "two levels"])
def test_gradients_under_way_arrive_though_the_handle_is_gone(ranks, hosts):
    assert ranks.run(torn_down, hosts, world_size=4, backend=BACKEND) == [True] * 4


# --- DDP's contract -------------------------------------------------------------------------------------------------

DDP_OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"broadcast_buffers": False, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
]


def trained(rank, world_size, options, wire, compiled=False):
    """Parameters after five steps, each with two accumulated backward passes, or with one if the graph is static."""
    torch.manual_seed(0)
    model = Mlp().cuda()
    ddp = DistributedDataParallel(model, **options)
    comm = fusedcomm.attach(ddp, wire) if wire else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    step = torch.compile(ddp) if compiled else ddp
    for _ in range(5):
        optimizer.zero_grad()
        x = torch.randn(2, 8, 10, generator=generator).cuda()
        if not options.get("static_graph"):
            with ddp.no_sync():
                step(x[0]).square().mean().backward()
        step(x[1]).square().mean().backward()
        optimizer.step()
    if comm:
        assert comm.stats().steps == 5
        comm.detach()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
def test_an_fp32_wire_trains_as_ddps_default_does(ranks, options):
    ours = ranks.run(trained, options, "fp32", world_size=2, backend=BACKEND)
    default = ranks.run(trained, options, None, world_size=2, backend=BACKEND)
    for a, b in zip(ours[0] + ours[1], default[0] + default[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_compiled_module_trains_as_it_does_uncompiled(ranks):
    eager = ranks.run(trained, {}, "fp32", world_size=2, backend=BACKEND)
    compiled = ranks.run(trained, {}, "fp32", True, world_size=2, backend=BACKEND)
    for a, b in zip(eager[0], compiled[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def other_kinds(rank, world_size):
    seen = []
    for model, inputs in (
        (Sparse(), torch.tensor([[1, 2, 3 + rank]])),
        (Mlp(torch.float64), torch.randn(4, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))),
    ):
        model.cuda()
        ddp = DistributedDataParallel(model)
        fusedcomm.attach(ddp, "bf16")
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            ddp(inputs.cuda()).square().mean().backward()
        seen.append([parameter.grad.to_dense().cpu() for parameter in model.parameters()])
    return seen


def test_sparse_and_float64_gradients_travel_alike_to_all_ranks(ranks):
    first, second = ranks.run(other_kinds, world_size=2, backend=BACKEND)
    for a, b in zip(first[0] + first[1], second[0] + second[1], strict=True):
        assert torch.equal(a, b) and a.isfinite().all()
    assert first[0][0].abs().sum() > 0


def through_comm_state(rank, world_size):
    ddp = DistributedDataParallel(Gradients((301, 77), (5000,)).cuda())
    ddp.register_comm_hook(fusedcomm.CommState(Config("bf16", sum="two-shot")), fusedcomm.comm_hook)
    gradients = [integers(rank, shape) for shape in ((301, 77), (5000,))]
    return [seen.cpu() for seen in synchronize(ddp, [gradient.cuda() for gradient in gradients], steps=3)]


def test_comm_state_runs_the_same_engine(ranks):
    for seen in ranks.run(through_comm_state, world_size=2, backend=BACKEND):
        for gradient in seen:
            assert torch.equal(gradient, mean_of_integers(2, tuple(gradient.shape)))


# --- config="auto" ----------------------------------------------------------------------------------------------------


def searched(rank, world_size):
    """Trains on integers, so that every mean is exact. Returns (whether the search has finished, its choice, step times
    of the candidates in ms, each step's wire, the number of wrong elements)."""
    shapes = ((200_000,), (3_000,), (70_000,))
    ddp = DistributedDataParallel(Gradients(*shapes).cuda(), bucket_cap_mb=0.5)
    comm = fusedcomm.attach(ddp, "auto", quiet=True)
    wires, wrong = [], 0
    for step in range(100):
        gradients = [(integers(rank, shape) + step % 5).cuda() for shape in shapes]
        for seen, shape in zip(synchronize(ddp, gradients), shapes, strict=True):
            wrong += (seen != mean_of_integers(world_size, shape).cuda() + step % 5).sum().item()
        plan = comm.plan()
        wires.append("off" if plan.off else plan.config.wire)
    tuning = comm.tuning()
    comm.detach()
    return tuning.finished, tuning.chosen, list(tuning.step_ms.values()), wires, wrong


def test_a_search_ends_alike_on_all_ranks_and_every_step_is_right(ranks):
    outcome = ranks.run(searched, world_size=2, backend=BACKEND)
    finished, _, times, wires, wrong = outcome[0]
    assert outcome[0] == outcome[1] and finished and wrong == 0
    assert {"off", "bf16", "int8"} == set(wires) and all(ms > 0 for ms in times)


# --- races ----------------------------------------------------------------------------------------------------------


def delayed(rank, world_size, config, num_steps):
    """The number of wrong elements with random delays on the backward pass's stream and on each of fusedcomm's.

    Gradients are integers, so that every mean is exact. They are written late, behind the delays, and read at once.
    """
    shapes = ((200_000,), (3_000,), (400_000,), (70_000,))
    ddp = DistributedDataParallel(Gradients(*shapes).cuda(), bucket_cap_mb=0.5)
    comm = fusedcomm.attach(ddp, config)
    streams = comm.session.native_device.streams
    generator = torch.Generator().manual_seed(rank)
    delays = iter(torch.randint(0, 2_000_000, (100_000,), generator=generator).tolist())

    def delay(gradient):
        torch.cuda._sleep(next(delays))
        for stream in streams:
            with torch.cuda.stream(torch.cuda.Stream(stream_id=stream.stream_id, device_index=0, device_type=1)):
                torch.cuda._sleep(next(delays))
        return gradient

    for weight in ddp.module.weights:
        weight.register_hook(delay)
    wrong = 0
    for step in range(num_steps):
        gradients = [(integers(rank, shape) + step % 5).cuda() for shape in shapes]
        for seen, shape in zip(synchronize(ddp, gradients), shapes, strict=True):
            wrong += (seen != mean_of_integers(world_size, shape).cuda() + step % 5).sum().item()
    comm.detach()
    return wrong


@pytest.mark.parametrize(
    "config",
    [
        Config("fp32"),
        Config("bf16", "direct"),
        Config("bf16", "two-shot", chunks=Chunks(65536, in_flight=2)),
        Config("bf16", "one-shot", chunks=Chunks(65536, in_flight=2)),
    ],
    ids=str,
)
def test_random_delays_change_no_gradient(ranks, config):
    assert ranks.run(delayed, config, 20, world_size=2, backend=BACKEND) == [0, 0]


# --- what it costs and says -----------------------------------------------------------------------------------------


def told(rank, world_size, path):
    ddp = DistributedDataParallel(Gradients((300, 500), (4000,)).cuda())
    comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot"))
    gradients = [torch.ones(300, 500).cuda(), torch.ones(4000).cuda()]
    synchronize(ddp, gradients, steps=3)
    with comm.trace(path):
        synchronize(ddp, gradients, steps=2)
    stats = comm.stats()
    plan = comm.plan()
    comm.detach()
    return stats, plan.codec


def test_times_and_the_timeline(ranks, tmp_path):
    path = str(tmp_path / "trace-{rank}.json")
    for stats, codec in ranks.run(told, path, world_size=2, backend=BACKEND):
        assert stats.steps == 5
        assert stats.exposed_ms_p50 > 0 and stats.busy_ms.p50 >= stats.exposed_ms_p50 * 0.99
        assert "triton" in codec
    events = read(tmp_path / "trace-1.json")
    stages = {event["args"]["stage"] for event in events}
    assert stages == {"bucket", "pack", "all-to-all", "reduce", "all-gather", "unpack", "exposed"}
    assert all(event["dur"] >= 0 for event in events)


# --- what is refused ------------------------------------------------------------------------------------------------


class one_rank_group:
    def __enter__(self):
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))

    def __exit__(self, *_):
        dist.destroy_process_group()


def test_capture_into_a_cuda_graph_is_refused_with_the_reason():
    with one_rank_group():
        ddp = DistributedDataParallel(Gradients((5000,)).cuda())
        comm = fusedcomm.attach(ddp, Config("bf16", sum="two-shot"), quiet=True)
        synchronize(ddp, [torch.ones(5000).cuda()], steps=3)
        (bucket,) = ddp.reducer._get_zeros_like_grad_buckets()
        with pytest.raises(RuntimeError, match="captured into a CUDA graph"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                ddp.reducer._run_comm_hook(bucket)
        # The next step works as before.
        (seen,) = synchronize(ddp, [torch.full((5000,), 3.0).cuda()])
        assert seen.unique().tolist() == [3.0]
        comm.detach()


def test_gradients_on_cuda_over_gloo_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="fusedcomm moves cuda gradients over nccl"):
            fusedcomm.attach(DistributedDataParallel(Gradients((50,)).cuda()))
    finally:
        dist.destroy_process_group()


FAULT = """
    import torch, torch.distributed as dist, fusedcomm
    from torch.nn.parallel import DistributedDataParallel
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    ddp = DistributedDataParallel(torch.nn.Linear(300, 200).cuda())
    comm = fusedcomm.attach(ddp, fusedcomm.Config("bf16", "two-shot"))
    x = torch.ones(4, 300, device="cuda")
    for _ in range(2):  # after the first step DDP rebuilds its buckets
        ddp(x).sum().backward()
    values, beyond = torch.zeros(1, device="cuda"), torch.tensor([10**6], device="cuda")
    def fault(gradient):  # a kernel of the backward pass, before the bucket is handed over
        torch.cuda._sleep(100_000_000)  # delays the fault until the host waits for the bucket
        values[beyond]
        return gradient
    ddp.module.weight.register_hook(fault)
    try:
        ddp(x).sum().backward()
    except RuntimeError as error:
        print("RAISED", error, flush=True)
    import os
    os._exit(0)
"""


def test_a_fault_on_the_gpu_surfaces_with_the_buckets_name(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FAULT)],
        # torch's watchdog must not end the process first.
        env={**os.environ, env.SYNC: "1", env.QUIET: "1", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert "RAISED fusedcomm: rank 0 of 1" in done.stdout, done.stdout + done.stderr
    assert "bucket 0 (bias … weight" in done.stdout
