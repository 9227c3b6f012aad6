"""What LocalSteps refuses, and what changes under way."""

import torch
import torch.distributed as dist
from local_jobs import Job, Narrow
from plain_simulation import Net, Run
from refusals import differ, rows
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

SGD = torch.optim.SGD
NO_TIMES = "0s 0.0s -1s 20 abc s 1_0s nans 1e3s .s 1.5 20m".split() + ["", " 20s", "9" * 400 + "s"]
# Refused before the ranks meet.
ARGUMENTS = [
    ({"every": 0}, "every=0 ... 1 or more"),
    ({"every": 5, "delay": 5}, "delay=5 is not below every=5 ... delay=4 or less"),
    ({"every": 5, "delay": -1}, "delay=-1"),
    *(({"every": every}, f"every={every!r} ... a time above 0") for every in NO_TIMES),
]


def of_net(**kwargs):
    model = Net()
    fusedcomm.LocalSteps(model, SGD(model.parameters(), lr=0.1), **{"every": 10, "quiet": True, **kwargs})


# Only rank 0's model, optimizer or arguments are wrong; the other ranks are told.
MODELS = [
    (
        Net,
        {"optimizer": lambda model: SGD(list(model.parameters())[1:], lr=0.1)},
        "ValueError ... does not hold layers.0.weight ... or freeze this one",
    ),
    (lambda: Net().double(), {}, "ValueError ... torch.float64 ... no merge carries"),
    (lambda: Net().requires_grad_(False), {}, "ValueError ... no parameter of the model requires gradients"),
    (
        lambda: DistributedDataParallel(Net()),
        {},
        "ValueError ... averages the gradients of 2 ranks",
    ),
]


TOLD = " / DisagreementError: fusedcomm: rank 0 cannot attach ... "


def wrong_on_rank_0(make, optimizer=lambda model: SGD(model.parameters(), lr=0.1), **kwargs):
    def wrong(rank):
        model = make()  # on every rank, because DDP is made by all
        made = optimizer(model)
        if rank == 0:
            fusedcomm.LocalSteps(model, made, 10, quiet=True, **kwargs)
        else:
            of_net()

    return wrong


DIFFERENT = [
    ({"every": 10}, {"every": 12}, "every is 10 on rank 0 and 12 on rank 1"),
    ({"every": "20s"}, {"every": "30s"}, "every is '20s' on rank 0 and '30s' on rank 1"),
    ({"every": "20s", "delay": 5}, {"every": 20}, "every is '20s' on rank 0 and 20 on rank 1"),
    ({"delay": 1}, {"delay": 2}, "delay is 1 on rank 0 and 2 on rank 1"),
    ({"config": "int8"}, {"config": "int4"}, "wire is 'int8' on rank 0 and 'int4' on rank 1"),
]


# ---- under way


def replace(model, optimizer):
    model.layers[0].weight = nn.Parameter(torch.zeros(8, 6))


def add(model, optimizer):
    model.extra = nn.Linear(2, 2)


def forget(model, optimizer):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


CHANGES = [
    (lambda model, _: model.layers[0].weight.requires_grad_(False), "layers.0.weight has been frozen"),
    (replace, "layers.0.weight has been replaced"),
    (add, "extra.weight has been added or thawed"),
    (lambda model, _: model.double(), "layers.0.weight has become torch.float64"),
    (forget, "layers.0.weight is no longer in the optimizer"),
]


def begun(run, rank, steps):
    """After these steps."""
    job = Job(run, rank)
    job.train(range(1, steps + 1))
    return job


def changed(change):
    """Every rank changes its model between a snapshot and its merge."""

    def wrong(rank):
        job = begun(Run(every=4, delay=2), rank, steps=5)
        before = job.merged()
        change(job.model, job.optimizer)
        try:
            job.optimizer.step()
        finally:
            assert torch.equal(job.merged(), before)
            job.comm.detach()

    return wrong


def one_bit(of_rank):
    """One rank's merged state is changed in one bit."""

    def wrong(rank):
        job = begun(Run(every=2, delay=0), rank, steps=3)
        if rank == of_rank:
            job.comm.merges.state.anchor.view(torch.int32)[17] ^= 1
        try:
            job.train([4])
        finally:
            job.comm.detach()

    return wrong


# ---- states


