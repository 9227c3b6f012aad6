"""What ShardedOptimizer refuses: arguments at once, and mistakes under way on every rank, also if one makes them."""

import time

import pytest
import torch
from models import Mlp, reducer_of, refusal
from owners import FP32, Branches, Net, flat, loss_of, made, one_step
from patience import patient
from sampling import few
from torch import nn

import fusedcomm
from fusedcomm.config import Config


def on(model, config=FP32, optimizer_class=torch.optim.AdamW, params=None, reducer=None, **kwargs):
    """Makes a ShardedOptimizer; keyword arguments but those of the reducer are its own."""
    options = {key: kwargs.pop(key) for key in ("find_unused_parameters", "bucket_mib") if key in kwargs}
    reducer = reducer or reducer_of(model, config, **options)
    return fusedcomm.ShardedOptimizer(reducer, optimizer_class, params, quiet=True, **kwargs)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure): ...


def second_owner(model):
    first = on(model)
    return on(model, reducer=first._reducer)


def of_detached(model):
    reducer = reducer_of(model)
    reducer.detach()
    return on(model, reducer=reducer)


def of_trained(model):
    reducer = reducer_of(model, FP32)
    loss_of(model, 0, 0).backward()
    return on(model, reducer=reducer)


def groups(model, *chosen, **others):
    """Groups of parameters by slices of the model's."""
    parameters = list(model.parameters())
    return [{"params": parameters[each], **others} for each in chosen]


# What is tried with a new model, and words of the error.
ARGUMENTS = {
    "LBFGS": (lambda m: on(m, optimizer_class=torch.optim.LBFGS, lr=1.0), ["ValueError", "LBFGS", "closure"]),
    "closure": (lambda m: on(m, optimizer_class=NeedsClosure), ["ValueError", "NeedsClosure", "closure"]),
    "SparseAdam": (lambda m: on(m, optimizer_class=torch.optim.SparseAdam), ["ValueError", "SparseAdam", "sparse"]),
    "LBFGS in a group": (
        lambda m: on(m, params=groups(m, slice(0, 99), optimizer_class=torch.optim.LBFGS)),
        ["ValueError", "LBFGS"],
    ),
    "no class": (lambda m: on(m, optimizer_class="AdamW"), ["TypeError", "'AdamW'", "no class of torch optimizers"]),
    "an optimizer": (
        lambda m: on(m, optimizer_class=torch.optim.SGD(m.parameters(), lr=0.1)),
        ["TypeError", "no class of torch optimizers"],
    ),
    "no reducer": (
        lambda m: fusedcomm.ShardedOptimizer(m, torch.optim.SGD, lr=0.1),
        ["TypeError", "fusedcomm.GradReducer or a fusedcomm.DataParallel, not Net"],
    ),
    "two groups": (
        lambda m: on(m, params=groups(m, slice(0, 99), slice(2, 3)), lr=0.1),
        ["ValueError", "norm.weight is in two groups"],
    ),
    "no group": (
        lambda m: on(m, params=groups(m, slice(1, 99)), lr=0.1),
        ["ValueError", "embed.weight is in no group", "add it, or freeze it"],
    ),
    "not its own": (
        lambda m: on(m, params=[*m.parameters(), nn.Parameter(torch.zeros(3, 7))]),
        ["ValueError", "shape [3, 7] is not one of the GradReducer's"],
    ),
    "mixed": (lambda m: on(m, params=[*groups(m, slice(1, 9)), m.embed.weight]), ["TypeError", "dicts with 'params'"]),
    "does nothing": (
        lambda m: on(m, params=groups(m, slice(0, 99), optimizer_class=torch.optim.SGD, lr=0.1), weight_decay=0.5),
        ["ValueError", "weight_decay would do nothing"],
    ),
    "a vector for Muon": (lambda m: on(m, optimizer_class=torch.optim.Muon), ["ValueError", "2D"]),
    "second": (second_owner, ["RuntimeError", "has a ShardedOptimizer already"]),
    "detached": (of_detached, ["RuntimeError", "detach"]),
    "trained": (of_trained, ["RuntimeError", "has begun"]),
    "auto": (lambda m: on(m, "auto"), ["ValueError", "name its config in place of 'auto'"]),
    "exact": (lambda m: on(m, Config("fp32", sum="exact")), ["ValueError", "sum='exact'", "'two-shot'"]),
    "direct": (lambda m: on(m, Config("bf16", sum="direct")), ["ValueError", "sum='direct'", "'two-shot'"]),
    "one-shot": (lambda m: on(m, Config("int8", sum="one-shot")), ["ValueError", "sum='one-shot'", "'two-shot'"]),
    "no wire": (lambda m: on(m, update="int9"), ["ValueError", "int9"]),
    "overlap": (
        lambda m: on(m, overlap=True, find_unused_parameters=True),
        ["ValueError", "overlap=True", "find_unused_parameters=True"],
    ),
    "float64": (lambda m: on(m.double()), ["ValueError", "torch.float64"]),
    "unknown argument": (lambda m: on(m, learning_rate=0.1), ["TypeError", "learning_rate"]),
}


