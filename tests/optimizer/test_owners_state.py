"""The state of a ShardedOptimizer: any number of ranks loads it, plain optimizers too, and training goes on with it."""

import io

import on_streams
import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import Conv, reducer_of
from owners import BUCKET_MIB, FP32, Net, flat, groups_of, loss_of, made, one_step, plain_optimizers
from sampling import few
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import fusedcomm


def whole(state):
    """A state_dict() with plain tensors."""
    of_tensors = {
        number: {key: v.full_tensor() if isinstance(v, DTensor) else v for key, v in values.items()}
        for number, values in state["state"].items()
    }
    return {"state": of_tensors, "param_groups": state["param_groups"]}


def unequal(a, b):
    """What differs between two states: (number or name, key) of tensors, and keys of groups."""
    found = [] if a["state"].keys() == b["state"].keys() else ["numbers"]
    for number in a["state"].keys() & b["state"].keys():
        mine, other = a["state"][number], b["state"][number]
        if mine.keys() != other.keys():
            found.append((number, sorted(mine.keys() ^ other.keys())))
        for key in mine.keys() & other.keys():
            x, y = torch.as_tensor(mine[key]), torch.as_tensor(other[key])
            if x.shape != y.shape or x.dtype != y.dtype or not torch.equal(x, y):
                found.append((number, key))
    for mine, other in zip(a["param_groups"], b["param_groups"], strict=True):
        found += [key for key in mine.keys() & other.keys() if listed(mine[key]) != listed(other[key])]
    return found


def listed(value):
    """Tuples come back from torch's functions as lists."""
    return list(value) if isinstance(value, tuple) else value


# ---- through torch.distributed.checkpoint


def save(model, optimizer, folder):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(model, optimizer, folder):
    of_model, of_optimizer = get_state_dict(model, optimizer)
    both = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])


def leg(rank, world_size, kind, update, make, loaded, saved, first, last):
    """Trains steps [first, last) from a checkpoint. (state at the beginning, state at the end, parameters at both)."""
    model, reducer, optimizer = made(kind, make, update=update)
    if loaded is not None:
        load(model, optimizer, loaded)
    begun = whole(optimizer.state_dict()), flat(model)
    for step in range(first, last):
        one_step(model, optimizer, rank, step)
    optimizer.zero_grad()
    if saved is not None:
        save(model, optimizer, saved)
    ended = whole(optimizer.state_dict()), flat(model)
    reducer.detach()
    return begun, ended


def bf16_net():
    return Net(torch.bfloat16)


KINDS = {
    "adamw": ("adamw", "fp32", Net),
    "int8": ("adamw", "int8", Net),
    "muon": ("muon", "bf16", Net),
    "bf16 parameters": ("two groups", "bf16", bf16_net),
    "sgd": ("sgd", "fp32", Net),
}


@pytest.mark.parametrize("name", few(KINDS, "int8", "muon", "bf16 parameters"))
def test_two_ranks_then_three_then_two_have_the_state_that_was_saved(ranks, tmp_path, name):
    kind, update, make = KINDS[name]
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first = ranks.run(leg, kind, update, make, None, a, 0, 5, world_size=2)
    second = ranks.run(leg, kind, update, make, a, b, 5, 8, world_size=3)
    third = ranks.run(leg, kind, update, make, b, None, 8, 9, world_size=2)
    for before, after in ((first, second), (second, third)):
        (saved, parameters), (ended, _) = before[0][1], before[0][1]
        assert unequal(saved, ended) == []
        assert any("master" in values for values in saved["state"].values()) == (update != "fp32")
        for (loaded, loaded_parameters), _ in after:
            assert unequal(loaded, saved) == []
            assert torch.equal(loaded_parameters, parameters)
    for _, (_, parameters) in third:
        assert torch.equal(parameters, third[0][1][1]) and not torch.equal(parameters, second[0][1][1])


@pytest.mark.parametrize("name", few(KINDS, "int8", "muon", "bf16 parameters"))
def test_two_ranks_that_load_go_on_as_if_nothing_had_been_interrupted(ranks, tmp_path, name):
    kind, update, make = KINDS[name]
    folder = str(tmp_path / "a")
    ranks.run(leg, kind, update, make, None, folder, 0, 5, world_size=2)
    resumed = ranks.run(leg, kind, update, make, folder, None, 5, 10, world_size=2)
    whole_run = ranks.run(leg, kind, update, make, None, None, 0, 10, world_size=2)
    for (_, (state, parameters)), (_, (expected, others)) in zip(resumed, whole_run, strict=True):
        assert torch.equal(parameters, others) and unequal(state, expected) == []


# ---- plain optimizers


