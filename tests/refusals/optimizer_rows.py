"""What ShardedOptimizer refuses, when it is made and when ranks go on with mistakes."""

import copy
import time

import torch
from counting import OfAllGradients
from models import reducer_of, refusal
from owners import FP32, Branches, Net, flat, loss_of, made, one_step, unequal, whole
from patience import patient
from refusals import differ, rows
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm


def on(model, config=FP32, optimizer_class=torch.optim.AdamW, params=None, reducer=None, **kwargs):
    """Makes a ShardedOptimizer; keyword arguments but those of the reducer are its own."""
    options = {key: kwargs.pop(key) for key in ("find_unused_parameters", "bucket_mib") if key in kwargs}
    reducer = reducer or reducer_of(model, config, **options)
    return fusedcomm.ShardedOptimizer(reducer, optimizer_class, params, quiet=True, **kwargs)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure): ...


class MyLbfgs(torch.optim.LBFGS): ...


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
    (
        lambda m: on(m, optimizer_class=OPTIM.LBFGS, lr=1.0),
        "ValueError ... LBFGS reads all parameters at once ... closure ... use it without a ShardedOptimizer",
    ),
    (lambda m: on(m, optimizer_class=MyLbfgs, whole=True), "ValueError ... MyLbfgs reads all parameters at once"),
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
        "ValueError: fusedcomm: params= is not possible ... Some param names are missing",
    ),
    (lambda m: on(m, params=[1, 2]), "ValueError: fusedcomm: params= is not possible ... one of the params is int"),
    (
        lambda m: on(m, params=groups(m, EVERY, slice(2, 3)), lr=0.1),
        "ValueError ... some parameters appear in more than one parameter group",
    ),
    (lambda m: on(m, params=[*m.parameters(), m.norm.weight]), "ValueError ... norm.weight is given twice"),
    (
        lambda m: on(m, params=groups(m, slice(1, 99)), lr=0.1),
        "ValueError ... embed.weight is in no group ... add it, or freeze it",
    ),
    (
        lambda m: on(m, params=[*m.parameters(), nn.Parameter(torch.zeros(3, 7))]),
        "ValueError ... shape [3, 7] is not one of the GradReducer's",
    ),
    (
        lambda m: on(m, params=[*groups(m, slice(1, 9)), m.embed.weight]),
        "ValueError ... param_group must be a dict ... dicts with 'params'",
    ),
    (
        lambda m: on(m, params=groups(m, EVERY, optimizer_class=OPTIM.SGD, lr=0.1), weight_decay=0.5),
        "ValueError ... weight_decay would do nothing",
    ),
    (lambda m: on(m, optimizer_class=OPTIM.Muon), "ValueError: ... 2D"),
    (
        lambda m: on(m, optimizer_class=OfAllGradients),
        "ValueError: fusedcomm: OfAllGradients computes param_groups[0]['norm'] ... the gradients of all parameters",
    ),
    (second_owner, "RuntimeError ... has a ShardedOptimizer already"),
    (of_detached, "RuntimeError ... detach"),
    (of_trained, "RuntimeError ... has begun"),
    (lambda m: on(m, update="int9"), "ValueError: ... int9"),
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


def with_owners(do, *args, **kwargs):
    """What calls `do` with a new model, its owners, and the rank."""

    def run(rank):
        model, reducer, optimizer = made(*args, **kwargs)
        try:
            do(model, optimizer, rank)
        finally:
            reducer.detach()

    return run


# ---- mistakes under way


def no_backward(model, optimizer, rank):
    optimizer.zero_grad()
    optimizer.step()


def step_twice(model, optimizer, rank):
    one_step(model, optimizer, rank, 9)
    optimizer.step()


def no_step(model, optimizer, rank):
    for step in (9, 10):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()


def torchs_scaler(model, optimizer, rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(model, rank, 9)).backward()
    scaler.step(optimizer)


def frozen(model, optimizer, rank):
    model.wide.weight.requires_grad_(False)
    one_step(model, optimizer, rank, 9)


def frozen_at_the_end(model, optimizer, rank):
    model.head.weight.requires_grad_(False)
    one_step(model, optimizer, rank, 9)


def between(change):
    """What calls `change` between backward() and step()."""

    def mistake(model, optimizer, rank):
        loss_of(model, rank, 9).backward()
        change(model, optimizer)
        optimizer.step()

    return mistake


def replace_gradient(model, optimizer):
    model.wide.weight.grad = model.wide.weight.grad.clone()


def rank_1_sets(**values):
    def mistake(model, optimizer, rank):
        if rank == 1:
            optimizer.param_groups[0].update(values)
        one_step(model, optimizer, rank, 9)

    return mistake