# The errors of torch and of Config.
NOT_OURS = ("unknown argument", "a vector for Muon", "no wire")


def arguments(rank, world_size):
    found = {}
    for name, (attempt, _) in ARGUMENTS.items():
        torch.manual_seed(5)
        found[name] = refusal(attempt, Net())
    return found


def test_arguments_are_refused_with_the_reason(ranks):
    for found in ranks.run(arguments, world_size=2):
        for name, (_, words) in ARGUMENTS.items():
            kind, text = found[name].split(": ", 1)
            assert kind == words[0] and all(word in text for word in words[1:]), (name, found[name])
            assert text.startswith("fusedcomm") or name in NOT_OURS, found[name]


def members(rank, world_size):
    of_job = fusedcomm.Members()
    reducer = fusedcomm.GradReducer(Mlp(), FP32, members=of_job, quiet=True)
    text = refusal(fusedcomm.ShardedOptimizer, reducer, torch.optim.SGD, lr=0.1, quiet=True)
    reducer.detach()
    of_job.leave()
    search = fusedcomm.GradReducer(Mlp(), "auto", quiet=True)
    other = refusal(fusedcomm.ShardedOptimizer, search, torch.optim.SGD, lr=0.1, quiet=True)
    search.detach()
    return text, other


def test_members_and_searches_are_refused_each_with_its_reason(ranks):
    for text, other in ranks.run(members, world_size=2):
        assert text.startswith("ValueError: fusedcomm: a ShardedOptimizer needs ranks that stay"), text
        assert "without members" in text and "bucket" not in text
        assert other.startswith("ValueError: fusedcomm: a ShardedOptimizer needs its wire from the start"), other
        assert "members" not in other and "in place of 'auto'" in other


# Arguments on rank 0 and on the others, and words of the error of all.
DIFFERENT = [
    ({"update": "bf16"}, {"update": "int8"}, ["'bf16' on rank 0", "'int8' on rank 1"]),
    ({"overlap": True}, {"overlap": False}, ["overlap", "True on rank 0", "False on rank 1"]),
    ({"whole": True}, {"whole": None}, ["whole"]),
    ({"optimizer_class": torch.optim.SGD}, {"optimizer_class": torch.optim.AdamW}, ["'SGD' on rank 0", "'AdamW'"]),
    ({"lr": 0.1}, {"betas": (0.9, 0.99)}, ["arguments.lr is 0.1 on rank 0 and None on rank 1"]),
    ({"lr": 0.1}, {"lr": 0.2}, ["arguments.lr is 0.1 on rank 0 and 0.2 on rank 1"]),
    (
        {"params": lambda m: groups(m, slice(0, 99), lr=0.1)},
        {"params": lambda m: groups(m, slice(0, 99), lr=0.3)},
        ["groups[0].lr is 0.1 on rank 0 and 0.3 on rank 1"],
    ),
]


