"""Front ends on one model: a second one is refused, or takes over, by one table."""

import copy
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from models import Mlp, refusal
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
import fusedcomm.horovod as hvd


def local_steps(model, optimizer=None):
    return fusedcomm.LocalSteps(model, optimizer or sgd(model), 4, config="fp32", quiet=True)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def attached(model):
    ddp = DistributedDataParallel(model)
    model.__dict__.setdefault("ddps", []).append(ddp)  # lives as long as the model
    return fusedcomm.attach(ddp, "bf16", quiet=True)


FRONT_ENDS = {
    "fusedcomm.attach": attached,
    "a fusedcomm.GradReducer": lambda model: fusedcomm.GradReducer(model, "bf16", quiet=True),
    "a fusedcomm.DataParallel": lambda model: fusedcomm.DataParallel(model, config="bf16", quiet=True),
    "LocalSteps": local_steps,
    "a hvd.DistributedOptimizer": lambda model: hvd.DistributedOptimizer(sgd(model), model.named_parameters()),
}
TAKES_OVER = [(name, name) for name in ("a fusedcomm.DataParallel", "a hvd.DistributedOptimizer")]


def detach(made):
    getattr(getattr(made, "comm", made), "detach", lambda: None)()


def pairs(rank, world_size):
    """The texts of the refusals; "" where the second one was made. A model is free again when the first one is gone."""
    hvd.init()
    found = {}
    for first, second in itertools.product(FRONT_ENDS, repeat=2):
        model = Mlp()
        made, later = FRONT_ENDS[first](model), None
        if (first, second) in TAKES_OVER:
            later, found[first, second] = FRONT_ENDS[second](model), ""
        else:
            found[first, second] = refusal(FRONT_ENDS[second], model)
        if first == second == "a hvd.DistributedOptimizer":
            assert "newer hvd.DistributedOptimizer" in refusal(made.step)
        detach(made)
        detach(later)
        del made, later
        model.__dict__.pop("ddps", None)
        gc.collect()  # a DistributedDataParallel, and a distributed optimizer
        detach(FRONT_ENDS[second](model))
    hvd.shutdown()
    return found


@pytest.mark.check
def test_a_second_front_end_of_a_parameter_is_refused_or_takes_over(ranks):
    for found in ranks.run(pairs, world_size=2):
        for (first, second), text in found.items():
            if (first, second) in TAKES_OVER:
                continue
            # DistributedDataParallel's own hooks are named where nothing is attached to it.
            others = (first, "a DistributedDataParallel") if first == "fusedcomm.attach" else (first,)
            second = "a fusedcomm.GradReducer" if second == "a fusedcomm.DataParallel" else second
            expected = [f"ValueError: fusedcomm: {each} already synchronizes the parameter" for each in others]
            assert text.startswith(tuple(expected)) and f"and {second} would do it a second time" in text, text


def quantized(rank, world_size):
    """Serves a model with integers, which are frozen and have no gradient, by every front end."""
    hvd.init()
    for make in FRONT_ENDS.values():
        model = Mlp()
        model.codes = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
        detach(make(model))
    hvd.shutdown()


def test_parameters_that_have_no_gradient_are_left_alone(ranks):
    ranks.run(quantized, world_size=2)


def on_one_rank(rank, world_size, second):
    model = Mlp()
    made = fusedcomm.GradReducer(model, "bf16", quiet=True)
    text = refusal(FRONT_ENDS[second], model if rank == 1 else Mlp())
    made.detach()
    return text


@pytest.mark.parametrize("second", ["fusedcomm.attach", "LocalSteps"])
def test_what_one_rank_refuses_every_rank_is_told(ranks, second):
    for text in ranks.run(on_one_rank, second, world_size=2):
        assert "a fusedcomm.GradReducer already synchronizes the parameter" in text


def shared(rank, world_size):
    """Halves of a model, copies, and sums within hosts are no second front end."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    comms = [local_steps(model[0]), fusedcomm.GradReducer(model[1], "bf16", quiet=True)]
    comms += [local_steps(copy.deepcopy(model))]
    own, _ = dist.new_subgroups(1)
    for attaches_first in (True, False):
        ddp = DistributedDataParallel(Mlp(), process_group=own)
        makers = [lambda ddp=ddp: fusedcomm.attach(ddp, "bf16", quiet=True), lambda ddp=ddp: local_steps(ddp)]
        comms += [maker() for maker in (makers if attaches_first else makers[::-1])]
        assert "LocalSteps takes the DistributedDataParallel" in refusal(local_steps, ddp.module)
    reducer = fusedcomm.GradReducer(sharded := Mlp(), "bf16", quiet=True)
    optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=0.1, quiet=True)
    assert "a fusedcomm.GradReducer already" in refusal(local_steps, sharded, optimizer)
    for comm in [*comms, reducer]:
        comm.detach()


def test_halves_copies_and_sums_within_hosts_may_be_served_by_two(ranks):
    ranks.run(shared, world_size=2)
