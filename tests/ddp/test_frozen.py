"""A handle of a module that is frozen when it is attached: DDP's reducer keeps the parameters that it began with."""

import pytest
import torch
from models import Gradients, error_of, integers, mean_of_integers, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config

SHAPES = ((80, 64), (7,))


def gradients_of(rank):
    return [integers(rank, shape) for shape in SHAPES]


MEANS = [mean_of_integers(2, shape) for shape in SHAPES]


def all_frozen(rank, world_size, kwargs):
    ddp = DistributedDataParallel(Gradients(*SHAPES))
    ddp.requires_grad_(False)
    comm = fusedcomm.attach(ddp, **kwargs, quiet=True)
    without = comm.plan()
    ddp(gradients_of(rank))
    ddp.requires_grad_(True)
    thawed = comm.plan()
    means = synchronize(ddp, gradients_of(rank), steps=2)
    ddp.requires_grad_(False)
    return without, thawed, means, comm.plan()


@pytest.mark.parametrize(
    "kwargs",
    [{"config": "fp32"}, {"config": Config("int8", wires={"weights.*": "fp32"})}, {"config": "auto"}],
    ids=str,
)
def test_of_a_frozen_module_there_is_a_plan_without_buckets_and_training_begins_when_it_is_thawed(ranks, kwargs):
    says = "no parameter requires gradients: nothing is sent until one does"
    for without, thawed, means, after in ranks.run(all_frozen, kwargs, world_size=2):
        assert without.buckets == () and without.sent_nbytes == 0 and without.frozen
        assert says in str(without) and "each rank sends" not in str(without)
        assert [row.parameters for row in thawed.buckets] == [("weights.1", "weights.0")] and not thawed.frozen
        assert says not in str(thawed) and "weights.1 … weights.0 (2)" in str(thawed)
        assert all(torch.equal(a, b) for a, b in zip(means, MEANS, strict=True))
        assert says in str(after)


def test_a_pattern_of_a_frozen_module_is_checked_against_all_its_parameters(ranks):
    for error in ranks.run(refused_when_frozen, world_size=2):
        assert "'weigths.*' matches none of the 2 parameters" in error


def refused_when_frozen(rank, world_size):
    ddp = DistributedDataParallel(Gradients(*SHAPES))
    ddp.requires_grad_(False)
    return error_of(ValueError, fusedcomm.attach, ddp, Config(wires={"weigths.*": "fp32"}), quiet=True)