def different(rank, world_size):
    found = []
    for kwargs in DIFFERENT:
        torch.manual_seed(5)
        model = Net()
        reducer = reducer_of(model, FP32)
        own = {key: value(model) if key == "params" else value for key, value in kwargs[min(rank, 1)].items()}
        found.append(refusal(on, model, reducer=reducer, **own))
        reducer.detach()
    return found


def test_other_arguments_on_one_rank_are_refused_on_all(ranks):
    for found in ranks.run(different, world_size=3):
        for text, (_, _, words) in zip(found, DIFFERENT, strict=True):
            assert text.startswith("DisagreementError: fusedcomm: the ranks do not agree"), text
            assert all(word in text for word in words), text


# ---- under way


def no_backward(model, optimizer, reducer, rank):
    optimizer.zero_grad()
    optimizer.step()


def step_twice(model, optimizer, reducer, rank):
    one_step(model, optimizer, rank, 9)
    optimizer.step()


def no_step(model, optimizer, reducer, rank):
    for step in (9, 10):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()


def torchs_clip(model, optimizer, reducer, rank):
    loss_of(model, rank, 9).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def torchs_scaler(model, optimizer, reducer, rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, rank, 9)).backward()
    scaler.step(optimizer)


def zeroed(model, optimizer, reducer, rank):
    loss_of(model, rank, 9).backward()
    optimizer.zero_grad()
    optimizer.step()


def replaced_gradient(model, optimizer, reducer, rank):
    loss_of(model, rank, 9).backward()
    model.wide.weight.grad = model.wide.weight.grad.clone()
    optimizer.step()


def frozen(model, optimizer, reducer, rank):
    model.wide.weight.requires_grad_(False)
    one_step(model, optimizer, rank, 9)


def frozen_at_the_end(model, optimizer, reducer, rank):
    model.head.weight.requires_grad_(False)
    one_step(model, optimizer, rank, 9)


def other_rate(model, optimizer, reducer, rank):
    loss_of(model, rank, 9).backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.step()


def written(model, optimizer, reducer, rank):
    loss_of(model, rank, 9).backward()
    for p in model.parameters():
        p.data = p.data + 0.25
    optimizer.step()


def written_gradient(model, optimizer, reducer, rank):
    loss_of(model, rank, 9).backward()
    model.wide.weight.grad.data.clamp_(-1e-4, 1e-4)
    optimizer.step()


CHANGED = [
    "was changed or removed between backward() and step()",
    "optimizer.clip_grad_norm_()",
    "optimizer.grad_scaler()",
]
# What ranks do wrong, whether with overlap if only so, and words of every rank's error.
MISTAKES = {
    "no_backward": (no_backward, None, ["step() was called without a backward pass", "on every rank"]),
    "step_twice": (step_twice, None, ["a second time", "on every rank"]),
    "no_step": (no_step, None, ["a second backward pass was synchronized before step()", "no_sync()"]),
    "torchs_clip": (torchs_clip, None, ["the gradient of", *CHANGED]),
    "torchs_scaler": (torchs_scaler, None, ["torch.amp.GradScaler", "optimizer.grad_scaler()"]),
    "zeroed": (zeroed, None, ["the gradient of", *CHANGED]),
    "replaced_gradient": (replaced_gradient, None, ["the gradient of wide.weight", *CHANGED]),
    "frozen": (frozen, None, ["requires_grad of wide.weight"]),
    "frozen_at_the_end": (frozen_at_the_end, None, ["requires_grad of head.weight"]),
    "other_rate": (other_rate, True, ["hyperparameters", "overlap=False"]),
    "written": (written, True, ["parameters", "were changed between backward() and step()", "overlap=False"]),
    "written_gradient": (written_gradient, None, ["the gradient of wide.weight", *CHANGED]),
}


def mistaken(rank, world_size, mistake, overlap, wrong_ranks):
    """(this rank's error, seconds from the mistake until then, whether parameters stayed finite)."""
    model, reducer, optimizer = made(overlap=overlap, update="bf16")
    for step in range(2):
        one_step(model, optimizer, rank, step)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        if rank in wrong_ranks:
            mistake(model, optimizer, reducer, rank)
        for step in range(9, 13):  # the others, and wrong ranks without an error so far, go on
            one_step(model, optimizer, rank, step)
    seconds = time.monotonic() - began
    with pytest.raises(RuntimeError):  # it does not go on by itself
        for step in range(20, 22):
            one_step(model, optimizer, rank, step)
    reducer.detach()
    return str(error.value), seconds, flat(model).isfinite().all().item()


