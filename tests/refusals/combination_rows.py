"""Every row of fusedcomm/config/combinations.py, refused by the front end that it names, in one process.

What a row calls by a name with a space is made here; what needs a GPU or several ranks is a stand-in.
"""

import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from attach_rows import with_mixed_precision, with_optimizer_in_backward, with_python_reducer
from models import Mlp, reducer_of
from plain_simulation import Net
from refusals import rows
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Blocks, Config, Feedback, LocalOptions, TwoLevels
from fusedcomm.config.combinations import ADDED_PASSES, TABLE, Besides, Combination
from fusedcomm.ddp.module import refuse_join, refuse_sparse
from fusedcomm.devices.cuda import CudaPath
from fusedcomm.fsdp.attach import _refuse_weighted
from fusedcomm.fsdp.levels import sums_of
from fusedcomm.integrations import attachment
from fusedcomm.members.training.recovery import with_recovery_codes
from fusedcomm.session import levels

Given = dict[str, object]
UNSHARDED = "Feedback(unsharded=True)"
# Values where a row leaves them open; for arguments that are not looked at, any object.
SAMPLES: Given = {
    "wire": "int8",
    "wires": {"a*": "int8"},
    "sum": "one-shot",
    "weighted": "sum",
    "blocks": Blocks(64),
    "predivide": 2.0,
    "feedback": Feedback(),
    "hosts": 1,
    "local_wire": "bf16",
    "measure_every": 2,
    "compare_every": 5,
    "compare": "raise",
    "microbatches": 4,
    "isa": "portable",
    "codec_threads": 2,
    "skip_all_reduce_unused_params": True,
    "batched_grad_copy": True,
    "dim": 1,
    "delay": 2,
    "outer": torch.optim.SGD,
    "merge": "average",
    "every as a time": "20s",
}
OPTIONS = {"wire", "wires", "sum", "weighted", "feedback", "hosts", "measure_every", "compare_every", "compare"}


def config_of(given: Given) -> object:
    """What is given as config=: a word, or the Config of what is an option of it."""
    return given.get("config", Config(**{name: value for name, value in given.items() if name in OPTIONS}))


def by_config(given: Given) -> None:
    options = dict(given)
    if options.pop("wires that are all 'fp32'", False) or options.get("sum") == "exact":
        options.setdefault("wire", "fp32")
    if "local_wire" in options:
        options["hosts"] = TwoLevels(2, options.pop("local_wire"))
    Config(**options)


def by_all(given: Given) -> None:
    if ADDED_PASSES in given:
        reducer_of(Mlp(), config_of(given), every=2)
    local = LocalOptions(**{name: value for name, value in given.items() if name in ("isa", "codec_threads")})
    CudaPath(Config(), local, None, torch.device("cuda"), [], False, False, False)


def by_trace(given: Given) -> None:
    with reducer_of(Mlp()).trace("{rank}.json", all_ranks=True):
        raise AssertionError


def by_attach(given: Given) -> None:
    made = {
        "mixed_precision": with_mixed_precision,
        "parameters of _apply_optimizer_in_backward()": with_optimizer_in_backward,
        "optimize_ddp": with_python_reducer,
    }
    attributes = {
        "skip_all_reduce_unused_params": "skip_all_reduce_unused_params",
        "delay_all_reduce_named_params of all parameters": "_delay_all_reduce_all_params",
    }
    for name in given:
        if name in made:
            made[name](0)
        if name in attributes:
            ddp = DistributedDataParallel(Mlp())
            setattr(ddp, attributes[name], True)
            fusedcomm.attach(ddp)
    if "members" in given:
        fusedcomm.attach(DistributedDataParallel(Mlp()), members=given["members"])
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    join = {"_join_config": SimpleNamespace(enable=True), "_divide_by_initial_world_size": False}
    ddp = SimpleNamespace(module=model, parameters_to_ignore=set(), **join)
    (refuse_sparse(ddp, torch.device("cuda")) if "sparse gradients on cuda" in given else refuse_join(ddp))


