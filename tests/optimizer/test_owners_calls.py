"""What people give a ShardedOptimizer, and calls that one rank makes alone: each is right, or one sentence on every
rank within seconds."""

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from models import on_host, reducer_of, refusal
from owners import BUCKET_MIB, FP32, Net, Way, flat, loss_of, made, one_step, sharded, train, whole
from patience import patient
from torch import nn

import fusedcomm
import fusedcomm.optimizer.state

# ---- on one rank alone

CALLS = {
    "state_dict()": lambda model, reducer, optimizer: optimizer.state_dict(),
    "load_state_dict()": lambda model, reducer, optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "grad_norm()": lambda model, reducer, optimizer: optimizer.clip_grad_norm_(1.0),
    "making a ShardedOptimizer": lambda model, reducer, optimizer: sharded(model, reducer),
}


def alone(rank, world_size, call, then):
    """Rank 0 makes the call, the others go on. (error, seconds until then)."""
    if call.startswith("making"):
        torch.manual_seed(5)
        model, optimizer = Net(), None
        reducer = reducer_of(model, FP32)
    else:
        model, reducer, optimizer = made()
        one_step(model, optimizer, rank, 0)
    if then == "its step":
        optimizer.zero_grad()
        loss_of(model, rank, 1).backward()
    dist.barrier()
    began = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        if rank == 0:
            CALLS[call](model, reducer, optimizer)
        elif then == "barrier":
            dist.barrier()
        elif then == "its step":
            optimizer.step()
        one_step(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), rank, 1)
    seconds = time.monotonic() - began
    with pytest.raises(RuntimeError):
        one_step(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), rank, 2)
    return str(error.value), seconds


@pytest.mark.check
@pytest.mark.parametrize(
    ("call", "then"),
    [
        ("state_dict()", "step"),
        ("state_dict()", "barrier"),
        ("grad_norm()", "its step"),
        ("load_state_dict()", "step"),
        ("making a ShardedOptimizer", "step"),
    ],
)
def test_a_call_of_one_rank_alone_says_on_all_where_they_are(ranks, call, then):
    outcomes = ranks.run(alone, call, then, world_size=3, leaves_waiting=True)
    wheres = {"barrier": "called torch.distributed.barrier()", "its step": "waits in step() after backward pass 1"}
    where = wheres.get(then, "waits in backward pass")
    for text, seconds in outcomes:
        assert text.startswith(f"fusedcomm: rank 0 of 3: {call}, a collective call, was made here and not on rank 1")
        assert where in text and text == outcomes[0][0], text
        assert seconds < patient(20)


def not_fatal(rank, world_size):
    """({what: error}, parameters) of calls after which training goes on."""
    model, reducer, optimizer = made(update="fp32")
    found = {
        "before": refusal(optimizer.clip_grad_norm_, 1.0),
        "group": refusal(optimizer.add_param_group, {"params": [nn.Parameter(torch.zeros(3))]}),
    }
    one_step(model, optimizer, rank, 0)
    found["after"] = refusal(optimizer.grad_norm)
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    found["closure"] = refusal(optimizer.step, lambda: 0.0)
    found["norm"] = refusal(optimizer.grad_norm, 1.0)
    assert whole(optimizer.state_dict())["state"]
    optimizer.step()
    optimizer.zero_grad()
    (loss_of(model, rank, 3) * torch.inf).backward()
    found["Inf"] = refusal(optimizer.clip_grad_norm_, 1.0, error_if_nonfinite=True)
    optimizer.skip_step()
    one_step(model, optimizer, rank, 2)
    end = flat(model)
    reducer.detach()
    return found, end


def replicated(rank, world_size):
    return train(Way(), rank, world_size, 3, owners=False)[-1][0]