def mistaken(mistake, wrong_ranks, changes_parameters=True):
    """What makes a mistake on these ranks after two steps, while the others go on."""

    def do(model, optimizer, rank):
        for step in range(2):
            one_step(model, optimizer, rank, step)
        before, began = flat(model), time.monotonic()
        try:
            if rank in wrong_ranks:
                mistake(model, optimizer, rank)
            for step in range(9, 13):  # wrong ranks without an error so far go on, too
                one_step(model, optimizer, rank, step)
        except RuntimeError:
            assert time.monotonic() - began < patient(30)
            assert changes_parameters or torch.equal(flat(model), before)
            # It does not go on by itself.
            assert refusal(lambda: [one_step(model, optimizer, rank, step) for step in (20, 21)])
            raise

    return with_owners(do, update="bf16")


CHANGED = "was changed or removed between backward() and step() ... optimizer.clip_grad_norm_() ... .grad_scaler()"
REQUIRES = "RuntimeError ... requires_grad of"
# What ranks do wrong, and the error of every rank.
MISTAKES = [
    (no_backward, "RuntimeError ... step() was called without a backward pass ... on every rank"),
    (step_twice, "RuntimeError ... a second time ... on every rank"),
    (no_step, "RuntimeError ... a second backward pass was synchronized before step() ... no_sync()"),
    (
        between(lambda model, _: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)),
        f"RuntimeError ... the gradient of ... {CHANGED}",
    ),
    (frozen, f"{REQUIRES} wide.weight"),
    (frozen_at_the_end, f"{REQUIRES} head.weight"),
    (torchs_scaler, "RuntimeError ... torch.amp.GradScaler ... optimizer.grad_scaler()"),
    (between(lambda _, optimizer: optimizer.zero_grad()), f"RuntimeError ... the gradient of ... {CHANGED}"),
    (between(replace_gradient), f"RuntimeError ... the gradient of wide.weight ... {CHANGED}"),
    (
        between(lambda model, _: model.wide.weight.grad.data.clamp_(-1e-4, 1e-4)),
        f"RuntimeError ... the gradient of wide.weight ... {CHANGED}",
    ),
]
NUM_ALSO_ALONE = 6
"""So many of them one rank makes alone, too: each of the ways in which the others hear of it. Most errors name it."""
# What rank 1's first group has.
HYPERPARAMETERS = [
    ({"lr": 0.02}, "lr is 0.01 on rank 0 and 0.02 on rank 1"),
    ({"betas": (0.9, 0.98)}, "betas[1] is 0.999 on rank 0 and 0.98 on rank 1"),
    ({"lr": torch.tensor(0.5)}, "lr is 0.01 on rank 0 and 0.5 on rank 1"),
]
WRONG = []
for number, (mistake, text) in enumerate(MISTAKES):
    WRONG.append((mistaken(mistake, (0, 1, 2)), text))
    if number < NUM_ALSO_ALONE:
        told = text if mistake in (frozen, frozen_at_the_end) else f"{text} ... rank {number % 3}"
        WRONG.append((mistaken(mistake, (number % 3,)), told))
DIFFER = [
    (
        mistaken(rank_1_sets(**values), (0, 1, 2), changes_parameters=False),
        f"RuntimeError ... the ranks do not agree: param_groups[0].{text}. Each rank steps",
    )
    for values, text in HYPERPARAMETERS
]


def loads(change):
    """What loads a state that is changed so, which changes nothing."""

    def do(model, optimizer, rank):
        one_step(model, optimizer, rank, 0)
        saved = whole(optimizer.state_dict())
        state = copy.deepcopy(saved)
        change(state)
        try:
            optimizer.load_state_dict(state)
        finally:
            assert unequal(whole(optimizer.state_dict()), saved) == []
            one_step(model, optimizer, rank, 1)

    return with_owners(do, "two groups")


def with_momentum(state):
    """Makes it one of SGD."""
    for number, values in state["state"].items():
        state["state"][number] = {"momentum_buffer": values["exp_avg"]}


GROUPS_OF = "ValueError: fusedcomm: ... groups of"
LOADS = [
    (loads(lambda state: state["param_groups"].pop()), GROUPS_OF),
    (loads(lambda state: state["param_groups"][1]["params"].pop()), GROUPS_OF),
    (
        loads(lambda state: state["state"][0].update(exp_avg=torch.zeros(3, 3))),
        "ValueError: fusedcomm: ... exp_avg of embed.weight has the shape [3, 3] ... [33, 7]",
    ),
    (
        loads(with_momentum),
        "ValueError: fusedcomm: the state of embed.weight has ['momentum_buffer'], and AdamW also needs ['exp_avg', "
        "'exp_avg_sq', 'step']: load a state of AdamW",
    ),
]
UNUSED = [
    (
        with_owners(lambda model, optimizer, rank: one_step(model, optimizer, rank, 0), model=Branches),
        "RuntimeError ... never. ... find_unused_parameters",
    )
]
ROWS = [
    *rows("ShardedOptimizer", 2, [(lambda _, do=do: do(Net()), text) for do, text in ARGUMENTS]),
    *rows("ShardedOptimizer", 2, UNUSED + LOADS),
    *rows("ShardedOptimizer", 3, UNUSED + WRONG),
    *rows("ShardedOptimizer", 3, DIFFER, is_same=True),
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
