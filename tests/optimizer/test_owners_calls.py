"""What people give a ShardedOptimizer, and calls that one rank makes alone: each is right, or one sentence on every
rank within seconds."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from models import reducer_of, refusal
from owners import BUCKET_MIB, FP32, Net, flat, loss_of, made, one_step, sharded
from patience import patient
from test_owners_state import whole

import fusedcomm
import fusedcomm.optimizer.state

ADAMW = torch.optim.AdamW


def with_names(model, form):
    """params= with names, in one of three forms."""
    pairs = list(model.named_parameters())
    if form == "pairs":
        return iter(pairs)
    first, second = {"params": pairs[:3], "lr": 0.01}, {"params": pairs[3:], "lr": 0.003}
    return [first, second] if form == "groups" else [{"params": pairs, "optimizer_class": torch.optim.SGD, "lr": 0.01}]


def named(rank, world_size, form):
    """(names of the groups, parameters after two steps, those of torch's optimizer)."""
    found = []
    for owners in (True, False):
        torch.manual_seed(5)
        model = Net()
        reducer, given = reducer_of(model, FP32, bucket_mib=BUCKET_MIB), with_names(model, form)
        if owners:
            optimizer = fusedcomm.ShardedOptimizer(reducer, ADAMW, given, update="fp32", quiet=True)
        elif form == "class":
            optimizer = torch.optim.SGD([{k: v for k, v in given[0].items() if k != "optimizer_class"}])
        else:
            optimizer = ADAMW(given)
        for step in range(2):
            one_step(model, optimizer, rank, step)
        state = optimizer.state_dict()["param_groups"]
        found.append(([(group["param_names"], group["params"]) for group in state], flat(model)))
        reducer.detach()
    return found


@pytest.mark.parametrize("form", ["pairs", "groups", "class"])
def test_named_parameters_are_taken_as_torchs_optimizers_take_them(ranks, form):
    for (names, parameters), (torchs_names, torchs) in ranks.run(named, form, world_size=2):
        assert names == torchs_names and torch.equal(parameters, torchs)


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
        model, reducer, optimizer = made(overlap=then in ("step", "barrier"))
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


@pytest.mark.parametrize(
    ("call", "then"),
    [
        ("state_dict()", "step"),
        ("state_dict()", "step, without overlap"),
        ("state_dict()", "barrier"),
        ("state_dict()", "its step"),
        ("grad_norm()", "its step"),
        ("load_state_dict()", "step"),
        ("making a ShardedOptimizer", "step"),
        ("making a ShardedOptimizer", "barrier"),
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


def within_a_step(rank, world_size, overlap, early):
    """The ranks `early` take the state between backward() and step(), the others after it. (error, parameters)."""
    model, reducer, optimizer = made(overlap=overlap, update="fp32")
    one_step(model, optimizer, rank, 0)
    optimizer.zero_grad()
    (model(torch.ones(2, 7)) ** 2).mean().backward()
    if rank not in early:
        optimizer.step()
    text = refusal(optimizer.state_dict) if overlap else whole(optimizer.state_dict()) and ""
    if rank in early:
        optimizer.step()
    one_step(model, optimizer, rank, 1)
    reducer.detach()
    return text, flat(model)


@pytest.mark.parametrize(("overlap", "early"), [(True, (0, 1)), (True, (1,)), (False, (0, 1))])
def test_a_state_within_a_step_is_refused_on_all_where_owners_have_stepped(ranks, overlap, early):
    outcomes = ranks.run(within_a_step, overlap, early, world_size=2)
    for text, parameters in outcomes:
        assert text == outcomes[0][0] and torch.equal(parameters, outcomes[0][1])  # and training goes on
        expected = (
            f"RuntimeError: fusedcomm: state_dict() on rank {early[0]}: it was called between backward() and step()"
        )
        assert text.startswith(expected) if overlap else not text


# ---- hyperparameters

RATES = {
    "lr": (
        lambda group, rank: group.update(lr=0.01 * (1 + rank)),
        "param_groups[0].lr is 0.01 on rank 0 and 0.02 on rank 1",
    ),
    "betas": (
        lambda group, rank: group.update(betas=(0.9, 0.99 - 0.01 * rank)),
        "param_groups[0].betas[1] is 0.99 on rank 0 and 0.98 on rank 1",
    ),
    "tensor": (
        lambda group, rank: group.update(lr=torch.tensor(0.5 * (1 + rank))),
        "param_groups[0].lr is 0.5 on rank 0 and 1.0 on rank 1",
    ),
}


def rates(rank, world_size, name, overlap):
    model, reducer, optimizer = made(overlap=overlap)
    one_step(model, optimizer, rank, 0)
    before = flat(model)
    RATES[name][0](optimizer.param_groups[0], rank)
    with pytest.raises(RuntimeError) as error:
        one_step(model, optimizer, rank, 1)
    reducer.detach()
    return str(error.value), torch.equal(flat(model), before)


@pytest.mark.parametrize(("name", "overlap"), [("lr", True), ("lr", False), ("betas", False), ("tensor", True)])
def test_hyperparameters_that_differ_by_rank_are_refused_before_a_step(ranks, name, overlap):
    for text, is_same in ranks.run(rates, name, overlap, world_size=3):
        assert text.startswith(f"fusedcomm: hyperparameters differ: {RATES[name][1]}.") and is_same, text


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
    """Keeps what optimizers keep: tensors of any shape and dtype, numbers, names, and containers of them."""

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                step = self.state[p].get("step", 0) + 1
                self.state[p] |= {
                    "step": step,
                    "rows": p.sum(-1, dtype=torch.float64),
                    "mask": torch.tensor([True, False]),
                    "count": torch.tensor(step),
                    "is_first": step == 1,
                    "nothing": None,
                    "name": "é",
                    "nested": [1, (2.5, "a"), {"b": torch.full((3, 2), float(step), dtype=torch.bfloat16), 4: []}],
                }


def various(rank, world_size):
    torch.manual_seed(5)
    model = Net()
    reducer = reducer_of(model, FP32, bucket_mib=BUCKET_MIB)
    optimizer = fusedcomm.ShardedOptimizer(reducer, Various, quiet=True, overlap=False, update="fp32", lr=0.1)
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
            assert (found["step"], found["is_first"], found["nothing"], found["name"]) == (2, False, None, "é")
            assert found["count"].dtype == torch.int64 and found["count"].item() == 2
            one, two, three = found["nested"]
            assert (one, two, three[4]) == (1, (2.5, "a"), []) and torch.equal(
                three["b"], torch.full((3, 2), 2.0).bfloat16()
            )
