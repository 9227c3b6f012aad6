"""What attach() refuses to do with FSDP2, and what it says."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import error_of, refusal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import ProcessGroupAllocReduceScatter
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fusedcomm


def _model() -> nn.Module:
    torch.manual_seed(0)
    return fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))


def _options(rank, world_size):
    model = _model()
    for options, text in [
        ({"config": "auto"}, "one wire from the start"),
        ({"config": fusedcomm.Auto()}, "one wire from the start"),
        ({"config": 8}, r"config=8 is not possible: use a wire's name"),
        ({"config": fusedcomm.Config("int8", sum="one-shot")}, "sum='one-shot' is not possible with FSDP2"),
        ({"config": fusedcomm.Config("int8", feedback=fusedcomm.Feedback())}, r"Feedback\(unsharded=True\)"),
        ({"config": fusedcomm.Config("int8", measure_every=2)}, "measure_every"),
        ({"config": fusedcomm.Config("int8", hosts=2)}, "one level"),
        ({"config": fusedcomm.Config("int8", wires={"no.such.*": "bf16"})}, "no.such"),
    ]:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
            fusedcomm.attach(model, **options)


def test_options_without_effect_are_refused(ranks):
    ranks.run(_options, world_size=2)


def _on_one_rank_alone(rank, world_size, mesh_shape, options):
    names = ("replica", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(8, 8), mesh=mesh)
    text = refusal(fusedcomm.attach, model, **(options if rank == 1 else {"config": "bf16"}))
    dist.barrier()
    fusedcomm.attach(model, "bf16").detach()
    return text


@pytest.mark.sampled
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=["shards", "hsdp"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"config": "auto"}, "one wire from the start"),
        ({"config": fusedcomm.Config("int8", sum="one-shot")}, "sum='one-shot' is not possible"),
        ({"config": fusedcomm.Config("int8", wires={"no.such.*": "bf16"})}, "no.such"),
    ],
)
def test_what_is_refused_on_one_rank_is_told_to_all(ranks, mesh_shape, options, text):
    found = ranks.run(_on_one_rank_alone, mesh_shape, options, world_size=2 * len(mesh_shape))
    assert all(text in each for each in found)


def _kinds(rank, world_size):
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        fusedcomm.attach(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="fully_shard"):
        fusedcomm.attach(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")))
    model = _model()
    handle = fusedcomm.attach(model, "bf16")
    with pytest.raises(ValueError, match=r"fusedcomm.attach already synchronizes the parameter.*detach"):
        fusedcomm.attach(model, "bf16")
    handle.detach()
    handle.detach()
    fusedcomm.attach(model, "bf16").detach()
    with pytest.raises(RuntimeError, match="detached"):
        handle.trace("x.json")


def test_other_models_and_a_second_attachment_are_refused(ranks):
    ranks.run(_kinds, world_size=2)


def _ranks_differ(rank, world_size, wires):
    return error_of(RuntimeError, fusedcomm.attach, _model(), wires[rank])


@pytest.mark.parametrize("wires", [("int8", "bf16"), ("off", "int8")], ids=str)
def test_ranks_with_different_wires_are_told_on_every_rank(ranks, wires):
    one, other = ranks.run(_ranks_differ, wires, world_size=2)
    assert one == other and f"wire is {wires[0]!r} on rank 0 and {wires[1]!r} on rank 1" in one


def _float64(rank, world_size):
    model = fully_shard(nn.Linear(8, 8, dtype=torch.float64))
    with fusedcomm.attach(model, "int8"), pytest.warns(UserWarning, match="float64, which no wire carries"):
        model(torch.full((2, 8), rank + 1.0, dtype=torch.float64)).sum().backward()
    return model.weight.grad.full_tensor()[0, 0].item()


def test_float64_is_left_to_torch_and_said_once(ranks):
    assert ranks.run(_float64, world_size=2) == [3.0, 3.0]


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def _own_comm(rank, world_size, rank_with):
    model = _model()
    if rank_with in (rank, "all"):
        model.set_custom_reduce_scatter(ProcessGroupAllocReduceScatter(dist.group.WORLD))
    return refusal(fusedcomm.attach, model, "bf16")


@pytest.mark.parametrize("rank_with", ["all", 0, 1])
def test_a_reduce_scatter_of_ones_own_is_refused_on_every_rank(ranks, rank_with):
    for text in ranks.run(_own_comm, rank_with, world_size=2):
        assert "the reduce-scatter of the model is ProcessGroupAllocReduceScatter already" in text


def _before_fully_shard(rank, world_size):
    return refusal(fusedcomm.attach, _plain(), "bf16")


def test_attach_before_fully_shard_says_what_comes_first(ranks):
    for text in ranks.run(_before_fully_shard, world_size=2):
        assert text.startswith("TypeError") and text.endswith(
            "or shard it with torch.distributed.fsdp.fully_shard(model)"
        )


def _backward(model: nn.Module, rank: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(rank)
    model(torch.randn(2, 8)).sum().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _late(rank, world_size, when):
    model = _model()
    want = _backward(model, rank)
    model.zero_grad()
    torch.manual_seed(rank)
    x = torch.randn(2, 8)
    if when == "after evaluation":
        with torch.no_grad():
            model(x)  # the model keeps the whole parameters
    loss = model(x).sum() if when == "in mid-step" else None
    with fusedcomm.attach(model, "fp32") as comm:
        (loss if loss is not None else model(x).sum()).backward()
        got = [parameter.grad.to_local() for parameter in model.parameters()]
        return all(map(torch.equal, want, got)), comm.stats().buckets, comm.plan().rows[0].num_parameters


@pytest.mark.parametrize("when", ["after a step", "after evaluation", "in mid-step"])
def test_attach_after_forward_passes_works(ranks, when):
    assert ranks.run(_late, when, world_size=2) == [(True, 1, 4)] * 2


def _beside_tensor_parallel(rank, world_size):
    mesh, gradients = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), []
    for is_ours in (False, True):
        model = parallelize_module(_plain(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        comm = fusedcomm.attach(model, "fp32") if is_ours else None
        gradients.append(_backward(model, mesh["dp"].get_local_rank()))
    num_shards = comm.plan().num_shards
    comm.detach()
    return all(map(torch.equal, *gradients)), num_shards


def test_only_the_data_parallel_dimension_is_reduced(ranks):
    assert ranks.run(_beside_tensor_parallel, world_size=4) == [(True, 2)] * 4


def _copied(rank, world_size):
    model = _model()
    with fusedcomm.attach(model, "fp32") as comm:
        texts = [refusal(copy.deepcopy, model), refusal(copy.deepcopy(comm).stats)]
        _backward(model, rank)
        return texts, comm.stats().buckets


def test_torch_refuses_a_copy_of_the_model_and_a_copy_of_the_handle_is_attached_to_nothing(ranks):
    for (of_model, of_handle), num_buckets in ranks.run(_copied, world_size=2):
        assert num_buckets == 1
        assert of_model.startswith("AssertionError: FSDP does not support deepcopy")
        assert "this handle is a copy" in of_handle


def _too_large(rank, world_size, wire, is_half):
    """Every rank's gradient of a bias is 60000, and their sum 120000, which fp16 does not hold."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16 if is_half else None)
    model = fully_shard(nn.Linear(2, 2), mp_policy=policy)
    model.set_gradient_divide_factor(1.0)
    with fusedcomm.attach(model, wire):
        (model(torch.zeros(1, 2)) * 60000).sum().backward()
    return model.bias.grad.to_local().item()


