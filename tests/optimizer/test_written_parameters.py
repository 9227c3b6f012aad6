"""What something else writes into parameters stays on every rank, however it was written; owners go on from it."""

import itertools

import pytest
import torch
import torch.distributed as dist
from models import Gradients, integers, reducer_of
from owners import BUCKET_MIB, FP32, Net, bf16_net, by_data, by_new_data, differs, flat, made, one_step
from sampling import few
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fusedcomm


def by_broadcast(model, values):
    if dist.get_rank() == 0:
        by_data(model, values)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)


def by_vector(model, values):
    vector_to_parameters(parameters_to_vector(values), model.parameters())


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


def set_rates(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


def values_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def written(rank, world_size, make, update, kind):
    """[what is wrong] after writes, each followed by a step that changes nothing and one that does."""
    model, reducer, optimizer = made(kind, make, update=update)
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


CASES = list(itertools.product((Net, bf16_net), ("fp32", "bf16", "int8"), ("adamw", "muon")))
FEW_CASES = (Net, "bf16", "muon"), (Net, "int8", "adamw"), (bf16_net, "bf16", "adamw")


@pytest.mark.parametrize("case", few(CASES, *FEW_CASES), ids=lambda case: "-".join([case[0].__name__, *case[1:]]))
def test_what_is_written_between_steps_is_kept(ranks, case):
    assert ranks.run(written, *case, world_size=3) == [[]] * 3


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