def from_plain_and_back(rank, world_size, kind, make, by_torch):
    """A plain optimizer's state after three steps goes into owners, which train on; then theirs goes into a plain one.
    (differences of the states, whether parameters are those of a plain run)."""
    torch.manual_seed(5)
    plain = make()
    reducer = reducer_of(plain, FP32, bucket_mib=BUCKET_MIB)
    (optimizer,) = plain_optimizers(plain, kind)
    for step in range(3):
        one_step(plain, optimizer, rank, step)
    file = io.BytesIO()
    torch.save((plain.state_dict(), optimizer.state_dict()), file)
    for step in range(3, 6):
        one_step(plain, optimizer, rank, step)
    expected, expected_state = flat(plain), optimizer.state_dict()
    reducer.detach()

    model, reducer, owners = made(kind, make, update="fp32")
    file.seek(0)
    of_model, of_optimizer = torch.load(file)
    model.load_state_dict(of_model)
    owners.load_state_dict(of_optimizer)
    wrong = unequal(whole(owners.state_dict()), of_optimizer)
    for step in range(3, 6):
        one_step(model, owners, rank, step)
    same = [torch.equal(flat(model), expected)]
    wrong += unequal(whole(owners.state_dict()), expected_state)
    for step in range(6, 8):
        one_step(model, owners, rank, step)
    ended = flat(model)
    reducer.detach()

    back = make()
    back.load_state_dict(of_model)
    (again,) = plain_optimizers(back, kind)
    with torch.no_grad():
        for p, value in zip(back.parameters(), plain.parameters(), strict=True):
            p.copy_(value)
    model, reducer, owners = made(kind, make, update="fp32")
    model.load_state_dict(plain.state_dict())
    owners.load_state_dict(expected_state)
    if by_torch:
        options = StateDictOptions(full_state_dict=True)
        full = get_optimizer_state_dict(model, owners, options=options)
        wrong += [name for name in full["state"] if name not in dict(model.named_parameters())]
        set_optimizer_state_dict(back, again, full, options=options)
    else:
        again.load_state_dict(whole(owners.state_dict()))
    wrong += unequal(again.state_dict(), expected_state)
    reducer.detach()
    reducer = reducer_of(back, FP32, bucket_mib=BUCKET_MIB)
    for step in range(6, 8):
        one_step(back, again, rank, step)
    same.append(torch.equal(flat(back), ended))
    reducer.detach()
    return wrong, same


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize(("kind", "make"), [("adamw", Net), ("two groups", Net), ("adamw", Conv), ("sgd", Net)])
def test_a_plain_optimizers_state_goes_in_and_comes_back_bit_for_bit(ranks, kind, make, by_torch, world_size):
    for wrong, same in ranks.run(from_plain_and_back, kind, make, by_torch, world_size=world_size):
        assert wrong == [] and same == [True, True]


# ---- before and between


def early(rank, world_size):
    """torch's functions call a step of zeros if there is no state: here nothing changes by that."""
    model, reducer, optimizer = made(update="bf16")
    before = flat(model)
    found = get_optimizer_state_dict(model, optimizer)
    sums = {key: {k: v.full_tensor().abs().sum().item() for k, v in values.items() if isinstance(v, DTensor)}
            for key, values in found["state"].items()}  # fmt: skip
    same = torch.equal(flat(model), before)
    lr = [group["lr"] for group in optimizer.param_groups]
    for step in range(2):
        one_step(model, optimizer, rank, step)
    reducer.detach()
    return sums, same, lr, flat(model)


def test_a_state_before_the_first_step_is_of_zeros_and_changes_nothing(ranks):
    outcomes = ranks.run(early, world_size=2)
    names = {name for name, _ in Net().named_parameters()}
    for sums, same, lr, parameters in outcomes:
        assert sums.keys() == names and same and lr == [0.01]
        for values in sums.values():
            assert values["exp_avg"] == values["exp_avg_sq"] == 0
        assert torch.equal(parameters, outcomes[0][3])


def own_nbytes(optimizer):
    """Bytes of state of this rank's own optimizers."""
    return sum(
        value.nbytes
        for inner in optimizer._owner.optimizers
        for state in inner.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )


def shares(rank, world_size, kind):
    model, reducer, optimizer = made(kind)
    (plain, *others) = plain_optimizers(model, kind)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for each in (plain, *others):
        each.step()
    replicated = sum(
        value.nbytes for each in (plain, *others) for state in each.state.values() for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )  # fmt: skip
    one_step(model, optimizer, rank, 0)
    plan = optimizer.plan()
    reducer.detach()
    return own_nbytes(optimizer), replicated, plan.state_nbytes, plan.replicated_nbytes, str(plan), plan.owners