def test_these_errors_change_nothing_and_training_goes_on(ranks):
    expected = ranks.run(replicated, world_size=2)[0]
    for found, end in ranks.run(not_fatal, world_size=2):
        assert torch.equal(end, expected)
        assert all("Error: fusedcomm: " in text for text in found.values())
        assert "before a backward pass" in found["before"] and "or after step()" in found["after"]
        assert "groups are agreed" in found["group"] and "closure" in found["closure"]
        assert "norm_type=1.0" in found["norm"]
        assert found["Inf"].startswith("RuntimeError: fusedcomm: the norm of the means is ")


# ---- what ranks send


class Code:
    """Leaves a file for each process that unpickles it."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return exec, (f"import os; open(os.path.join({self.folder!r}, str(os.getpid())), 'w').close()",)


def sends_code(rank, world_size, folder):
    model, reducer, optimizer = made()
    one_step(model, optimizer, rank, 0)
    describe = fusedcomm.optimizer.state._description
    if rank == 1:
        fusedcomm.optimizer.state._description = lambda value: Code(folder)
    try:
        return refusal(optimizer.state_dict), sorted(os.listdir(folder))
    finally:
        fusedcomm.optimizer.state._description = describe
        reducer.detach()


def test_no_code_of_another_rank_runs(ranks, tmp_path):
    for text, ran in ranks.run(sends_code, str(tmp_path), world_size=2):
        assert text.startswith("TypeError: fusedcomm: rank 1's part of state_dict()[") and not ran


class Various(torch.optim.SGD):
    """Keeps what optimizers keep: tensors of any shape and dtype, numbers, names (more in tests/members)."""

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                step = self.state[p].get("step", 0) + 1
                rows, mask, count = p.sum(-1, dtype=torch.float64), torch.tensor([True, False]), torch.tensor(step)
                self.state[p] |= {"step": step, "rows": rows, "mask": mask, "count": count, "name": ["é", None]}


def various(rank, world_size):
    torch.manual_seed(5)
    model = Net()
    reducer = reducer_of(model, FP32, bucket_mib=BUCKET_MIB)
    optimizer = fusedcomm.ShardedOptimizer(reducer, Various, quiet=True, update="fp32", lr=0.1)
    one_step(model, optimizer, rank, 0)
    one_step(model, optimizer, rank, 1)
    state = whole(optimizer.state_dict())
    reducer.detach()
    return state, [p.detach().sum(-1, dtype=torch.float64) for p in model.parameters()]


def test_whatever_optimizers_keep_comes_to_every_rank(ranks):
    for state, rows in ranks.run(various, world_size=2):
        assert len(state["state"]) == len(rows)
        for i, row in enumerate(rows):
            found = state["state"][i]
            assert torch.equal(found["rows"], row) and found["mask"].tolist() == [True, False]
            assert (found["step"], found["name"]) == (2, ["é", None])
            assert found["count"].dtype == torch.int64 and found["count"].item() == 2


# ---- where one level sends more


def warned(rank, world_size, hosts):
    """What is warned of on two hosts of two ranks, and what the plan says: MiB that a host sends to the other."""
    with on_host("aabb"[rank]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reducer = reducer_of(nn.Linear(512, 512, bias=False), fusedcomm.Config("fp32", sum="two-shot", hosts=hosts))
        optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, update="fp32", lr=0.1, quiet=True)
    return [str(each.message) for each in caught], 2 * optimizer.plan().sent_between_hosts_nbytes / 2**20


def test_one_level_that_sends_more_between_hosts_than_ddp_is_warned_of_once(ranks):
    (text,), sent_mib = ranks.run(warned, None, world_size=4)[0]
    assert text == (
        "fusedcomm: a host sends 2.00 MiB to others in a step in place of the 1.50 MiB of DDP's own all-reduce, "
        "because sums have one level, not two: hosts=None"
    )
    assert sent_mib == pytest.approx(2, rel=0.01)
    assert ranks.run(warned, None, world_size=4)[1:] == [([], sent_mib)] * 3
    assert ranks.run(warned, "auto", world_size=4) == [([], pytest.approx(1, rel=0.01))] * 4
