"""What a session was told goes to the one that takes its place: of another group, or a ShardedOptimizer's."""

import pytest
import torch
import torch.distributed as dist
from models import Gradients, normal, reducer_of
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config

SHAPE = (6, 5)
WEIGHTS = [[3.0, 1.0], [5.0, 2.0]]  # [rank][pass]


def expected(weighted: str) -> torch.Tensor:
    """The mean over all tokens of both passes of both ranks."""
    passes = [(weight, normal(rank, i, SHAPE)) for rank, of in enumerate(WEIGHTS) for i, weight in enumerate(of)]
    total = sum(weight for weight, _ in passes)
    return sum((weight if weighted == "mean" else 1) * gradient for weight, gradient in passes) / total


def moved(rank, world_size, weighted):
    """The group changes between a pass that only adds up and the one that sends the sum."""
    other = dist.new_group()
    ddp = DistributedDataParallel(Gradients(SHAPE))
    comm = fusedcomm.attach(ddp, Config("fp32", weighted=weighted), quiet=True)
    comm.weight = WEIGHTS[rank][0]
    with ddp.no_sync():
        ddp([normal(rank, 0, SHAPE)]).backward()
    ddp._update_process_group(other)
    comm.weight = WEIGHTS[rank][1]
    ddp([normal(rank, 1, SHAPE)]).backward()
    return ddp.module.weights[0].grad


@pytest.mark.parametrize("weighted", ["mean", "sum"])
def test_weights_of_passes_that_have_added_up_go_to_the_session_of_another_group(ranks, weighted):
    for gradient in ranks.run(moved, weighted, world_size=2):
        assert torch.allclose(gradient, expected(weighted), rtol=1e-5, atol=1e-6)


def given_before(rank, world_size):
    """The reducer is given a weight, a step and residuals before a ShardedOptimizer takes its session's place."""
    model = Gradients(SHAPE)
    config = Config("fp32", weighted="mean")
    reducer = reducer_of(model, config, every=2)
    reducer.weight = WEIGHTS[rank][0]
    reducer.load_state_dict({**reducer.state_dict(), "step": 7, "nonfinite": {"weights.0": 3}})
    optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, update="fp32", quiet=True, lr=1.0)
    state = reducer.state_dict()
    for i in range(2):
        model([normal(rank, i, SHAPE)]).backward()
    optimizer.step()
    reducer.detach()
    return state["step"], state["nonfinite"], model.weights[0].detach()


def test_what_a_reducer_was_given_goes_to_its_owners_session(ranks):
    weights = [of[0] for of in WEIGHTS]
    passes = [(w, normal(rank, i, SHAPE)) for rank, w in enumerate(weights) for i in range(2)]
    mean = sum(w * gradient for w, gradient in passes) / (2 * sum(weights))
    for step, nonfinite, parameter in ranks.run(given_before, world_size=2):
        assert (step, nonfinite) == (7, {"weights.0": 3})
        assert torch.allclose(parameter, -mean, rtol=1e-5, atol=1e-6)
