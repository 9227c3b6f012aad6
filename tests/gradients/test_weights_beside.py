"""Weights of ranks beside other options, and what is no weight."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from weighted import BUCKETS, TWO_PASSES, gradients_of, model, one_process, rows, sum_of_losses, wrapped

import fusedcomm
from fusedcomm import Config

# ---- beside other options


def with_options(rank, world_size):
    """Measurement of weighted gradients."""
    counts = (100, 3)
    module = model()
    ddp = DistributedDataParallel(module)
    comm = fusedcomm.attach(ddp, Config("int8", sum="two-shot", weighted="mean", measure_every=1), quiet=True)
    for step in range(3):
        comm.weight = counts[rank]
        module.zero_grad()
        (sum_of_losses(ddp, *rows(rank, step, 0, counts[rank])) / counts[rank]).backward()
    stats = comm.stats()
    comm.detach()
    return list(stats.quantization_error.values())


def test_measurement_is_of_weighted_gradients(ranks):
    for errors in ranks.run(with_options, world_size=2):
        assert errors and max(errors) < 0.02


def scaled(rank, world_size):
    module = model()
    ddp = DistributedDataParallel(module)
    comm = fusedcomm.attach(ddp, Config("fp32", weighted="sum"), quiet=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    comm.weight = 5 + rank
    scaler.scale(sum_of_losses(ddp, *rows(rank, 0, 0, 5 + rank))).backward()
    scaler.unscale_(torch.optim.SGD(module.parameters()))
    return gradients_of(module)


def test_a_loss_scale_leaves_weighted_means(ranks):
    (expected,) = one_process([[[5, 6]]], 2)
    for found in ranks.run(scaled, world_size=2):
        assert (found - expected).norm() <= 1e-6 * expected.norm()


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


def unused(rank, world_size, front):
    """find_unused_parameters, on one rank or on both, and static_graph."""
    module = model()
    if front == "ddp":
        call = DistributedDataParallel(module, static_graph=True, bucket_cap_mb=BUCKETS)
        comm = fusedcomm.attach(call, Config("fp32", weighted="sum"), quiet=True)
    else:
        config = Config("fp32", weighted="sum")
        comm = fusedcomm.GradReducer(module, config, bucket_mib=BUCKETS, find_unused_parameters=True, quiet=True)
        call = module
    found = []
    for step in range(3):
        module.zero_grad()
        comm.weight = 3 + rank
        sum_of_losses(call, *rows(rank, step, 0, 3 + rank)).backward()
        found.append(gradients_of(module).clone())
    return found


@pytest.mark.parametrize("front", ["ddp", "reducer"])
def test_static_graph_and_unused_parameters(ranks, front):
    expected = one_process([[[3, 4]]] * 3, 2)
    for found in ranks.run(unused, front, world_size=2):
        for gradients, exact in zip(found, expected, strict=True):
            assert (gradients - exact).norm() <= 1e-6 * exact.norm()


def every_second(rank, world_size):
    module = model()
    reducer = fusedcomm.GradReducer(module, Config("fp32", weighted="mean"), every=2, quiet=True)
    found = []
    for step, counts in enumerate(TWO_PASSES[:2]):
        module.zero_grad()
        for number, of_ranks in enumerate(counts):
            reducer.weight = count = max(of_ranks[rank], 1)
            (sum_of_losses(module, *rows(rank, step, number, count)) / count).backward()
        found.append(gradients_of(module).clone())
    reducer.detach()
    module.zero_grad()
    sum_of_losses(module, *rows(rank, 9, 0, 1)).backward()
    alone = model()
    sum_of_losses(alone, *rows(rank, 9, 0, 1)).backward()
    return found, torch.equal(gradients_of(module), gradients_of(alone))


def test_weights_add_up_with_every_and_leave_nothing_behind(ranks):
    steps = [[[max(count, 1) for count in counts[:2]] for counts in step] for step in TWO_PASSES[:2]]
    expected = one_process(steps, 2)
    for found, is_as_before in ranks.run(every_second, world_size=2):
        assert is_as_before
        for gradients, exact in zip(found, expected, strict=True):
            assert (gradients - exact).norm() <= 1e-6 * exact.norm()


def with_gradients_apart(rank, world_size, front):
    """A pass whose gradients are dropped, and gradients that are not added to parameters, count nothing."""
    module = model()
    call, comm, no_sync = wrapped(front, module, Config("fp32", weighted="mean"))
    comm.weight = 500
    with no_sync():
        sum_of_losses(call, *rows(rank, 7, 0, 2)).backward()
    module.zero_grad()
    (counts,) = TWO_PASSES[:1]
    for number, of_ranks in enumerate(counts):
        comm.weight = count = max(of_ranks[rank], 1)
        with no_sync() if number == 0 else contextlib.nullcontext():
            loss = sum_of_losses(call, *rows(rank, 0, number, count)) / count
            apart = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
            alone = model()
            exact = torch.autograd.grad(
                sum_of_losses(alone, *rows(rank, 0, number, count)) / count, list(alone.parameters())
            )
            assert all(map(torch.equal, apart, exact))
            loss.backward()
    return gradients_of(module)


@pytest.mark.parametrize("front", ["ddp", "reducer", "parallel"])
def test_dropped_passes_and_gradients_apart_count_nothing(ranks, front):
    (expected,) = one_process([[[max(count, 1) for count in counts[:2]] for counts in TWO_PASSES[0]]], 2)
    for found in ranks.run(with_gradients_apart, front, world_size=2):
        assert (found - expected).norm() <= 1e-6 * expected.norm()


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


def with_windows_dropped(rank, world_size, front, kind):
    """Steps whose first pass is dropped in each way on one rank or on both. Returns for each how far the gradients are
    from those of what was kept."""
    module, parts = model(), []
    call, comm, no_sync = wrapped(front, module, Config("fp32", weighted=kind))

    def go(number, count, factor=1.0):
        comm.weight = count
        loss = factor * sum_of_losses(call, *rows(rank, 0, number, count))
        (loss if kind == "sum" else loss / count).backward()

    def exact(passes, skipped=()):
        """Of the (pass, rank, tokens), without the gradient of the passes `skipped`, whose tokens count."""
        alone = model().double()
        for number, of, count in passes:
            if number not in skipped:
                sum_of_losses(alone, *(x.double() for x in rows(of, 0, number, count))).backward()
        return gradients_of(alone) / sum(count for *_, count in passes)

    def note(name, expected):
        found = gradients_of(module)
        parts.append((name, float((found - expected).norm() / expected.norm())))
        module.zero_grad(set_to_none=len(parts) % 2 == 0)

    counts = [(40, 25), (5, 3), (7, 1)]
    passes = [(number, of, count) for number, of_ranks in enumerate(counts) for of, count in enumerate(of_ranks)]
    for name, drop in DROPS.items():
        for droppers in ((0, 1), (1,)):
            with no_sync():
                go(0, counts[0][rank])
            if rank in droppers:
                drop(module)
            with no_sync():
                go(1, counts[1][rank])
            go(2, counts[2][rank])
            kept = [each for each in passes if each[0] != 0 or name == "nothing" or each[1] not in droppers]
            note((name, droppers), exact(kept))
    # Gradients that are zero count while they are kept, and a part of the gradients keeps its pass.
    for name in ("nothing", "zeros in place", "assigned", "None"):
        with no_sync():
            go(0, counts[0][rank], factor=0.0)
        DROPS[name](module)
        go(1, counts[1][rank])
        kept = [each for each in passes if each[0] < 2]
        note((name, "of zeros"), exact(kept, skipped=(0,)) if name == "nothing" else exact(kept[2:]))
    with no_sync():
        go(0, counts[0][rank])
    module[0].zero_grad(set_to_none=False)
    go(1, counts[1][rank])
    whole, later = exact(passes[:4]), exact(passes[:4], skipped=(0,))
    first = sum(parameter.numel() for parameter in module[0].parameters())
    note("a part", torch.cat([later[:first], whole[first:]]))
    # A frozen parameter's gradient is none of this step's.
    with no_sync():
        go(0, counts[0][rank])
    module[0].requires_grad_(False)
    module[2].zero_grad(set_to_none=False)
    left = [parameter.grad.clone() for parameter in module[0].parameters()]
    if front != "ddp":  # DDP knows no frozen parameters
        go(1, counts[1][rank])
        assert all(map(torch.equal, left, (parameter.grad for parameter in module[0].parameters())))
        assert torch.allclose(gradients_of(module[2]).double(), exact(passes[2:4])[first:], rtol=1e-4, atol=1e-6)
    return parts


@pytest.mark.parametrize("kind", ["mean", "sum"])
@pytest.mark.parametrize("front", ["ddp", "reducer", "parallel"])
@pytest.mark.sampled
def test_a_pass_counts_as_long_as_what_it_added_is_kept(ranks, front, kind):
    for parts in ranks.run(with_windows_dropped, front, kind, world_size=2):
        assert [part for part in parts if not part[1] < 1e-5] == []


def traced(rank, world_size, path):
    call, comm, _ = wrapped("ddp", model(), Config("int8", weighted="mean"))
    comm.weight = 1 + rank
    with comm.trace(path):
        sum_of_losses(call, *rows(rank, 0, 0, 2)).backward()
    copied = copy.deepcopy(comm)
    with pytest.raises(RuntimeError, match="is a copy"):
        copied.weight = 1
    return comm.stats().buckets, copied.weight


def test_the_message_is_in_traces_and_is_no_bucket(ranks, tmp_path):
    path = tmp_path / "trace.json"
    assert ranks.run(traced, str(path), world_size=2) == [(1, None)] * 2
    assert "weights" in path.read_text()


# ---- bad input

BAD = {
    "negative": (lambda: -3, "has set comm.weight to -3"),
    "nan": (lambda: math.nan, "has set comm.weight to nan"),
    "infinite": (lambda: torch.tensor(math.inf), "has set comm.weight to inf"),
    "two": (lambda: torch.ones(2), "has set comm.weight to a tensor of shape (2,)"),
    "missing": (None, "has not set comm.weight"),
    "late": (None, "within a backward pass whose first bucket had left"),
}


def bad(rank, world_size, name, front):
    module = model()
    call, comm, _ = wrapped(front, module, Config("fp32", weighted="mean"))
    value, _ = BAD[name]

    def set_between_layers(_, inputs, output):
        if rank == 1 and name == "late" and step == 1:
            output.register_hook(lambda _: setattr(comm, "weight", 2))

    module[1].register_forward_hook(set_between_layers)
    for step in range(3):
        is_kept = name == "late" and step == 2  # rank 1 has set it too early, or too late
        if not is_kept and (rank != 1 or name != "missing"):
            comm.weight = 1
        if rank == 1 and value is not None and step == 1:
            comm.weight = value()
        try:
            sum_of_losses(call, *rows(rank, 0, 0, 3)).backward()
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("front", ["ddp", "reducer", "fsdp"])
@pytest.mark.parametrize("name", list(BAD))
@pytest.mark.sampled
def test_a_weight_that_is_none_is_an_error_of_every_rank(ranks, name, front):
    texts = ranks.run(bad, name, front, world_size=2)
    for rank, text in enumerate(texts):
        assert "rank 1 " in text and "Give comm.weight a finite number" in text
        if rank == 1 or name in ("missing", "late"):
            assert BAD[name][1] in text


def going_on(rank, world_size, name, front):
    """The errors of five steps, the second of which has a bad weight of rank 1, and the last step's gradients."""
    module, texts = model(), []
    call, comm, _ = wrapped(front, module, Config("fp32", weighted="mean"))

    def set_between_layers(_, inputs, output):
        if late:
            output.register_hook(lambda _: setattr(comm, "weight", 2))

    module[1].register_forward_hook(set_between_layers)
    for step in range(5):
        comm.weight = -3 if (rank, name, step) == (1, "negative", 1) else 3
        late = (rank, name, step) == (1, "late", 1)
        module.zero_grad()
        try:
            (sum_of_losses(call, *rows(rank, 0, 0, 3)) / 3).backward()
            texts.append("")
        except RuntimeError as error:
            texts.append(str(error))
    return texts, gradients_of(module)


