"""What Members refuses, and what reducers refuse whose ranks come and go, each with the line to write instead."""

import copy
import threading

import torch
import torch.distributed as dist
from models import Mlp
from refusals import rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward

import fusedcomm

INSTEAD = "fusedcomm.DataParallel(module, config=…, members=members)"
SHARDED = f"ValueError ... members= ... FSDP2 ... {INSTEAD}"
IN_BACKWARD = "_apply_optimizer_in_backward ... after backward()"


def given(call, **kwargs):
    """Calls with new members, which leave afterwards. `kwargs`: of the members."""

    def wrong(_):
        with fusedcomm.Members(**kwargs) as members:
            call(members)

    return wrong


def parallel(members, **kwargs):
    return fusedcomm.DataParallel(Mlp(), members=members, quiet=True, **kwargs)


def sharded(replicas):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")) if replicas else None
    return fully_shard(Mlp(), mesh=mesh)


FRONT_ENDS = [
    fusedcomm.attach,
    fusedcomm.GradReducer,
    lambda model, config, **kwargs: fusedcomm.DataParallel(model, config=config, **kwargs),
]


def steps_in_a_hook(members):
    model = parallel(members)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: optimizer.step())
    model(torch.ones(2, 10)).sum().backward()


def steps_in_backward(members):
    model = Mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    fusedcomm.DataParallel(model, members=members)


def steps_in_backward_alone(rank):
    """Rank 0 has left."""
    with fusedcomm.Members() as members:
        if rank == 0:
            members.leave()
        dist.barrier()
        steps_in_backward(members)


def refused_state(state):
    return given(lambda members: members.load_state_dict(state))


def loaded_late(members):
    model = parallel(members)
    model(torch.ones(2, 10)).sum().backward()
    members.load_state_dict({"step": 6, "num_microbatches": 12})


def loaded_by_one(rank):
    with fusedcomm.Members() as members:
        model = parallel(members)
        if rank == 1:
            members.load_state_dict({"step": 6, "num_microbatches": 12})
        model(torch.ones(2, 10)).sum().backward()


def sampler_of(members):
    return fusedcomm.MembersSampler(range(48), members, batch_size=4)


def of_another_sampler(members):
    sampler = sampler_of(members)
    sampler.load_state_dict({**sampler.state_dict(), "batch_size": 8})


def asks_in_advance(members):
    parallel(members)
    list(sampler_of(members))


def of_a_copy(members):
    copied = copy.deepcopy(parallel(members))
    with torch.no_grad():
        copied(torch.ones(2, 10))
    copied(torch.ones(2, 10))


def has_left(rank):
    with fusedcomm.Members() as members:
        model = parallel(members)
    model(torch.ones(2, 10)).sum().backward()


class Lock:
    def state_dict(self):
        return {"value": [threading.Lock()]}

    def load_state_dict(self, state):
        raise AssertionError


def carries_a_lock(members):
    parallel(members)
    try:
        members.carry(good=torch.optim.SGD(Mlp().parameters(), lr=0.1), bad=Lock())
    finally:
        assert members.carried == {}


ROWS = [
    *rows(
        "Members",
        2,
        [
            (lambda _: fusedcomm.Members(min_ranks=3), "ValueError ... min_ranks=3 ... with 2 ranks: start more"),
            (lambda _: fusedcomm.Members(min_ranks=0), "ValueError: ... min_ranks=0"),
            (lambda _: fusedcomm.Members(silence=0), "ValueError: ... silence=0"),
            *(
                (given(lambda members, r=r, f=front_end: f(sharded(r), "int8", members=members)), SHARDED)
                for r in (False, True)
                for front_end in FRONT_ENDS
            ),
            (given(steps_in_a_hook), "RuntimeError ... SGD.step() was called within a backward pass"),
            (steps_in_backward_alone, f"RuntimeError: ... {IN_BACKWARD}"),
            (given(lambda members: members.share), "RuntimeError ... needs Members(microbatches=…)"),
            (given(lambda members: (parallel(members), parallel(members))), "ValueError ... another reducer"),
            (refused_state([]), "ValueError ... found a list"),
            (refused_state({"step": 1}), "ValueError ... found ['step']"),
            (refused_state({"step": -1, "num_microbatches": 0}), "ValueError ... state['step']"),
            (given(loaded_late), "RuntimeError ... have made 1 steps: load it on every rank before the first one"),
            (given(of_another_sampler), "ValueError ... saved with batch_size=8, and here it is 4"),
            (given(asks_in_advance), "RuntimeError ... Workers of a DataLoader ask in advance: use num_workers=0"),
            (given(of_a_copy), "RuntimeError ... a copy of Members ... without gradients"),
            (has_left, "RuntimeError ... has left the members: to come back make new Members"),
            (given(lambda members: setattr(members, "min_rank", 3)), "AttributeError: ... did you mean 'min_ranks'?"),
            (given(lambda members: members.adress), "AttributeError ... has no 'adress', but"),
            (given(carries_a_lock), "TypeError ... carry(bad=…).state_dict()['value'][0] is a _thread.lock"),
        ],
    ),
    *rows(
        "Members",
        2,
        [(loaded_by_one, "RuntimeError ... rank 0 at step 0 after 0, rank 1 at step 6 after 12 ... on every rank")],
        is_same=True,
    ),
]
