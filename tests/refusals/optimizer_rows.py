"""What ShardedOptimizer refuses."""

import torch
from models import Mlp, reducer_of
from owners import FP32, Branches, Net, loss_of, made, one_step
from refusals import differ, rows
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

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


def of_members(_):
    members = fusedcomm.Members()
    reducer = reducer_of(Mlp(), FP32, members=members)
    try:
        on(None, reducer=reducer)
    except ValueError as error:
        assert "bucket" not in str(error)
        raise
    finally:
        reducer.detach()
        members.leave()


def of_a_search(model):
    try:
        on(model, "auto")
    except ValueError as error:
        assert "members" not in str(error)
        raise


def of(make):
    """What is given for a reducer."""
    return lambda model: fusedcomm.ShardedOptimizer(make(model), torch.optim.AdamW, lr=0.1, quiet=True)


def under_join(model):
    parallel = fusedcomm.DataParallel(model, config=FP32, quiet=True)
    Join([fusedcomm.ShardedOptimizer(parallel, torch.optim.AdamW, quiet=True)])


def groups(model, *chosen, **others):
    """Groups of parameters by slices of the model's."""
    parameters = list(model.parameters())
    return [{"params": parameters[each], **others} for each in chosen]


NO_REDUCER = "TypeError ... fusedcomm.ShardedOptimizer takes a fusedcomm.GradReducer or a fusedcomm.DataParallel"
EVERY = slice(0, 99)
OPTIM = torch.optim
# What is tried with a new model.
ARGUMENTS = [
    (lambda m: on(m, optimizer_class=OPTIM.LBFGS, lr=1.0), "ValueError ... LBFGS ... closure"),
    (lambda m: on(m, optimizer_class=NeedsClosure), "ValueError ... NeedsClosure ... closure"),
    (lambda m: on(m, optimizer_class=OPTIM.SparseAdam), "ValueError ... SparseAdam ... sparse"),
    (lambda m: on(m, params=groups(m, EVERY, optimizer_class=OPTIM.LBFGS)), "ValueError ... LBFGS"),
    (lambda m: on(m, optimizer_class="AdamW"), "TypeError ... 'AdamW' ... no class of torch optimizers"),
    (
        lambda m: on(m, optimizer_class=OPTIM.SGD(m.parameters(), lr=0.1)),
        "TypeError ... no class of torch optimizers",
    ),
    (of(lambda m: m), f"{NO_REDUCER}, not Net"),
    (of(DistributedDataParallel), f"{NO_REDUCER}, not DistributedDataParallel: it is the first argument"),
    (of(lambda m: m.parameters()), f"{NO_REDUCER}, not generator: it is the first argument"),
    (
        of(lambda m: fusedcomm.attach(DistributedDataParallel(m), quiet=True)),
        f"{NO_REDUCER}, not Handle: it is the first argument",
    ),
    (under_join, "RuntimeError: fusedcomm: Join is not possible with a ShardedOptimizer ... Join"),
    (
        lambda m: on(m, params=[*list(m.named_parameters())[:1], m.norm.weight]),
        "TypeError: fusedcomm: params= ... has a tensor beside others",
    ),
    (lambda m: on(m, params=[1, 2]), "TypeError: fusedcomm: params= ... has int beside others"),
    (
        lambda m: on(m, params=groups(m, EVERY, slice(2, 3)), lr=0.1),
        "ValueError ... norm.weight is in two groups",
    ),
    (
        lambda m: on(m, params=groups(m, slice(1, 99)), lr=0.1),
        "ValueError ... embed.weight is in no group ... add it, or freeze it",
    ),
    (
        lambda m: on(m, params=[*m.parameters(), nn.Parameter(torch.zeros(3, 7))]),
        "ValueError ... shape [3, 7] is not one of the GradReducer's",
    ),
    (lambda m: on(m, params=[*groups(m, slice(1, 9)), m.embed.weight]), "TypeError ... dicts with 'params'"),
    (
        lambda m: on(m, params=groups(m, EVERY, optimizer_class=OPTIM.SGD, lr=0.1), weight_decay=0.5),
        "ValueError ... weight_decay would do nothing",
    ),
    (lambda m: on(m, optimizer_class=OPTIM.Muon), "ValueError: ... 2D"),
    (second_owner, "RuntimeError ... has a ShardedOptimizer already"),
    (of_detached, "RuntimeError ... detach"),
    (of_trained, "RuntimeError ... has begun"),
    (
        of_a_search,
        "ValueError: fusedcomm: a ShardedOptimizer needs its wire from the start ... in place of 'auto'",
    ),
    (of_members, "ValueError: fusedcomm: a ShardedOptimizer needs ranks that stay ... without members"),
    (lambda m: on(m, Config("fp32", sum="exact")), "ValueError ... sum='exact' ... 'two-shot'"),
    (lambda m: on(m, Config("bf16", sum="direct")), "ValueError ... sum='direct' ... 'two-shot'"),
    (lambda m: on(m, Config("int8", sum="one-shot")), "ValueError ... sum='one-shot' ... 'two-shot'"),
    (lambda m: on(m, update="int9"), "ValueError: ... int9"),
    (
        lambda m: on(m, overlap=True, find_unused_parameters=True),
        "ValueError ... overlap=True ... find_unused_parameters=True",
    ),
    (lambda m: on(m.double()), "ValueError ... torch.float64"),
    (lambda m: on(m, learning_rate=0.1), "TypeError: ... learning_rate"),
]


