"""LocalSteps: warm-up, weights, blocks, master copies, moved and averaged state, hosts, statistics and plan."""

import json
import warnings

import pytest
import torch
import torch.distributed as dist
from plain_simulation import Net, Run
from test_local_state import begun
from test_local_steps import flat, local_steps
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
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


def weighted(rank, world_size, weights):
    model = linear()
    optimizer = Given(model.parameters())
    comm = fusedcomm.LocalSteps(model, optimizer, 2, merge="average", config="fp32", weights=weights, quiet=True)
    values = []
    for window in range(3):
        for _ in range(2):
            if weights == "given":
                comm.add_weight((rank + 1) * 500 if window else 8 * rank)
            moved(model.parameters(), optimizer, 4.0 * (rank + 1) * (-1) ** window)
        values.append(model.weight.unique().tolist())
    comm.detach()
    return values


def test_given_weights_count_each_window_of_each_rank(ranks):
    # Two ranks go 8 and 16 in the first window; the first has the weight 0. Then they weigh as 1 to 2.
    after = [16.0, 16 - (8 + 2 * 16) / 3, 16.0]
    for values in ranks.run(weighted, "given", world_size=2):
        assert [value for (value,) in values] == pytest.approx(after, rel=1e-6)


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


# ---- blocks


def in_blocks(rank, world_size):
    model = nn.Sequential(linear(128), nn.LayerNorm(128))
    optimizer = Given(model.parameters())
    comm = fusedcomm.LocalSteps(model, optimizer, 1, config="int8", sparse=0.25, seed=5, quiet=True)
    seen = []
    for _ in range(4):
        moved(model.parameters(), optimizer, 2.0 * rank)
        merged = model[0].weight.flatten().view(-1, 1024)
        seen.append((merged[:, 0].tolist(), model[1].bias.unique().tolist(), model[1].bias.unique().numel()))
        assert (merged == merged[:, :1]).all()
    sent = comm.stats().sent_nbytes
    comm.detach()
    return seen, sent


def test_a_quarter_of_the_blocks_is_merged_at_a_time_and_each_once_in_four_merges(ranks):
    (first, sent), (second, _) = ranks.run(in_blocks, world_size=2)
    merged = set()
    for step, (ours, theirs) in enumerate(zip(first, second, strict=True), start=1):
        same = {block for block in range(16) if ours[0][block] == theirs[0][block]}
        assert len(same) == 4 and not same & merged  # merged earlier, and different again since
        assert all(ours[0][block] == step for block in same)
        merged |= same
        assert ours[1] == theirs[1] == [step]
    assert merged == set(range(16))
    assert sent < 2 * 16384


# ---- warm-up and the optimizer's state


def warmed_up(rank, world_size):
    """The steps after which the ranks' parameters are equal, and whether they are those of DDP in the warm-up."""
    run = Run("corrected", every=4, delay=2)
    model, optimizer, comm = begun(run, warmup=5)
    ddp = DistributedDataParallel(Net())
    of_ddp = run.optimizer(ddp)
    equal, as_ddp = [], []
    for step in range(1, 9):
        run.step(model, optimizer, rank, step)
        run.step(ddp, of_ddp, rank, step)
        everybodys = [torch.empty_like(flat(model)) for _ in range(world_size)]
        dist.all_gather(everybodys, flat(model))
        equal.append(all(torch.equal(each, everybodys[0]) for each in everybodys))
        as_ddp.append(torch.allclose(flat(model), flat(ddp), rtol=1e-5, atol=1e-7))
    comm.detach()
    return equal, as_ddp


def test_the_warm_up_averages_gradients_in_every_step(ranks):
    for equal, as_ddp in ranks.run(warmed_up, world_size=2):
        assert equal == as_ddp == [True] * 5 + [False] * 3


def averaged_state(rank, world_size, state):
    model = Net()
    run = Run("average", every=3, delay=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    comm = local_steps(run, model, optimizer, state=state)
    for step in range(1, 7):
        run.step(model, optimizer, rank, step)
    comm.detach()
    return torch.cat([s[key].flatten() for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")])


@pytest.mark.parametrize("state", ["local", "average"])
def test_the_optimizers_state_stays_local_or_is_averaged(ranks, state):
    first, second = ranks.run(averaged_state, state, world_size=2)
    assert torch.equal(first, second) == (state == "average")


def no_state(rank, world_size):
    """SGD without momentum has none; torch's ZeroRedundancyOptimizer keeps it elsewhere."""
    for optimizer_of in (lambda p: torch.optim.SGD(p, 0.1), lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam)):
        run, model = Run("average", every=1, delay=0), Net()
        optimizer = optimizer_of(model.parameters())
        comm = local_steps(run, model, optimizer, state="average")
        with pytest.raises(ValueError, match="state='average' averages what .*state has, and it is empty"):
            run.step(model, optimizer, rank, 1)
        comm.detach()


def test_a_state_that_is_not_the_optimizers_is_not_averaged_in_silence(ranks):
    ranks.run(no_state, world_size=2)


class Shadowed(Given):
    """Has a state that lies where the parameter lies, as schedule-free optimizers have."""

    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            shadow = self.state[parameter].setdefault("z", torch.zeros_like(parameter))
            shadow.add_(2 * parameter.grad)


def shadowed(rank, world_size):
    model = linear()
    optimizer = Shadowed(model.parameters())
    comm = fusedcomm.LocalSteps(model, optimizer, 2, delay=1, config="fp32", moves=("z",), quiet=True)
    for _ in range(3):
        moved(model.parameters(), optimizer, 1.0 + 2 * rank)
    comm.detach()
    return model.weight[0, 0].item(), optimizer.state[model.weight]["z"][0, 0].item()


def test_state_that_lies_where_the_parameters_lie_moves_with_them(ranks):
    # After two steps the ranks are at 2 and 6. The merge after the third adds +2 and −2.
    assert ranks.run(shadowed, world_size=2) == [(3.0 + 2, 6.0 + 2), (9.0 - 2, 18.0 - 2)]


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


def drifting(rank, world_size):
    model = linear()
    nn.init.ones_(model.weight)
    optimizer = Given(model.parameters())
    comm = fusedcomm.LocalSteps(model, optimizer, 1, config="fp32", quiet=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(16):
            moved(model.parameters(), optimizer, (1 if rank else -1) * (1e-3 if step < 14 else 1e-2))
    comm.detach()
    return [str(each.message) for each in caught]


def test_a_leap_of_the_drift_is_said_once_by_rank_0(ranks):
    (text,), nothing = ranks.run(drifting, world_size=2)
    assert "drift apart" in text and "0.01 of the parameters' norm" in text and nothing == []
