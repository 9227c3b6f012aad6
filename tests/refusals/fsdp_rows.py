"""What attach() refuses with FSDP2."""

import torch
import torch.distributed as dist
from refusals import differ, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import ProcessGroupAllocReduceScatter

import fusedcomm
from fusedcomm.config import Config


def of_shards(config="bf16"):
    """Shards, or on four ranks copies of shards."""
    shape = (2, 2) if dist.get_world_size() == 4 else (dist.get_world_size(),)
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard")[-len(shape) :]))
    fusedcomm.attach(model, config, quiet=True)


def attached_twice(_):
    kept = fusedcomm.attach(model := fully_shard(nn.Linear(8, 8)), "bf16", quiet=True)
    fusedcomm.attach(model, "bf16", quiet=True)
    kept.detach()


def with_own_comm(*ranks):
    def wrong(rank):
        model = fully_shard(nn.Linear(8, 8))
        if rank in ranks:
            model.set_custom_reduce_scatter(ProcessGroupAllocReduceScatter(dist.group.WORLD))
        fusedcomm.attach(model, "bf16", quiet=True)

    return wrong


ON_ONE_RANK = [
    ("auto", "config='auto'"),
    (Config("int8", sum="one-shot"), "sum='one-shot'"),
    (Config("int8", wires={"no.such.*": "bf16"}), "no.such"),
]
OWN = "the reduce-scatter of the model is ProcessGroupAllocReduceScatter already"
MODELS = [
    (
        lambda _: fusedcomm.attach(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))),
        "TypeError ... fully_shard",
    ),
    (attached_twice, "ValueError ... fusedcomm.attach already synchronizes the parameter ... detach"),
    (with_own_comm(0, 1), f"ValueError ... {OWN}"),
    (with_own_comm(0), f"ValueError / DisagreementError: fusedcomm: rank 0 ... {OWN}"),
    (with_own_comm(1), f"DisagreementError: fusedcomm: rank 1 / ValueError ... {OWN}"),
    (lambda _: of_shards(Config("int8", hosts=5)), "ValueError: ... hosts=5 ranks on each host"),
]
TOLD = "DisagreementError: fusedcomm: rank 1"
DIFFERENT = [
    (
        differ(of_shards, {"config": one}, {"config": other}),
        f"DisagreementError ... wire is {one!r} on rank 0 and {other!r}",
    )
    for one, other in (("int8", "bf16"), ("off", "int8"))
]
ROWS = [
    *rows("FSDP2", 2, MODELS),
    *rows("FSDP2", 3, DIFFERENT, is_same=True),
    *(
        row
        for number in (2, 4)
        for row in rows(
            "FSDP2",
            number,
            [
                (differ(of_shards, {}, {"config": config}), f"{TOLD} / ValueError: ... {text}")
                for config, text in ON_ONE_RANK
            ],
        )
    ),
]
