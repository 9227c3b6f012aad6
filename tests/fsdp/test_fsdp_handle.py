"""What the handle of an FSDP2 model tells, and attaching at any time and to any model."""

import copy

import pytest
import torch
from models import refusal
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fusedcomm


def _model(**options) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 5))
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _backward(model: nn.Module, rank: int, step: int = 0) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(4, 9, generator=generator)).square().sum().backward()


def _locals(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _off(rank, world_size):
    plain, ours = _model(), _model()
    comm = fusedcomm.attach(ours, "off")
    for model in (plain, ours):
        _backward(model, rank)
    texts = repr(comm), str(comm.plan()).splitlines()[:3], str(comm.stats())
    with pytest.raises(RuntimeError, match="torch's own sums run"):
        comm.trace("trace.json")
    is_same = all(map(torch.equal, _locals(plain), _locals(ours)))
    state = comm.state_dict()
    with fusedcomm.attach(plain, "int8") as other:
        _backward(plain, rank)
        comm.load_state_dict(other.state_dict())
    comm.detach()
    return is_same, texts, comm.nonfinite_report(), state["calls"], comm.state_dict()["calls"]


def test_off_leaves_the_sums_to_torch_and_says_so(ranks):
    names = ["0", "2"]
    for is_same, texts, report, calls, loaded in ranks.run(_off, world_size=2):
        assert is_same and report == []
        line, plan, stats = texts
        assert line == "<fusedcomm.FsdpHandle: off, torch's own sums, 2 ranks, 2 modules>"
        assert plan[0] == "fusedcomm: FSDP2: off, torch's own sums over 2 ranks"
        assert plan[2].split() == ["0", "0.001", "rows", "0.000", "0.weight", "…", "0.bias", "(2)"]
        assert "off" in stats
        assert calls == dict.fromkeys(names, 0) and loaded == dict.fromkeys(names, 1)


def _counted(rank, world_size, kind):
    if kind == "replicate":
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 17), nn.Linear(17, 5))
        for module in (model[0], model[1], model):
            replicate(module, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        shape = {"shards": (1, 2), "copies": (2, 1)}.get(kind, (world_size,))
        names = ("copies", "shards")[-len(shape) :]
        model = _model(mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    if kind == "first module frozen":
        model[0].requires_grad_(False)
    with fusedcomm.attach(model, "int8") as comm:
        before = repr(comm)
        for step in range(3):
            _backward(model, rank, step)
        stats, lines = comm.stats(), [before, repr(comm)]
        state = comm.state_dict()
    with pytest.raises(RuntimeError, match="is detached, so no reduce-scatter would use the state"):
        comm.load_state_dict(state)
    return stats.steps, len(str(stats).splitlines()) > 3, [*lines, repr(comm)]


@pytest.mark.parametrize("kind", ["plain", "shards", "copies", "replicate", "first module frozen"])
def test_steps_are_counted_and_one_line_says_how_many(ranks, kind):
    how = {"shards": "2 ranks", "copies": "2 ranks (2 replicas)", "replicate": "2 ranks (2 replicas)"}
    for num_steps, has_times, lines in ranks.run(_counted, kind, world_size=2):
        assert num_steps == 3 and has_times
        head = f"<fusedcomm.FsdpHandle: wire int8, {how.get(kind, '2 ranks')}, 2 modules, "
        assert lines == [f"{head}0 steps>", f"{head}3 steps>", "<fusedcomm.FsdpHandle: detached>"]


def _float64(rank, world_size):
    model = fully_shard(nn.Linear(8, 8, dtype=torch.float64))
    with fusedcomm.attach(model, "int8"), pytest.warns(UserWarning, match="float64, which no wire carries"):
        model(torch.full((2, 8), rank + 1.0, dtype=torch.float64)).sum().backward()
    return model.weight.grad.full_tensor()[0, 0].item()


def test_float64_is_left_to_torch_and_said_once(ranks):
    assert ranks.run(_float64, world_size=2) == [3.0, 3.0]


def _late(rank, world_size, when):
    model, x = _model(), torch.full((4, 9), rank + 1.0)
    model(x).sum().backward()
    want = _locals(model)
    model.zero_grad()
    if when == "after evaluation":
        with torch.no_grad():
            model(x)  # the model keeps the whole parameters
    loss = model(x).sum() if when == "in mid-step" else None
    with fusedcomm.attach(model, "fp32") as comm:
        (loss if loss is not None else model(x).sum()).backward()
        return all(map(torch.equal, want, _locals(model))), comm.stats().buckets


@pytest.mark.parametrize("when", ["after a step", "after evaluation", "in mid-step"])
def test_attach_after_forward_passes_works(ranks, when):
    assert ranks.run(_late, when, world_size=2) == [(True, 2)] * 2


def _beside_tensor_parallel(rank, world_size):
    mesh, gradients = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 8), nn.Linear(8, 8))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        comm = fusedcomm.attach(model, "fp32") if is_ours else None
        _backward(model, mesh["dp"].get_local_rank())
        gradients.append(_locals(model))
    num_shards = comm.plan().num_shards
    comm.detach()
    return all(map(torch.equal, *gradients)), num_shards


def test_only_the_data_parallel_dimension_is_reduced(ranks):
    assert ranks.run(_beside_tensor_parallel, world_size=4) == [(True, 2)] * 4


def _copied(rank, world_size):
    model = _model()
    with fusedcomm.attach(model, "fp32") as comm:
        return refusal(copy.deepcopy, model), refusal(copy.deepcopy(comm).stats)


def test_torch_refuses_a_copy_of_the_model_and_a_copy_of_the_handle_is_attached_to_nothing(ranks):
    for of_model, of_handle in ranks.run(_copied, world_size=2):
        assert of_model.startswith("AssertionError: FSDP does not support deepcopy")
        assert "this handle is a copy" in of_handle


def _too_large(rank, world_size, wire, is_half, value, factor):
    """Every rank's gradient of a bias is `value`; their sum is divided by `factor`."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16 if is_half else None)
    model = fully_shard(nn.Linear(2, 2), mp_policy=policy)
    model.set_gradient_divide_factor(factor)
    with fusedcomm.attach(model, wire):
        (model(torch.zeros(1, 2)) * value).sum().backward()
    return model.bias.grad.to_local().item()


@pytest.mark.parametrize(
    ("wire", "is_half", "value", "factor", "want"),
    [
        ("fp16", False, 6e4, 1.0, 12e4),  # only the sum is beyond fp16
        ("bf16", True, 6e4, 1.0, torch.inf),
        ("fp16", False, 1e5, 2.0, torch.inf),
    ],
)
def test_sums_overflow_only_where_the_wire_or_the_output_does(ranks, wire, is_half, value, factor, want):
    assert ranks.run(_too_large, wire, is_half, value, factor, world_size=2) == [want] * 2