@pytest.mark.sampled
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("wrong_ranks", [(0, 1, 2), (1,), (0,)], ids=["all ranks", "rank 1", "rank 0"])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_every_ranks_error_within_seconds(ranks, name, wrong_ranks, overlap):
    mistake, only, words = MISTAKES[name]
    overlap = overlap if only is None else only
    outcomes = ranks.run(mistaken, mistake, overlap, wrong_ranks, world_size=3)
    for text, seconds, is_finite in outcomes:
        assert all(word in text for word in words), text
        assert "fusedcomm: rank" in text or len(wrong_ranks) < 3
        assert is_finite and seconds < patient(30)
    if len(wrong_ranks) == 1:
        named = [f"rank {wrong_ranks[0]}" in text for text, _, _ in outcomes]
        assert all(named) or mistake in (frozen, frozen_at_the_end), outcomes


def not_fatal(rank, world_size, overlap):
    """Errors after which training goes on: {what: text}."""
    model, reducer, optimizer = made(overlap=overlap, update="fp32")
    found = {
        "before": refusal(optimizer.clip_grad_norm_, 1.0),
        "group": refusal(optimizer.add_param_group, {"params": [nn.Parameter(torch.zeros(3))]}),
    }
    one_step(model, optimizer, rank, 0)
    found["after"] = refusal(optimizer.grad_norm)
    optimizer.zero_grad()
    loss_of(model, rank, 1).backward()
    found["closure"] = refusal(optimizer.step, lambda: 0.0)
    found["clip"] = refusal(optimizer.clip_grad_norm_, 1.0) if overlap else ""
    found["norm"] = refusal(optimizer.grad_norm, 1.0)
    optimizer.step()
    one_step(model, optimizer, rank, 2)
    end = flat(model)
    reducer.detach()
    return found, end


@pytest.mark.parametrize("overlap", [False, True])
def test_these_errors_change_nothing_and_training_goes_on(ranks, overlap):
    expected = ranks.run(plain_run, world_size=2)[0]
    for found, end in ranks.run(not_fatal, overlap, world_size=2):
        assert all("Error: fusedcomm: " in text for text in found.values() if text)
        assert "before a backward pass" in found["before"] or overlap
        assert "or after step()" in found["after"] or overlap
        assert "all groups" in found["group"] and "closure" in found["closure"]
        assert "norm_type=1.0" in found["norm"] or overlap
        if overlap:
            for name in ("before", "after", "clip", "norm"):
                assert "overlap=False" in found[name]
        assert torch.equal(end, expected)


def plain_run(rank, world_size):
    model, reducer, optimizer = made(update="fp32")
    for step in range(3):
        one_step(model, optimizer, rank, step)
    reducer.detach()
    return flat(model)


def overlapped_scaler(rank, world_size):
    model, reducer, optimizer = made(overlap=True)
    scaler = optimizer.grad_scaler("cpu")
    scaler.scale(loss_of(model, rank, 0)).backward()
    text = refusal(scaler.step, optimizer)
    reducer.detach()
    return text


def test_a_scaler_with_overlap_is_refused(ranks):
    for text in ranks.run(overlapped_scaler, world_size=2):
        assert "unscale_()" in text and "overlap=False" in text, text


def unused(rank, world_size):
    """Without find_unused_parameters a parameter that gets no gradient is named."""
    model, reducer, optimizer = made(model=Branches)
    with pytest.raises(RuntimeError) as error:
        one_step(model, optimizer, rank, 0)
    reducer.detach()
    return str(error.value)


@pytest.mark.parametrize("world_size", few([2, 3], 2))
def test_parameters_without_gradients_are_named(ranks, world_size):
    for text in ranks.run(unused, world_size=world_size):
        assert "never." in text and "find_unused_parameters" in text, text