@pytest.mark.parametrize(("wire", "is_half", "want"), [("fp16", False, 120000), ("bf16", True, torch.inf)])
def test_sums_overflow_only_where_the_output_does(ranks, wire, is_half, want):
    assert ranks.run(_too_large, wire, is_half, world_size=2) == [want] * 2


def _beyond_the_wire(rank, world_size):
    model = fully_shard(nn.Linear(2, 2))
    with fusedcomm.attach(model, "fp16"):
        (model(torch.zeros(1, 2)) * 1e5).sum().backward()
    return model.bias.grad.to_local().item()


def test_a_gradient_beyond_fp16_is_infinite_as_with_ddp(ranks):
    assert ranks.run(_beyond_the_wire, world_size=2) == [torch.inf] * 2


def _early_optimizer(rank, world_size):
    model = _plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fully_shard(model)
    with fusedcomm.attach(model, "fp32"):
        gradients = _backward(model, rank)
        before = [parameter.to_local().clone() for parameter in model.parameters()]
        optimizer.step()
        after = [parameter.to_local() for parameter in model.parameters()]
    is_blind = all(p.grad is None for group in optimizer.param_groups for p in group["params"])
    return all(map(torch.equal, before, after)), is_blind, len(gradients)


def test_an_optimizer_made_before_fully_shard_has_no_gradients(ranks):
    """It has the parameters that fully_shard replaced, with fusedcomm as without: nothing hangs, nothing is stepped."""
    assert ranks.run(_early_optimizer, world_size=2) == [(True, True, 4)] * 2