@pytest.mark.parametrize("kind", few(["adamw", "sgd", "two groups", "muon"], "adamw", "muon"))
@pytest.mark.parametrize("world_size", few([2, 3, 4], 3))
def test_a_rank_has_its_share_of_the_state_and_the_plan_says_so(ranks, kind, world_size):
    numels = {name: p.numel() for name, p in Net().named_parameters()}
    outcomes = ranks.run(shares, kind, world_size=world_size)
    assert sum(own for own, *_ in outcomes) == outcomes[0][1]
    for rank, (own, replicated, planned, planned_whole, text, owners) in enumerate(outcomes):
        assert planned == own and planned_whole == replicated
        # Three blocks of one shape and matrices of other sizes cannot be shared out evenly among two or four.
        assert own == pytest.approx(replicated / world_size, rel=0.1 if kind != "muon" else 0.5)
        assert {name: sum(of_ranks) for name, of_ranks in owners.items()} == numels
        assert f"state of rank {rank}" in text and f"{world_size} ranks" in text
        assert owners == outcomes[0][5]


def loads_what_does_not_fit(rank, world_size):
    """Texts of the errors. The optimizer goes on."""
    model, reducer, optimizer = made("two groups")
    one_step(model, optimizer, rank, 0)
    saved = whole(optimizer.state_dict())
    others = {
        "groups": {**saved, "param_groups": saved["param_groups"][:1]},
        "lengths": {
            **saved,
            "param_groups": [{**g, "params": g["params"][1:]} if i else g for i, g in enumerate(saved["param_groups"])],
        },
        "shapes": {**saved, "state": {**saved["state"], 0: {**saved["state"][0], "exp_avg": torch.zeros(3, 3)}}},
    }
    texts = {}
    for name, state in others.items():
        with pytest.raises(ValueError) as error:
            optimizer.load_state_dict(state)
        texts[name] = str(error.value)
    wrong = unequal(whole(optimizer.state_dict()), saved)
    one_step(model, optimizer, rank, 1)
    reducer.detach()
    return texts, wrong, flat(model)


def test_states_of_other_groups_and_shapes_are_refused_and_change_nothing(ranks):
    outcomes = ranks.run(loads_what_does_not_fit, world_size=2)
    for texts, wrong, parameters in outcomes:
        assert all(text.startswith("fusedcomm: ") for text in texts.values())
        assert "groups of" in texts["groups"] and "groups of" in texts["lengths"]
        assert "exp_avg of embed.weight has the shape [3, 3]" in texts["shapes"] and "[33, 7]" in texts["shapes"]
        assert wrong == [] and torch.equal(parameters, outcomes[0][2])


def hyperparameters(rank, world_size):
    """A loaded state has the groups' hyperparameters, and a scheduler goes on from them."""
    model, reducer, optimizer = made("two groups", update="fp32", overlap=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        one_step(model, optimizer, rank, step)
        scheduler.step()
    states = optimizer.state_dict(), scheduler.state_dict(), model.state_dict()
    reducer.detach()
    other, reducer, again = made("two groups", update="fp32", overlap=False)
    other.load_state_dict(states[2])
    again.load_state_dict(states[0])
    goes_on = torch.optim.lr_scheduler.ExponentialLR(again, 0.5)
    goes_on.load_state_dict(states[1])
    loss_of(other, rank, 3).backward()
    again.step()
    goes_on.step()
    rates = [group["lr"] for group in again.param_groups]
    reducer.detach()
    return rates, [group["lr"] for group in groups_of(other, "two groups")]


def test_learning_rates_of_schedulers_come_with_the_state(ranks):
    for rates, first in ranks.run(hyperparameters, world_size=2):
        assert rates == pytest.approx([rate / 16 for rate in first], rel=1e-12)


def detached(rank, world_size, device="cpu"):
    with torch.device(device):
        wrong, parameters = taken_over(rank)
    return wrong, parameters.cpu()


def taken_over(rank):
    model, reducer, optimizer = made("adamw", update="fp32")
    for step in range(2):
        one_step(model, optimizer, rank, step)
    state = whole(optimizer.state_dict())
    reducer.detach()
    reducer = reducer_of(model, FP32, bucket_mib=BUCKET_MIB)
    other = fusedcomm.ShardedOptimizer(reducer, torch.optim.AdamW, update="fp32", quiet=True, lr=0.01)
    other.load_state_dict(state)
    wrong = unequal(whole(other.state_dict()), state)
    one_step(model, other, rank, 2)
    reducer.detach()
    return wrong, flat(model)


def test_a_new_optimizer_on_the_same_model_takes_the_state_over(ranks):
    outcomes = ranks.run(detached, world_size=2)
    for wrong, parameters in outcomes:
        assert wrong == [] and torch.equal(parameters, outcomes[0][1])


def test_it_does_so_where_everything_is_work_of_an_accelerators_streams(ranks_on_streams, ranks):
    on_cpu, _ = ranks.run(detached, world_size=2)
    for wrong, parameters in ranks_on_streams.run(detached, on_streams.DEVICE):
        assert wrong == []
        torch.testing.assert_close(parameters, on_cpu[1], rtol=0, atol=1e-3)  # a tenth of a step of AdamW
