"""Mistakes under way with a ShardedOptimizer: an error on every rank, also if one makes them. What is refused at once
is in tests/refusals."""

import time

import pytest
import torch
from models import refusal
from owners import flat, loss_of, made, one_step
from patience import patient
from torch import nn


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