def loading(change):
    """A state of this job is loaded, and then with `change`, a function."""

    def wrong(rank):
        job = begun(Run(every=4, delay=1), rank, steps=5)
        job.comm.finish()
        saved = job.comm.state_dict()
        job.comm.load_state_dict(saved)
        try:
            job.comm.load_state_dict(change(saved))
        finally:
            job.comm.detach()

    return wrong


def finishes_detached(rank):
    job = begun(Run(every=4, delay=1), rank, steps=5)
    for _ in range(2):
        job.comm.detach()
    job.comm.finish()


def loads_unfinished(rank):
    job = begun(Run(every=4, delay=1), rank, steps=5)
    try:
        job.comm.load_state_dict({})
    finally:
        job.comm.detach()


STATES = [
    (lambda saved: {}, "no state of LocalSteps: missing"),
    (lambda saved: {**saved, "version": 3}, "version 3 ... make a new LocalSteps"),
    (
        lambda saved: {**saved, "schedule": {**saved["schedule"], "every": 9}},
        "every=9, and here it is 4",
    ),
    (lambda saved: {**saved, "wire": "int8"}, "wire='int8', and here it is 'fp32'"),
    (lambda saved: {**saved, "parameters": 1}, "not those that were saved ... load the model"),
]


# ---- inside hosts


def inside(make, group="hosts"):
    """LocalSteps of make(mesh of two hosts of two ranks), merged by the group of ranks with the same shard, by all, or
    by "crossed" ones."""

    def wrong(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "shards"))
        crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][rank % 3 != 0]
        groups = {"all": None, "crossed": crossed, "hosts": mesh.get_group("hosts")}
        model = make(mesh)
        optimizer = SGD(model.parameters(), lr=0.1)
        fusedcomm.LocalSteps(model, optimizer, 5, quiet=True, process_group=groups[group])

    return wrong


BOTH = "'0 of 2 along Shard(dim=0)' on ... '1 of 2 along Shard(dim=0)' on ... rank {rank} of the job"
SHARDS = [
    (
        inside(lambda mesh: fully_shard(Narrow(), mesh=mesh["shards"]), "all"),
        "ValueError ... layers.0.weight is sharded over the ranks [ ... the same shard, one of each",
    ),
    (
        inside(lambda mesh: fully_shard(Narrow(), mesh=mesh)),  # HSDP over hosts
        "ValueError ... replicated over the ranks [ ... nothing to merge",
    ),
    (
        inside(lambda mesh: fully_shard(Net(), mesh=mesh["shards"]), "crossed"),
        f"DisagreementError ... shards.layers.0.weight is ... {BOTH}",
    ),
    (
        inside(lambda mesh: fully_shard(nn.Linear(4, 4), mesh=mesh["shards"]), "crossed"),  # shards of equal shape
        f"DisagreementError ... shards.weight is ... {BOTH}",
    ),
]
ONE_BIT = "RuntimeError ... on rank {rank}, before merge 1 ... not the same on every rank"
ROWS = [
    *rows(
        "LocalSteps",
        1,
        [(lambda _, given=given: of_net(**given), f"ValueError: ... {text}") for given, text in ARGUMENTS],
    ),
    *rows(
        "LocalSteps",
        2,
        [(wrong_on_rank_0(make, **given), text.replace(" ... ", TOLD, 1)) for make, given, text in MODELS],
    ),
    *rows(
        "LocalSteps",
        3,
        [(differ(of_net, one, other), f"DisagreementError ... {text}") for one, other, text in DIFFERENT],
        is_same=True,
    ),
    *rows(
        "LocalSteps",
        2,
        [(changed(change), f"RuntimeError ... rank {{rank}}: {text} ... detach()") for change, text in CHANGES],
    ),
    *rows("LocalSteps", 2, [(one_bit(of_rank=1), ONE_BIT)]),
    *rows("LocalSteps", 4, [(one_bit(of_rank=3), ONE_BIT)]),
    *rows("LocalSteps", 2, [(loading(change), f"ValueError ... {text}") for change, text in STATES]),
    *rows("LocalSteps", 2, [(finishes_detached, "RuntimeError ... is detached")]),
    *rows("LocalSteps", 2, [(loads_unfinished, "RuntimeError ... 5 steps: call finish() before loading a state")]),
    *rows("LocalSteps", 4, SHARDS),
]
