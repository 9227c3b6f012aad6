"""Parameters that are frozen and trained again while fusedcomm is attached. DDP's reducer keeps the parameters that it
began with."""

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


def frozen_between_steps(rank, world_size, attached, frozen, ddp_kwargs):
    ddp = DistributedDataParallel(Gradients(*SHAPES), find_unused_parameters=True, **ddp_kwargs)
    if attached:
        fusedcomm.attach(ddp, "fp32", quiet=True)
    seen = []
    for step in range(6):
        ddp.module.weights[frozen].requires_grad_(step not in (2, 3))
        ddp.zero_grad(set_to_none=True)
        ddp([gradient * (step + 1) for gradient in gradients_of(rank)]).backward()
        seen.append([None if weight.grad is None else weight.grad.clone() for weight in ddp.module.weights])
    return seen


@pytest.mark.sampled
@pytest.mark.parametrize("ddp_kwargs", [{}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}], ids=str)
@pytest.mark.parametrize("frozen", [0, 1])
def test_parameters_frozen_for_some_steps_are_as_ddp_has_them_without(ranks, frozen, ddp_kwargs):
    plain = ranks.run(frozen_between_steps, False, frozen, ddp_kwargs, world_size=2)
    ours = ranks.run(frozen_between_steps, True, frozen, ddp_kwargs, world_size=2)
    for steps in (*ours, *plain):
        for step, gradients in enumerate(steps):
            for index, gradient in enumerate(gradients):
                if index == frozen and step in (2, 3):
                    assert gradient is None
                else:
                    assert torch.equal(gradient, MEANS[index] * (step + 1))
