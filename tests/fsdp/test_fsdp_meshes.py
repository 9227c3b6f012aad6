"""Modules of one model on different meshes, as experts and dense layers are: an engine for each, in one attachment."""

import pytest
import torch
import torch.distributed as dist
from sampling import few
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import fusedcomm

TAKES_SEVERAL_GROUPS = hasattr(_fsdp_common, "ShardPlacementResult")  # of parameters in a module: from torch 2.12 on


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.expert = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.expert(x)


def _dense_and_experts(rank: int, num_experts_ranks: int) -> nn.Module:
    """Dense layers over all four ranks, experts over `num_experts_ranks` of them; other ranks have other experts."""
    mesh = init_device_mesh("cpu", (4 // num_experts_ranks, num_experts_ranks), mesh_dim_names=("ep", "edp"))
    everyone = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        torch.manual_seed(mesh["ep"].get_local_rank() + 1)
        nn.init.normal_(block.expert.weight, std=0.1)
        fully_shard(block.expert, mesh=mesh["edp"])
        fully_shard(block, mesh=everyone)
    return fully_shard(model, mesh=everyone)


def _copies_of_dense(rank: int) -> nn.Module:
    """HSDP around modules that are sharded over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block.expert, mesh=init_device_mesh("cpu", (4,)))
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _placed(rank: int) -> nn.Module:
    """Weights and biases of one module on meshes of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    biases = _fsdp_common.FSDPMeshInfo(mesh["b"], 0)
    torch.manual_seed(0)
    return fully_shard(
        nn.Sequential(Block(), Block()),
        mesh=mesh["a"],
        shard_placement_fn=lambda p: _fsdp_common.ShardPlacementResult(Shard(0), biases) if p.ndim == 1 else Shard(0),
    )


MODELS = {
    "experts over two ranks": lambda rank: _dense_and_experts(rank, 2),
    "experts of one rank": lambda rank: _dense_and_experts(rank, 1),
    "copies of dense layers": _copies_of_dense,
}
if TAKES_SEVERAL_GROUPS:
    MODELS["weights and biases apart"] = _placed


def _trained(model: nn.Module, rank: int, num_steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(num_steps):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(5, 24, generator=generator)).square().mean().backward()
        optimizer.step()
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]


def _error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max((g - w).abs().max().item() for g, w in zip(got, want, strict=True))


def _as_plain(rank, world_size, name):
    want = _trained(MODELS[name](rank), rank, 3)
    errors = []
    for wire in ("fp32", "int8"):
        model = MODELS[name](rank)
        with fusedcomm.attach(model, wire) as comm:
            errors.append(_error(_trained(model, rank, 3), want))
            stats, plan, text = comm.stats(), comm.plan(), repr(comm)
        again = _error(_trained(MODELS[name](rank), rank, 1), _trained(MODELS[name](rank), rank, 1))
    return errors, again, (stats.steps, stats.buckets), [plan.num_shards, *(p.num_shards for p in plan.others)], text


@pytest.mark.parametrize("name", few(MODELS, "experts over two ranks", "weights and biases apart"))
def test_one_attachment_takes_modules_of_several_meshes(ranks, name):
    shards = {"experts of one rank": [4, 1], "copies of dense layers": [2, 4], "weights and biases apart": [2, 2]}
    num_buckets = {"experts of one rank": 6, "weights and biases apart": 6}.get(name, 12)
    for (exact, rounded), again, counts, num_shards, text in ranks.run(_as_plain, name, world_size=4):
        assert exact < 1e-6 and 0 < rounded < 0.01 and again == 0
        assert counts == (3, num_buckets)
        assert num_shards == shards.get(name, [4, 2])
        assert text.startswith("<fusedcomm.FsdpHandle: wire int8, 4 ranks") or name == "weights and biases apart"


def _states(rank, world_size):
    model = _dense_and_experts(rank, 2)
    with fusedcomm.attach(model, "int4") as comm:
        _trained(model, rank, 2)
        state = comm.state_dict()
    with fusedcomm.attach(model, "int4") as comm:
        comm.load_state_dict(state)
        return len(state["calls"]), set(state["calls"].values()), comm.state_dict() == state


def test_the_state_has_the_modules_of_every_mesh(ranks):
    assert ranks.run(_states, world_size=4) == [(4, {2}, True)] * 4


def _one_rank_differs(rank, world_size):
    """Rank 3's experts have another wire by a pattern that rank 3 alone gives."""
    model = _dense_and_experts(rank, 2)
    config = fusedcomm.Config("int8", wires={"0.expert.*": "bf16"}) if rank == 3 else fusedcomm.Config("int8")
    with pytest.raises(RuntimeError, match="the ranks do not agree") as caught:
        fusedcomm.attach(model, config)
    dist.barrier()
    with fusedcomm.attach(model, "int8"):
        _trained(model, rank, 1)
    return str(caught.value)


def test_a_difference_is_told_on_every_mesh_and_attaching_again_works(ranks):
    assert len(set(ranks.run(_one_rank_differs, world_size=4))) == 1