def by_fsdp2(given: Given) -> None:
    model, config = fully_shard(nn.Linear(8, 8)), config_of(given)
    if "every_rank" in given:
        with mock.patch.object(attachment, "attach", return_value=SimpleNamespace(detach=lambda: None)):
            attachment.Attachment(None, every_rank=True).attach(model, 2, "")
    if "members" in given:
        fusedcomm.attach(model, members=given["members"])
    two = SimpleNamespace(size=lambda: 2)
    sharded = SimpleNamespace(process_group=two, replicas=two, device=torch.device("cuda"))
    if "modules on several meshes" in given or "HSDP on cuda" in given:
        _refuse_weighted(config, [[sharded]] * (1 + ("modules on several meshes" in given)))
    if UNSHARDED in given:
        config = Config(feedback=Feedback(unsharded=True))
    if "replicas without shards" in given or "shards without replicas" in given:
        sums_of(config, *((None, two) if "replicas without shards" in given else (two, None)))
    fusedcomm.attach(model, config, quiet=True)


def by_grad_reducer(given: Given) -> None:
    model = Mlp()
    if "config" not in given:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    reducer_of(model, config_of(given))


def by_data_parallel(given: Given) -> None:
    arguments = {name: value for name, value in given.items() if " " not in name}
    fusedcomm.DataParallel(nn.BatchNorm1d(3), **({"broadcast_buffers": len(arguments) == len(given) - 1} | arguments))


def by_members(given: Given) -> None:
    if {"process_group", "find_unused_parameters", "config"} & given.keys():
        reducer_of(Mlp(), **given, members=object())
    members = SimpleNamespace(microbatches=given.get("microbatches"))
    device = torch.device("cuda" if "gradients on cuda" in given else "cpu")
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        with_recovery_codes(config_of(given), members, device)


def by_sharded_optimizer(given: Given) -> None:
    with fusedcomm.Members() as members:
        options = {"find_unused_parameters": True} if "overlap" in given else {}
        options |= {"members": members} if "members" in given else {}
        reducer = reducer_of(Mlp(), config_of(given), **options)
        try:
            fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, quiet=True, overlap=given.get("overlap"), lr=0.1)
        finally:
            reducer.detach()


def by_local_steps(given: Given) -> None:
    model = DistributedDataParallel(Net()) if "DDP or FSDP2 inside a host" in given else Net()
    model.to("meta" if "parameters on an accelerator" in given else "cpu")
    names = ("merge", "delay", "outer", "process_group")
    options = {name: given[name] for name in names if name in given}
    options |= {"every": given.get("every as a time", 10), "config": config_of(given), "quiet": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "members" not in given:
        fusedcomm.LocalSteps(model, optimizer, **options)
    with fusedcomm.Members(microbatches=given.get("microbatches")) as members:
        fusedcomm.LocalSteps(model, optimizer, **options, members=members)


MAKERS: dict[str, tuple[int, Callable[[Given], object]]] = {
    "Config": (0, by_config),
    "sums on two levels": (0, lambda given: levels.find(Config("int8", **given | {"hosts": 2}), list("aabb"), 0)),
    "gradients without shards": (
        *(1, lambda _: fusedcomm.attach(DistributedDataParallel(Mlp()), Config(feedback=Feedback(unsharded=True)))),
    ),
    "every front end": (1, by_all),
    "trace": (1, by_trace),
    "Auto": (0, lambda given: fusedcomm.Auto((config_of(given),))),
    "simulate": (0, lambda given: fusedcomm.simulate([torch.zeros(3)] * 2, config_of(given))),
    "CommState": (0, lambda given: fusedcomm.CommState(config_of(given))),
    "attach": (1, by_attach),
    "FSDP2": (1, by_fsdp2),
    "GradReducer": (1, by_grad_reducer),
    "DataParallel": (1, by_data_parallel),
    "Members": (1, by_members),
    "ShardedOptimizer": (1, by_sharded_optimizer),
    "LocalSteps": (1, by_local_steps),
}
"""By front end: ranks, of which 0 are none, and what is called with a row's settings."""


def samples(row: Combination) -> list[Given]:
    """The row's settings with values that it is about, each of those that it lists."""
    possible = []
    for name, values in row.settings.items():
        if isinstance(values, Besides):
            possible.append([SAMPLES.get(name, "object")])
        else:
            possible.append(values if isinstance(values, tuple) else [values])
    return [dict(zip(row.settings, values, strict=True)) for values in itertools.product(*possible)]


def rows_of(row: Combination) -> list:
    num_ranks, make = MAKERS[row.front_end]
    words = " ... ".join([*row.settings, "does not go with", f"({row.why})", row.instead])
    text = f"{row.error.__name__} ... {words}"
    calls = [lambda _, given=given: functools.partial(make, given)() for given in samples(row)]
    return rows(row.front_end, num_ranks, [(call, text) for call in calls])


ROWS = [each for row in TABLE for each in rows_of(row)]
