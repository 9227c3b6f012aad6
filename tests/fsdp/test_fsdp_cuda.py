"""FSDP2 and GradReducer on a GPU, over NCCL: gradients, counts and residuals are those of a CPU over gloo, and none is
read early.

Several ranks share one GPU. This shows whether results are right, and nothing about speed.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from models import Mlp, integers, mean_of_integers, reducer_of, whole
from test_fsdp_feedback import Layers, made
from test_fsdp_on_streams import CONFIGS, FED_BACK, three_steps
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusedcomm
from fusedcomm.config import Chunks, Config, Feedback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU that this torch can use"),
]

BACKEND = "cpu:gloo,cuda:nccl"


def on_both_devices(rank, world_size, kind, config):
    """This rank's gradients, counts and residuals after three steps, on a CPU and on a GPU."""
    found = []
    for device in ("cpu", "cuda"):
        if kind == "GradReducer":
            model = Layers().to(device)
            comm = reducer_of(model, config, bucket_mib=0.02)
        else:
            model = made(kind, world_size, device)
            comm = fusedcomm.attach(model, config, quiet=True)
        bits = three_steps(model, rank, device)
        residuals = {name: whole(each).cpu() for name, each in comm.state_dict()["residuals"].items()}
        found.append((bits, comm.stats().nonfinite_by_parameter, residuals, comm.plan().codec))
        comm.detach()
    return found


CONFIGS_OF_REDUCER = {
    "fp32": Config("fp32"),
    "bf16": Config("bf16"),
    "int8 feedback": Config("int8", feedback=Feedback()),
    "int4": Config("int4"),
    "fp8": Config("fp8"),
}
CASES = [("GradReducer", name, 2) for name in CONFIGS_OF_REDUCER] + [("sharded", name, 2) for name in CONFIGS]
CASES += [(kind, name, 2) for kind in ("gradients in bfloat16", "replicate") for name in ("fp32", "bf16", "int8")]
CASES += [("hsdp", "int8", 4), ("sharded", "int4", 4), ("sharded", "bf16", 3)]
CASES += [(kind, name, 4 if kind == "hsdp" else 2) for kind in ("hsdp", "replicate") for name in FED_BACK]


@pytest.mark.parametrize(("kind", "name", "world_size"), CASES)
def test_results_are_those_of_the_cpu(ranks, kind, name, world_size):
    config = (CONFIGS_OF_REDUCER if kind == "GradReducer" else {**CONFIGS, **FED_BACK})[name]
    config = dataclasses.replace(config, chunks=Chunks(config.chunks.nbytes or 1 << 20))
    for cpu, gpu in ranks.run(on_both_devices, kind, config, world_size=world_size, backend=BACKEND):
        # With replicate(), wire fp32 is summed by the transport: NCCL and gloo add two numbers alike.
        assert torch.equal(cpu[0], gpu[0])
        assert cpu[1] == gpu[1] and sum(gpu[1].values()) == 2
        assert cpu[2].keys() == gpu[2].keys()
        assert all(torch.equal(cpu[2][name].nan_to_num(), gpu[2][name].nan_to_num()) for name in cpu[2])
        assert any(each.any() for each in cpu[2].values()) == (config.feedback is not None)
        assert "sm_" in gpu[3]


class Given(nn.Module):
    """Adds to its input a loss whose gradient is given, which is computed late."""

    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x, gradient):
        product = self.weight * gradient
        product.register_hook(delayed)
        return x + product.sum()


def delayed(gradient):
    torch.cuda._sleep(3_000_000)
    return gradient


SHAPES = ((300, 1001), (70,), (1, 40_000), (513, 17), (2_000_003,), (64, 64))


def late(rank, world_size, config, reshard):
    """The number of wrong elements in many steps without a wait of the host."""
    model = nn.ModuleList(Given(shape) for shape in SHAPES).cuda()
    mesh = init_device_mesh("cuda", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    comm = fusedcomm.attach(model, config, quiet=True)
    kept = []
    for step in range(12):
        x = torch.zeros((), device="cuda")
        for layer, shape in zip(model, SHAPES, strict=True):
            x = layer(x, (integers(rank, shape) + step % 5).cuda(non_blocking=True))
        x.backward()
        kept.append([layer.weight.grad for layer in model])
        for layer in model:
            layer.weight.grad = None
    wrong = 0
    for step, gradients in enumerate(kept):
        for gradient, shape in zip(gradients, SHAPES, strict=True):
            wrong += (gradient.full_tensor() != mean_of_integers(world_size, shape).cuda() + step % 5).sum().item()
    comm.detach()
    return wrong


@pytest.mark.parametrize(
    ("config", "reshard"),
    [
        (Config("fp32"), True),
        (Config("bf16", wires={"1d": "bf16"}), True),
        (Config("bf16", wires={"1d": "bf16"}, chunks=Chunks(1 << 16, in_flight=2)), False),
    ],
    ids=["fp32", "bf16", "bf16 in many chunks"],
)
def test_late_gradients_are_reduced_when_they_are_there(ranks, config, reshard):
    assert ranks.run(late, config, reshard, world_size=2, backend=BACKEND) == [0, 0]


def trained_by_a_reducer(rank, world_size, wire):
    """Parameters after five steps with gradients computed late: the optimizer must wait for the mean."""
    torch.manual_seed(0)
    model = Mlp().cuda()
    reducer = reducer_of(model, wire)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 10, generator=generator).cuda()).square().mean()
        torch.cuda._sleep(20_000_000)
        loss.backward()
        optimizer.step()
    steps = reducer.stats().steps
    reducer.detach()
    return [parameter.detach().cpu() for parameter in model.parameters()], steps


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
def test_ranks_with_a_reducer_stay_identical(ranks, wire):
    (first, steps), (second, _) = ranks.run(trained_by_a_reducer, wire, world_size=2, backend=BACKEND)
    assert steps == 5
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


def trained(rank, world_size, config):
    """Parameters after ten steps, and the most memory allocated in the last steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6))).cuda()
    mesh = init_device_mesh("cuda", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if config:
        fusedcomm.attach(model, config, quiet=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(10):
        if step == 5:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        for accumulated in (True, False):
            model.set_requires_gradient_sync(not accumulated)
            model(torch.randn(32, 512, generator=generator).cuda()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    parameters = [parameter.full_tensor().detach().cpu() for parameter in model.parameters()]
    return parameters, torch.cuda.max_memory_allocated()


def test_training_is_that_of_fsdp2_alone(ranks):
    plain = ranks.run(trained, None, world_size=2, backend=BACKEND)
    for ours, alone in zip(ranks.run(trained, Config("fp32"), world_size=2, backend=BACKEND), plain, strict=True):
        for a, b in zip(ours[0], alone[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_memory_is_that_of_fsdp2_alone(ranks):
    """Besides small buffers, nothing of the size of all gradients is added to the peak of a step."""
    plain = ranks.run(trained, None, world_size=2, backend=BACKEND)
    ours = ranks.run(trained, Config("bf16", chunks=Chunks(1 << 18)), world_size=2, backend=BACKEND)
    layer_nbytes = 4 * 512 * 513
    for (*_, with_ours), (*_, alone) in zip(ours, plain, strict=True):
        assert with_ours - alone < 2.5 * layer_nbytes, (with_ours, alone)