@pytest.mark.parametrize("front", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("name", ["negative", "late"])
def test_a_bad_weight_ends_one_pass_on_every_rank_and_no_engine(ranks, name, front):
    world_size, wrong = 4 if front == "hsdp" else 2, 2 if name == "late" else 1
    (expected,) = one_process([[[3] * world_size]], world_size)
    for texts, found in ranks.run(going_on, name, front, world_size=world_size):
        assert [bool(text) for text in texts] == [step == wrong for step in range(5)]
        assert texts[wrong].startswith("fusedcomm: rank 1 has set comm.weight ")
        assert (found - expected).norm() <= 1e-6 * expected.norm()


def late_in_a_pass_that_adds_up(rank, world_size):
    module, texts = model(), []
    call, comm, no_sync = wrapped("ddp", module, Config("fp32", weighted="mean"))
    for step in range(3):
        comm.weight = 3
        with no_sync() if step == 1 else contextlib.nullcontext():
            loss = sum_of_losses(call, *rows(rank, 0, 0, 3))
            if rank == 1 and step == 1:
                module[0].weight.register_hook(lambda _: setattr(comm, "weight", 2))
            try:
                loss.backward()
            except RuntimeError as error:
                texts.append((step, str(error)))
    return texts


def test_a_weight_that_is_late_for_a_pass_that_adds_up_is_an_error_of_the_next_one(ranks):
    for ((step, text),) in ranks.run(late_in_a_pass_that_adds_up, world_size=2):
        assert step == 2 and "rank 1 has set comm.weight within a backward pass" in text


def refused(rank, world_size):
    for config in ("fp32", "off", "auto"):
        ddp = DistributedDataParallel(model())
        comm = fusedcomm.attach(ddp, config, quiet=True)
        with pytest.raises(RuntimeError, match="comm.weight would do nothing"):
            comm.weight = 1
        comm.detach()
    ddp = DistributedDataParallel(model())
    comm = fusedcomm.attach(ddp, Config("fp32", weighted="mean"), quiet=True)
    for value in ("3", None, True, 1j):
        with pytest.raises(TypeError, match="use a number or a tensor"):
            comm.weight = value
    comm.detach()
    with pytest.raises(RuntimeError, match="detached"):
        comm.weight = 1
    module = model()
    call, comm, _ = wrapped("fsdp", module, Config("fp32", weighted="mean"))
    comm.weight = 1
    module.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="adds up gradients of several passes"):
        call(torch.ones(1, 6))
    comm.detach()
    call(torch.ones(1, 6))


def test_what_cannot_be_weighted_is_refused(ranks):
    ranks.run(refused, world_size=2)
