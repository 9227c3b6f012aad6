"""LocalSteps: weights, master copies, hosts, statistics and plan."""

import json

import pytest
import torch
import torch.distributed as dist
from plain_simulation import Net, Run
from test_local_state import begun
from test_local_steps import flat, local_steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm


class Given(torch.optim.Optimizer):
    """Adds what a test says to each parameter."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(parameter.grad.to(parameter.dtype))


def moved(parameters, optimizer, amount):
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, amount)
    optimizer.step()


def linear(numel=4):
    """A parameter of zeros, whose sums of small whole numbers are exact."""
    model = nn.Linear(numel, numel, bias=False)
    nn.init.zeros_(model.weight)
    return model


# ---- weights


def weighted_by_steps(rank, world_size):
    model = linear()
    optimizer = Given(model.parameters())
    comm = fusedcomm.LocalSteps(model, optimizer, 8, config="fp32", weights="steps", quiet=True)
    for _ in range(2 + rank):
        moved(model.parameters(), optimizer, 6.0)
    comm.finish()
    comm.detach()
    return model.weight.unique().tolist()


def test_a_rank_with_more_steps_weighs_more(ranks):
    assert ranks.run(weighted_by_steps, world_size=2) == [[pytest.approx((2 * 12 + 3 * 18) / 5)]] * 2


# ---- the optimizer's own copies


def master_copies(rank, world_size):
    model = linear().to(torch.bfloat16)
    master = nn.Parameter(model.weight.detach().float())
    optimizer = Given([master])
    comm = fusedcomm.LocalSteps(model, optimizer, 2, delay=0, config="fp32", masters={"weight": master}, quiet=True)
    for _ in range(2):
        moved([master], optimizer, 1.0 + rank / 512)
        model.weight.data.copy_(master)
    comm.detach()
    return master[0, 0].item(), model.weight[0, 0].item()


def test_an_optimizers_own_copies_are_merged_and_the_model_refreshed(ranks):
    mean = 2.0 + 1 / 512
    assert ranks.run(master_copies, world_size=2) == [(mean, torch.tensor(mean).bfloat16().item())] * 2


# ---- hosts


def over_hosts(rank, world_size):
    """Two hosts of two ranks: DDP inside a host, merges between them."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    run = Run("corrected", every=3, delay=1, fragments=2)
    ddp = DistributedDataParallel(Net(), process_group=groups[rank // 2])
    optimizer = run.optimizer(ddp)
    config = fusedcomm.Config("int8", hosts=fusedcomm.TwoLevels(2, local_wire="fp32"), feedback=fusedcomm.Feedback())
    comm = local_steps(run, ddp, optimizer, config)
    for step in range(1, 14):
        run.step(ddp, optimizer, rank, step)
    local = flat(ddp).clone()
    comm.finish()
    comm.detach()
    return local, flat(ddp)


def test_hosts_train_with_ddp_inside_and_merge_between(ranks):
    outcomes = ranks.run(over_hosts)
    locals_ = [local for local, _ in outcomes]
    assert torch.equal(locals_[0], locals_[1]) and torch.equal(locals_[2], locals_[3])
    assert not torch.equal(locals_[0], locals_[2])
    assert all(torch.equal(merged, outcomes[0][1]) for _, merged in outcomes)


# ---- what is told


def told(rank, world_size, path):
    run = Run("nesterov", every=4, delay=2, fragments=2, width=100)
    model, optimizer, comm = begun(run, "int4")
    with comm.trace(path):
        for step in range(1, 13):
            run.step(model, optimizer, rank, step)
    stats, plan = comm.stats(), comm.plan(bits_s=1e6, step_s=1e-3)
    comm.detach()
    blocking = begun(Run("average", every=4, delay=0))[2]
    waits = blocking.plan(bits_s=1e6, step_s=1e-3)
    blocking.detach()
    assert waits.least_every is waits.least_delay is None
    assert "every merge waits for them" in str(waits) and "hides" not in str(waits)
    return stats, plan, str(plan)


def test_statistics_plan_and_trace(ranks, tmp_path):
    for stats, plan, text in ranks.run(told, str(tmp_path / "{rank}.json"), world_size=2):
        assert (stats.steps, stats.merges, stats.under_way) == (12, 5, 1)
        assert 0 < stats.agreement <= 1 and 0 < stats.drift < 1 and stats.step_ms > 0
        assert stats.scalars()["merges"] == 5 and "drift" in str(stats)
        # The first fragment has few elements.
        assert [row.wire for row in plan.fragments] == ["fp32", "int4"] and "late, fp32 and int4, 2 ranks" in text
        assert plan.state_nbytes == plan.outer_nbytes == 4 * sum(row.numel for row in plan.fragments)
        assert plan.sent_nbytes == sum(row.sent_nbytes for row in plan.fragments)
        assert plan.line_s == pytest.approx(8e-6 * plan.sent_nbytes)
        of_message = max(row.line_nbytes for row in plan.fragments) * plan.s_per_byte
        assert (plan.least_delay - 1) * 1e-3 < 1.1 * of_message <= plan.least_delay * 1e-3
        assert plan.least_every == max(plan.least_delay + 1, -(-1.1 * plan.line_s // 1e-3))
        assert "memory" in text and f"every={plan.least_every} is the least" in text
    names = {event.get("name", "") for event in json.loads((tmp_path / "1.json").read_text())["traceEvents"]}
    assert any("pack" in name or "sum" in name for name in names), names