def of_net(params=None, **kwargs):
    """`params`: a function of the model."""
    reducer = reducer_of(model := Net(), FP32)
    try:
        on(model, params=params and params(model), reducer=reducer, **kwargs)
    finally:
        reducer.detach()


# Arguments on most ranks and on rank 1, and what is told.
DIFFERENT = [
    ({"update": "bf16"}, {"update": "int8"}, "'bf16' on rank 0 ... 'int8' on rank 1"),
    ({"overlap": True}, {"overlap": False}, "overlap ... True on rank 0 ... False on rank 1"),
    ({"whole": True}, {"whole": None}, "whole"),
    ({"optimizer_class": OPTIM.SGD}, {"optimizer_class": OPTIM.AdamW}, "'SGD' on rank 0 ... 'AdamW'"),
    ({"lr": 0.1}, {"betas": (0.9, 0.99)}, "arguments.lr is 0.1 on rank 0 and None on rank 1"),
    ({"lr": 0.1}, {"lr": 0.2}, "arguments.lr is 0.1 on rank 0 and 0.2 on rank 1"),
    (
        {"params": lambda m: groups(m, EVERY, lr=0.1)},
        {"params": lambda m: groups(m, EVERY, lr=0.3)},
        "groups[0].lr is 0.1 on rank 0 and 0.3 on rank 1",
    ),
]


def overlapped_scaler(rank):
    model, reducer, optimizer = made(overlap=True)
    scaler = optimizer.grad_scaler("cpu")
    scaler.scale(loss_of(model, rank, 0)).backward()
    try:
        scaler.step(optimizer)
    finally:
        reducer.detach()


def unused(rank):
    model, reducer, optimizer = made(model=Branches)
    try:
        one_step(model, optimizer, rank, 0)
    finally:
        reducer.detach()


UNUSED = [(unused, "RuntimeError ... never. ... find_unused_parameters")]
UNDER_WAY = [*UNUSED, (overlapped_scaler, "RuntimeError ... unscale_() ... overlap=False")]
ROWS = [
    *rows("ShardedOptimizer", 2, [(lambda _, do=do: do(Net()), text) for do, text in ARGUMENTS]),
    *rows("ShardedOptimizer", 2, UNDER_WAY),
    *rows("ShardedOptimizer", 3, UNUSED),
    *rows(
        "ShardedOptimizer",
        3,
        [
            (differ(of_net, one, other), f"DisagreementError: fusedcomm: the ranks do not agree ... {text}")
            for one, other, text in DIFFERENT
        ],
        is_same=True,
    ),
]
