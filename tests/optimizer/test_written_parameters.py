"""What something else writes into parameters stays on every rank, however it was written; owners go on from it."""

import pytest
import torch
import torch.distributed as dist
from models import Gradients, integers, reducer_of
from owners import BUCKET_MIB, FP32, Net, flat, loss_of, made, one_step
from sampling import few
from test_lossy_updates import differs
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fusedcomm


def by_data(model, values):
    for p, value in zip(model.parameters(), values, strict=True):
        p.data.copy_(value)


def by_broadcast(model, values):
    if dist.get_rank() == 0:
        by_data(model, values)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def by_vector(model, values):
    vector_to_parameters(parameters_to_vector(values), model.parameters())


def by_new_data(model, values):
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = value.clone()


def by_transposed_data(model, values):
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = value.clone() if value.dim() < 2 else value.t().contiguous().t()


def by_data_with_gaps(model, values):
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = torch.stack([value, value], dim=-1)[..., 0]


def by_loading(model, values):
    names = dict(model.named_parameters())
    model.load_state_dict(dict(zip(names, values, strict=True)))


def by_one_element(model, values):
    for p, value in zip(model.parameters(), values, strict=True):
        p.data[-1] = value[-1]


def by_clamp(model, values):
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)


def by_nan_and_back(model, values):
    by_data(model, [torch.full_like(value, torch.nan) for value in values])
    by_data(model, values)


WRITES = (by_data, by_broadcast, by_vector, by_new_data, by_transposed_data, by_data_with_gaps, by_loading)
WRITES += (by_one_element, by_clamp, by_nan_and_back)


def bf16_net():
    return Net(torch.bfloat16)


def set_rates(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


def values_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def written(rank, world_size, make, update, kind, overlap):
    """[what is wrong] after writes, each followed by a step that changes nothing and one that does."""
    model, reducer, optimizer = made(kind, make, update=update, overlap=overlap)
    wrong = []
    for number, write in enumerate(WRITES):
        set_rates(optimizer, 2.0**-8)
        for step in range(2):
            one_step(model, optimizer, rank, 10 * number + step)
        before = flat(model)
        write(model, values_of(model, number))
        after = flat(model)
        is_written = before != after
        set_rates(optimizer, 0.0)
        one_step(model, optimizer, rank, 10 * number + 2)
        if not torch.equal(flat(model)[is_written], after[is_written]):
            wrong.append(f"{write.__name__}: lost")
        if (flat(model) - after).abs().max() > 1e-3:
            wrong.append(f"{write.__name__}: changes others")
        set_rates(optimizer, 2.0**-8)
        one_step(model, optimizer, rank, 10 * number + 3)
        if not 0 < (flat(model) - after).abs().max() < 0.1:
            wrong.append(f"{write.__name__}: does not go on")
        if differs(flat(model).float()):
            wrong.append(f"{write.__name__}: ranks differ")
    reducer.detach()
    return wrong


CASES = [(make, update) for make in (Net, bf16_net) for update in ("fp32", "bf16", "int8")]


@pytest.mark.parametrize("overlap", few([False, True], True))
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize(
    "case",
    few(CASES, (Net, "bf16"), (Net, "int8"), (bf16_net, "bf16")),
    ids=lambda case: f"{case[0].__name__}-{case[1]}",
)
def test_what_is_written_between_steps_is_kept(ranks, case, kind, overlap):
    assert ranks.run(written, *case, kind, overlap, world_size=3) == [[]] * 3


def beside_a_written_element(rank, world_size, writes):
    """bf16 parameters by steps that are smaller than their last bits, one element of each written after every step."""
    model = Gradients((5, 7), (30,), dtype=torch.bfloat16)
    reducer = reducer_of(model, FP32, bucket_mib=BUCKET_MIB)
    with torch.no_grad():
        for p in model.weights:
            p.fill_(1.0)
    optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, lr=2.0**-13, update="bf16", quiet=True)
    for _ in range(40):
        model.zero_grad()
        model([integers(rank, p.shape, torch.bfloat16) for p in model.weights]).backward()
        optimizer.step()
        for p in model.weights if writes else ():
            p.data.view(-1)[0] = 0.25
    reducer.detach()
    return [p.detach().view(-1)[1:].clone() for p in model.weights]


def test_elements_beside_a_written_one_keep_their_fp32_copies(ranks):
    for (matrix, vector), (plain, other) in zip(
        *(ranks.run(beside_a_written_element, writes, world_size=2) for writes in (True, False)), strict=True
    ):
        assert torch.equal(matrix, plain) and torch.equal(vector, other)
        assert (matrix != 1).any()


def resumed(rank, world_size, make, update):
    """[what is wrong] where something is written beside saving and loading."""
    model, reducer, optimizer = made("adamw", make, update=update)
    for step in range(4):
        one_step(model, optimizer, rank, step)
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)
    saved = {name: p.detach().clone() for name, p in model.state_dict().items()}, optimizer.state_dict()
    one_step(model, optimizer, rank, 4)
    expected = flat(model)
    reducer.detach()
    wrong = []
    for model_is_first in (True, False):
        for write in (None, by_data, by_loading):
            model, reducer, optimizer = made("adamw", make, update=update)
            if model_is_first:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            else:
                one_step(model, optimizer, rank, 9)
                set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
            if write is None:
                one_step(model, optimizer, rank, 4)
                kept = torch.equal(flat(model), expected)
            else:
                write(model, values_of(model, 3))
                after = flat(model)
                set_rates(optimizer, 0.0)
                one_step(model, optimizer, rank, 4)
                kept = torch.equal(flat(model), after)
            reducer.detach()
            if not kept:
                wrong.append((model_is_first, write))
    return wrong


@pytest.mark.parametrize(
    "case", few(CASES, (Net, "int8"), (bf16_net, "bf16")), ids=lambda case: f"{case[0].__name__}-{case[1]}"
)
def test_a_loaded_fp32_copy_is_of_the_weights_it_was_saved_with(ranks, case):
    assert ranks.run(resumed, *case, world_size=2) == [[]] * 2


# ---- between backward() and step()


def sharpness_aware(rank, world_size, owners, restore):
    """Parameters after steps whose gradients are taken elsewhere, as by SAM."""
    torch.manual_seed(5)
    model = Net()
    reducer = reducer_of(model, FP32, bucket_mib=BUCKET_MIB)
    options = {"lr": 0.01, "momentum": 0.9}
    if owners:
        optimizer = fusedcomm.ShardedOptimizer(
            reducer, torch.optim.SGD, update="fp32", overlap=False, quiet=True, **options
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), **options)
    for step in range(4):
        with reducer.no_sync():
            loss_of(model, rank, step).backward()
        old = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=0.1)
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        restore(model, old)
        optimizer.step()
        optimizer.zero_grad()
    reducer.detach()
    return flat(model)


@pytest.mark.parametrize("restore", [by_new_data, by_data])
def test_without_overlap_owners_step_from_the_parameters_there_are_at_the_step(ranks, restore):
    ours, theirs = (ranks.run(sharpness_aware, owners, restore, world_size=2) for owners in (True, False))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
