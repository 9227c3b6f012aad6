"""Which passes and gradients weights count, and what is no weight."""

import contextlib
import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from weighted import check_close, gradients_of, model, one_process, rows, sum_of_losses, wrapped

import fusedcomm
from fusedcomm import Config


class Odd(nn.Module):
    """A float64 parameter and a sparse one, which no wire carries."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Embedding(5, 2, sparse=True)
        self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, row):
        return self.rows(row).sum() * row.sum() + (self.wide * row.double().sum()).sum()


def odd(rank, world_size, weights):
    ddp = DistributedDataParallel(Odd())
    comm = fusedcomm.attach(ddp, Config("bf16", weighted="mean"), quiet=True)
    for _ in range(2):
        ddp.zero_grad()
        comm.weight = weights[rank]
        ddp(torch.tensor([rank + 1])).backward()
    return ddp.module.rows.weight.grad.to_dense()[:, 0].tolist(), ddp.module.wide.grad.tolist()


def test_gradients_that_no_wire_carries_are_weighted(ranks):
    for sparse, double in ranks.run(odd, (1, 3), world_size=2):
        assert sparse == pytest.approx([0, 0.25, 1.5, 0, 0]) and double == pytest.approx([1.75] * 3)
    for sparse, double in ranks.run(odd, (4, 0), world_size=2):
        assert sparse == pytest.approx([0, 1, 0, 0, 0]) and double == pytest.approx([1.0] * 3)


def to_zeros(module):
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)


DROPS = {
    "nothing": lambda module: None,
    "None": lambda module: module.zero_grad(),
    "zeros": lambda module: module.zero_grad(set_to_none=False),
    "zeros in place": lambda module: [parameter.grad.zero_() for parameter in module.parameters()],
    "by data": lambda module: [parameter.grad.data.zero_() for parameter in module.parameters()],
    "together": lambda module: torch._foreach_zero_([parameter.grad for parameter in module.parameters()]),
    "assigned": to_zeros,
}


COUNTS = [[40, 25], [5, 3], [7, 1]]
"""Rows by pass and rank."""


def with_windows_dropped(rank, world_size, front):
    """Gradients of steps whose first pass is dropped in each way, on one rank, on both or in part, and of one in which
    a layer is frozen."""
    module, found = model(), []
    call, comm, no_sync = wrapped(front, module, Config("fp32", weighted="sum"))

    def go(number):
        comm.weight = COUNTS[number][rank]
        loss = sum_of_losses(call, *rows(rank, 0, number, COUNTS[number][rank]))
        if number == 1:  # gradients that are not added to parameters count nothing
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            torch.autograd.grad(loss, trained, retain_graph=True)
        loss.backward()

    for drop in DROPS.values():
        for droppers in ((0, 1), (1,)):
            with no_sync():
                go(0)
            if rank in droppers:
                drop(module)
            with no_sync():
                go(1)
            go(2)
            found.append(gradients_of(module))
            module.zero_grad(set_to_none=len(found) % 2 == 0)
    for freezes in (False, True):
        if freezes and front == "hook":  # DDP knows no frozen parameters
            break
        with no_sync():
            go(0)
        module[0].requires_grad_(not freezes)
        module[2 if freezes else 0].zero_grad(set_to_none=False)
        go(1)
        found.append(gradients_of(module[2]))
        module.zero_grad()
    return found


@pytest.mark.parametrize("front", ["hook", "reducer", "DataParallel"])
@pytest.mark.sampled
def test_a_pass_counts_as_long_as_what_it_added_is_kept(ranks, front):
    expected = []
    for name in DROPS:
        for droppers in ((0, 1), (1,)):
            first = [0 if name != "nothing" and rank in droppers else COUNTS[0][rank] for rank in range(2)]
            expected += one_process([[first, *COUNTS[1:]]], 2)
    num_of_last = sum(parameter.numel() for parameter in model()[2].parameters())
    for passes in (COUNTS[:2], [[0, 0], COUNTS[1]]):  # a pass of which a part is kept; one of which a frozen layer's is
        expected += [gradients[-num_of_last:] for gradients in one_process([passes], 2)]
    for found in ranks.run(with_windows_dropped, front, world_size=2):
        assert len(found) == len(expected) - (front == "hook")
        for gradients, exact in zip(found, expected, strict=False):
            check_close(gradients, exact, 1e-5)


# ---- bad input

BAD = {
    "negative": (-3, "comm.weight=-3 is no weight"),
    "nan": (math.nan, "comm.weight=nan is no weight"),
    "infinite": (torch.tensor(math.inf), "comm.weight=inf is no weight"),
    "two": (torch.ones(2), "comm.weight=a tensor of shape (2,)"),
    "missing": (None, ""),
    "late": (None, "comm.weight=2 was set within a backward pass"),
}


def bad(rank, world_size, name, front):
    """The errors of four steps, in the second of which rank 1 has no valid weight, the last step's gradients, and the
    warnings."""
    module, texts = model(), []
    call, comm, _ = wrapped(front, module, Config("fp32", weighted="mean"))

    def set_between_layers(_, inputs, output):
        if (rank, name, step) == (1, "late", 1):
            output.register_hook(lambda _: setattr(comm, "weight", 2))

    module[1].register_forward_hook(set_between_layers)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(4):
            if (rank, name) != (1, "missing") or step > 1:
                comm.weight = BAD[name][0] if (rank, step) == (1, 1) and BAD[name][0] is not None else 3
            module.zero_grad()
            try:
                (sum_of_losses(call, *rows(rank, 0, 0, 3)) / 3).backward()
                texts.append("")
            except RuntimeError as error:
                texts.append(str(error))
                if front == "reducer":  # it has ended
                    break
    return texts, gradients_of(module), " ".join(str(each.message) for each in said)


@pytest.mark.parametrize("front", ["hook", "reducer", "FSDP2", "HSDP"])
@pytest.mark.parametrize("name", list(BAD))
@pytest.mark.sampled
def test_a_bad_weight_is_an_error_of_every_rank_and_ends_one_pass_and_no_engine(ranks, name, front):
    world_size = 4 if front == "HSDP" else 2
    (expected,) = one_process([[[3] * world_size]], world_size)
    wrong = {"late": [2], "missing": [0, 1]}.get(name, [1])
    outcomes = ranks.run(bad, name, front, world_size=world_size)
    assert all(texts == outcomes[0][0] for texts, *_ in outcomes)
    for rank, (texts, found, said) in enumerate(outcomes):
        told = [text for text in texts if text]
        assert all("rank 1 has no weight" in text and "Give comm.weight a finite number" in text for text in told)
        assert rank != 1 or BAD[name][1] in said
        if front == "reducer":
            assert len(texts) == wrong[0] + 1 and told == texts[-1:]
        else:
            assert [step for step, text in enumerate(texts) if text] == wrong
            check_close(found, expected)


def late_in_a_pass_that_adds_up(rank, world_size):
    module, texts = model(), []
    call, comm, no_sync = wrapped("hook", module, Config("fp32", weighted="sum"))
    for step in range(3):
        comm.weight = 3
        with no_sync() if step == 1 else contextlib.nullcontext():
            loss = sum_of_losses(call, *rows(rank, 0, 0, 3))
            if rank == 1 and step == 1:
                module[0].weight.register_hook(lambda _: setattr(comm, "weight", 2))
            try:
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    loss.backward()
            except RuntimeError as error:
                texts.append((step, str(error)))
            assert bool(said) == (rank == 1 and step > 0), [str(each.message) for each in said]
    return texts


def test_a_weight_that_is_late_for_a_pass_that_adds_up_is_an_error_of_the_next_one(ranks):
    for ((step, text),) in ranks.run(late_in_a_pass_that_adds_up, world_size=2):
        assert step == 2 and "rank 1 has no weight in this pass" in text


def refused(rank, world_size):
    for config in ("fp32", "off", "auto", Config("fp32", weighted="mean")):
        _, comm, _ = wrapped("hook", model(), config)
        for value in ("3", None, True, 1j) if isinstance(config, Config) else ():
            with pytest.raises(TypeError, match="use a number or a tensor"):
                comm.weight = value
        if isinstance(config, Config):
            comm.weight = 2
            copied = copy.deepcopy(comm)
            assert copied.weight is None
            with pytest.raises(RuntimeError, match="is a copy"):
                copied.weight = 1
            comm.detach()
        with pytest.raises(RuntimeError, match="detached" if isinstance(config, Config) else "weigh equally"):
            comm.weight = 1
    for front in ("hook", "reducer", "DataParallel"):
        call, _, no_sync = wrapped(front, model(), Config("fp32", weighted="mean"))
        with pytest.raises(RuntimeError, match="use weighted='sum'"), no_sync():
            call(torch.ones(1, 6))
    module = model()
    call, comm, _ = wrapped("FSDP2", module, Config("fp32", weighted="mean"))
    comm.weight = 1
    module.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="adds up gradients of several passes"):
        call(torch.ones(1, 6))
    comm.detach()
    call(torch.ones(1, 6))


def test_what_cannot_be_weighted_is_refused(ranks):
    ranks.run(refused, world_size=2)
