"""LocalSteps: what is refused, on this rank or because the ranks do not agree, and what changes under way."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from plain_simulation import Net, Run
from test_local_state import begun
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

NO_TIMES = [
    "0s",
    "0.0s",
    "-1s",
    "20",
    "abc",
    "",
    "s",
    " 20s",
    "1_0s",
    "nans",
    "1e3s",
    ".s",
    "1.5",
    "20m",
    "9" * 400 + "s",
]
# What is refused before the ranks meet: (arguments, words of the error).
WRONG = [
    ({"every": 0}, ["every=0", "1 or more"]),
    ({"every": 5, "delay": 5}, ["delay=5 is not below every=5", "delay=4 or less"]),
    ({"every": 5, "delay": -1}, ["delay=-1"]),
    ({"every": 5, "merge": "mean"}, ["merge='mean'", "'corrected', 'nesterov', 'average'"]),
    ({"every": 5, "merge": "average", "delay": 2}, ["merge='average' waits", "delay=2 would do nothing"]),
    ({"every": 3, "fragments": 4}, ["fragments=4 is more than every=3"]),
    ({"every": 5, "outer": torch.optim.SGD}, ["outer=… is for merge='nesterov'"]),
    ({"every": 5, "weights": "tokens"}, ["weights='tokens'", "'steps'"]),
    *(({"every": every}, [f"every={every!r}", "a time above 0"]) for every in NO_TIMES),
    ({"every": "20s", "merge": "nesterov"}, ["every='20s'", "learning rate", "outer=lambda"]),
    ({"every": 5, "members": "auto"}, ["members='auto'", "no fusedcomm.Members"]),
    ({"every": 5, "config": "auto"}, ["config='auto'", "too seldom"]),
    ({"every": 5, "config": "off"}, ["config='off'", "merge nothing"]),
    ({"every": 5, "config": fusedcomm.Config(weighted="mean")}, ["weighted='mean'", "LocalSteps(weights='steps')"]),
    ({"every": 5, "config": fusedcomm.Config(sum="direct")}, ["sum='direct'", "sum='auto'"]),
]


def refused_at_once(rank, world_size):
    texts = []
    for kwargs, _ in WRONG:
        model = Net()
        with pytest.raises(ValueError) as caught:
            fusedcomm.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), **kwargs)
        texts.append(str(caught.value))
    return texts


def test_arguments_that_are_out_of_range_or_exclude_each_other_are_refused(ranks):
    (texts,) = ranks.run(refused_at_once, world_size=1)
    for text, (kwargs, words) in zip(texts, WRONG, strict=True):
        assert all(word in text for word in words), (kwargs, text)


def no_optimizer(model):
    return torch.optim.SGD(list(model.parameters())[1:], lr=0.1)


MODELS = [
    (lambda: (model := Net(), no_optimizer(model)), {}, ["does not hold layers.0.weight", "masters={name: tensor}"]),
    (lambda: (model := Net().double(), torch.optim.SGD(model.parameters())), {}, ["torch.float64", "no merge carries"]),
    (
        lambda: (model := Net().requires_grad_(False), torch.optim.SGD(model.parameters())),
        {},
        ["no parameter of the model requires gradients"],
    ),
    (lambda: (model := Net(), torch.optim.SGD(model.parameters())), {"fragments": 9}, ["fragments=9", "8 parameters"]),
    (
        lambda: (model := Net(), torch.optim.SGD(model.parameters())),
        {"masters": {"layers.9": torch.zeros(1)}},
        ["masters['layers.9']", "model's names"],
    ),
    (
        lambda: (model := DistributedDataParallel(Net()), torch.optim.SGD(model.parameters())),
        {},
        ["averages the gradients of 2 ranks", "nothing to merge"],
    ),
    (
        lambda: (model := Net(), torch.optim.SGD(model.parameters())),
        {"merge": "nesterov", "outer": lambda parameters: torch.optim.SGD(parameters[:1])},
        ["outer=…", "does not hold all"],
    ),
    (
        lambda: (model := Net(), torch.optim.SGD(model.parameters())),
        {"merge": "nesterov", "outer": torch.optim.SGD(Net().parameters())},
        ["outer=SGD(…) is an object", "give a function that makes it of a list of parameters"],
    ),
]


def refused_models(rank, world_size):
    """Rank 0 has what is wrong; the other ranks are told."""
    texts = []
    for make, kwargs, _ in MODELS:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made, made_optimizer = make()  # on every rank, because DDP is made by all
        if rank == 0:
            model, optimizer = made, made_optimizer
        else:
            kwargs = {"merge": kwargs.get("merge", "corrected")}
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            fusedcomm.LocalSteps(model, optimizer, 10, quiet=True, **kwargs)
        texts.append((caught.typename, str(caught.value)))
    return texts


def test_a_model_or_optimizer_that_cannot_be_merged_is_said_on_every_rank(ranks):
    first, second = ranks.run(refused_models, world_size=2)
    for (kind, text), (_, other), (_, _, words) in zip(first, second, MODELS, strict=True):
        assert kind in ("ValueError", "TypeError") and all(word in text for word in words), text
        assert "rank 0 cannot attach" in other and all(word in other for word in words), other


DIFFERENT = [
    ({"every": 10}, {"every": 12}, "every is 10 on rank 0 and 12 on rank 1"),
    ({"every": "20s"}, {"every": "30s"}, "every is '20s' on rank 0 and '30s' on rank 1"),
    ({"every": "20s", "delay": 5}, {"every": 20}, "every is '20s' on rank 0 and 20 on rank 1"),
    ({"delay": 1}, {"delay": 2}, "delay is 1 on rank 0 and 2 on rank 1"),
    ({"config": "int8"}, {"config": "int4"}, "wire is 'int8' on rank 0 and 'int4' on rank 1"),
    (
        {"merge": "nesterov"},
        {"merge": "nesterov", "outer": lambda parameters: torch.optim.Adam(parameters, lr=0.1)},
        "outer.class is 'SGD' on rank 0 and 'Adam' on rank 1",
    ),
    (
        {"merge": "nesterov"},
        {"merge": "nesterov", "outer": lambda parameters: torch.optim.SGD(parameters, lr=0.1)},
        "outer.groups[0].lr is '0.2' on rank 0 and '0.1' on rank 1",
    ),
]


def different(rank, world_size):
    texts = []
    for kwargs in DIFFERENT:
        model = Net()
        with pytest.raises(RuntimeError) as caught:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            fusedcomm.LocalSteps(model, optimizer, **{"every": 10, "quiet": True, **kwargs[rank]})
        texts.append(str(caught.value))
    return texts


def test_another_schedule_wire_or_outer_optimizer_on_one_rank_is_refused_on_all(ranks):
    for texts in ranks.run(different, world_size=2):
        for text, (_, _, words) in zip(texts, DIFFERENT, strict=True):
            assert words in text, text


# ---- what changes under way


def freeze(model, optimizer):
    model.layers[0].weight.requires_grad_(False)


def replace(model, optimizer):
    model.layers[0].weight = nn.Parameter(torch.zeros(8, 6))


def add(model, optimizer):
    model.extra = nn.Linear(2, 2)


def convert(model, optimizer):
    model.double()


def forget(model, optimizer):
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]


CHANGES = {
    freeze: "layers.0.weight has been frozen",
    replace: "layers.0.weight has been replaced",
    add: "extra.weight has been added or thawed",
    convert: "layers.0.weight has become torch.float64",
    forget: "layers.0.weight is no longer in the optimizer",
}


def changed(rank, world_size):
    """Every rank changes its model between a snapshot and its merge."""
    texts = []
    for change in CHANGES:
        run = Run("corrected", every=4, delay=2)
        model, optimizer, comm = begun(run)
        before = comm.fragments[0].anchor.clone()
        for step in range(1, 6):
            run.step(model, optimizer, rank, step)
        change(model, optimizer)
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        assert torch.equal(comm.fragments[0].anchor, before)
        comm.detach()
        texts.append(str(caught.value))
    return texts


def test_parameters_that_change_between_snapshot_and_merge_are_an_error_that_names_them(ranks):
    for rank, texts in enumerate(ranks.run(changed, world_size=2)):
        for text, words in zip(texts, CHANGES.values(), strict=True):
            assert f"rank {rank}: {words}" in text and "detach()" in text, text


def other_bits(rank, world_size):
    """The last rank's merged state is changed in one bit."""
    run = Run("corrected", every=2, delay=0)
    model, optimizer, comm = begun(run)
    for step in range(1, 4):
        run.step(model, optimizer, rank, step)
    if rank == world_size - 1:
        comm.fragments[0].anchor.view(torch.int32)[17] ^= 1
    with pytest.raises(RuntimeError) as caught:
        run.step(model, optimizer, rank, 4)
    comm.detach()
    return str(caught.value)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_whose_merged_state_differs_in_one_bit_is_noticed_by_all(ranks, world_size):
    for rank, text in enumerate(ranks.run(other_bits, world_size=world_size)):
        assert "not the same on every rank" in text and f"on rank {rank}, before merge 1" in text


def one_rank_alone(rank, world_size):
    assert dist.get_world_size() == 1
    run = Run("corrected", every=3, delay=1)
    model, optimizer, comm = begun(run, "int4")
    other = Net()
    of_other = run.optimizer(other)
    for step in range(1, 8):
        run.step(model, optimizer, rank, step)
        run.step(other, of_other, rank, step)
    comm.finish()
    comm.detach()
    return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_one_rank_trains_as_it_would_alone(ranks):
    assert ranks.run(one_rank_alone, world_size=1) == [True]


def killed(rank, world_size):
    """Rank 1 is killed after its snapshot was sent once; rank 0 ends with an error at the merge that it misses."""
    run = Run("corrected", every=3, delay=1)
    model, optimizer, comm = begun(run)
    for step in range(1, 6):
        run.step(model, optimizer, rank, step)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        for step in range(6, 9):
            run.step(model, optimizer, rank, step)
    comm.detach()
    return str(caught.value)


def test_a_lost_rank_is_named_at_the_next_merge(ranks):
    (kind, text), _ = ranks.outcomes(killed, world_size=2, lost=1)
    assert kind == "value" and "rank 1" in text and "bucket 0" in text, text
