"""Every row of fusedcomm/config/combinations.py, refused by the front end that it names, in one process. What needs a
GPU or several ranks is a stand-in."""

import itertools
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from attach_rows import with_mixed_precision, with_optimizer_in_backward, with_python_reducer
from models import Mlp, reducer_of
from plain_simulation import Net
from refusals import Row, rows
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, Feedback, LocalOptions, TwoLevels
from fusedcomm.config.combinations import ADDED_PASSES, TABLE, Besides, Combination
from fusedcomm.ddp.module import refuse_delayed, refuse_join, refuse_sparse
from fusedcomm.devices.cuda import CudaPath
from fusedcomm.fsdp.attach import _checked
from fusedcomm.fsdp.levels import sums_of
from fusedcomm.members.training.recovery import with_recovery_codes
from fusedcomm.session import levels

Given = dict[str, object]
# Of these arguments, values where a row leaves them open; of others any text will do.
SAMPLES: Given = {
    **{"wire": "int8", "wires": {"a*": "int8"}, "sum": "one-shot", "weighted": "sum", "hosts": 1},
    **{"feedback": Feedback(), "local_wire": "bf16", "compare_every": 5},
    **{"compare": "raise", "microbatches": 4, "isa": "portable", "codec_threads": 2, "dim": 1, "delay": 2},
    **{"params": "int8", "every as a time": "20s"},
}
OPTIONS = {
    "params",
    "wire",
    "wires",
    "sum",
    "weighted",
    "feedback",
    "hosts",
    "compare_every",
    "compare",
}
IN_BACKWARD = "parameters of _apply_optimizer_in_backward()"
CUDA, TWO = torch.device("cuda"), SimpleNamespace(size=lambda: 2)
ON_CUDA = SimpleNamespace(process_group=TWO, replicas=TWO, device=CUDA)
DDP_ON_CUDA = SimpleNamespace(
    module=nn.Sequential(nn.Embedding(5, 3, sparse=True)),
    parameters_to_ignore=set(),
    _join_config=SimpleNamespace(enable=True),
    _divide_by_initial_world_size=False,
)


STARTS_ONE = SimpleNamespace(__func__=DistributedDataParallel._delayed_all_reduce_hook)
DELAYED = SimpleNamespace(_backward_hooks={0: STARTS_ONE})


def chosen(given: Given, *names: str) -> Given:
    return {name: given[name] for name in names if name in given}


def config_of(given: Given) -> object:
    """What is given as config=: a word, or the Config of what is an option of it."""
    return given.get("config", Config(**chosen(given, *OPTIONS)))


def by_config(given: Given) -> None:
    options = dict(given)
    if options.pop("wires that are all 'fp32'", False) or options.get("sum") == "exact":
        options.setdefault("wire", "fp32")
    if "local_wire" in options:
        options["hosts"] = TwoLevels(2, options.pop("local_wire"))
    Config(**options)


def by_ddp(given: Given) -> None:
    fusedcomm.attach(DistributedDataParallel(Mlp()), config_of(given))


def by_replicas(given: Given) -> None:
    fusedcomm.attach(replicate(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (1,))), config_of(given))


def by_own_all_gather(given: Given) -> None:
    model = fully_shard(nn.Linear(8, 8))
    model.set_custom_all_gather(type("Own", (DefaultAllGather,), {"__call__": DefaultAllGather.__call__})())
    fusedcomm.attach(model, config_of(given))


def by_cuda(given: Given) -> None:
    CudaPath(Config(), LocalOptions(**chosen(given, "isa", "codec_threads")), None, CUDA, [], False, False, False)


def by_attribute(name: str):
    """attach() of a DDP module that has set this attribute."""

    def attach(_: Given) -> None:
        ddp = DistributedDataParallel(Mlp())
        setattr(ddp, name, True)
        fusedcomm.attach(ddp)

    return attach


def by_reducer(given: Given) -> None:
    model = Mlp()
    if IN_BACKWARD in given:
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    options = chosen(given, "process_group", "find_unused_parameters")
    reducer = reducer_of(model, config_of(given), members=given.get("members"), **options)
    with reducer.no_sync():
        pass


def by_reducer_of_members(given: Given) -> None:
    by_reducer({**given, "members": "any"})


def by_recovery_codes(given: Given) -> None:
    members = SimpleNamespace(microbatches=given.get("microbatches"))
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        with_recovery_codes(config_of(given), members, CUDA if "gradients on cuda" in given else torch.device("cpu"))


def by_data_parallel(given: Given) -> None:
    arguments = {name: value for name, value in given.items() if name.isidentifier()}
    fusedcomm.DataParallel(nn.BatchNorm1d(3), **{"broadcast_buffers": arguments != given, **arguments})


def by_sharded_optimizer(given: Given) -> None:
    with fusedcomm.Members() as members:
        options = {"members": members} if "members" in given else {}
        reducer = reducer_of(Mlp(), config_of(given), **options)
        try:
            fusedcomm.ShardedOptimizer(reducer, torch.optim.SGD, quiet=True, lr=0.1)
        finally:
            reducer.detach()


def by_local_steps(given: Given) -> None:
    model = DistributedDataParallel(Net()) if "DDP or FSDP2 inside a host" in given else Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fusedcomm.LocalSteps(model, optimizer, given.get("every as a time", 10), config=config_of(given), quiet=True)


WITHOUT_RANKS = {
    "Config": by_config,
    "sums on two levels": lambda given: levels.find(Config("int8", **given | {"hosts": 2}), list("aabb"), 0),
    "simulate": lambda given: fusedcomm.simulate([torch.zeros(3)] * 2, config_of(given)),
    "CommState": lambda given: fusedcomm.CommState(config_of(given)),
}
WITH_ONE_RANK = {
    "gradients without shards": by_ddp,
    "every front end": by_cuda,
    "attach": lambda given: fusedcomm.attach(DistributedDataParallel(Mlp()), members=given["members"]),
    "FSDP2": lambda given: fusedcomm.attach(fully_shard(nn.Linear(8, 8)), config_of(given), **chosen(given, "members")),
    "GradReducer": by_reducer,
    "DataParallel": by_data_parallel,
    "Members": by_recovery_codes,
    "ShardedOptimizer": by_sharded_optimizer,
    "LocalSteps": by_local_steps,
}
"""What is called with a row's settings, by front end; below, where a row has one of these settings."""
BY_SETTING = {
    ("every front end", ADDED_PASSES): by_reducer,
    ("attach", "mixed_precision"): with_mixed_precision,
    ("attach", IN_BACKWARD): with_optimizer_in_backward,
    ("attach", "optimize_ddp"): with_python_reducer,
    ("attach", "skip_all_reduce_unused_params"): by_attribute("skip_all_reduce_unused_params"),
    ("attach", "delay_all_reduce_named_params"): by_attribute("_delay_all_reduce_params"),
    ("CommState", "delay_all_reduce_named_params"): lambda _: refuse_delayed([DELAYED]),
    ("attach", "Join(…, divide_by_initial_world_size=False)"): lambda _: refuse_join(DDP_ON_CUDA),
    ("attach", "sparse gradients on cuda"): lambda _: refuse_sparse(DDP_ON_CUDA, CUDA),
    ("FSDP2", "modules on several meshes"): lambda given: _checked(config_of(given), [], [[ON_CUDA]] * 2),
    ("FSDP2", "HSDP on cuda"): lambda given: _checked(config_of(given), [], [[ON_CUDA]]),
    ("FSDP2", "shards without replicas"): lambda given: sums_of(config_of(given), TWO, None),
    ("FSDP2", "replicas without shards"): by_replicas,
    ("FSDP2", "a module's own all-gather"): by_own_all_gather,
    **{("Members", name): by_reducer_of_members for name in ("process_group", "find_unused_parameters", "config")},
}


def samples(row: Combination) -> list[Given]:
    """The row's settings with values that it is about, each of those that it lists."""
    possible = []
    for name, values in row.settings.items():
        is_open = isinstance(values, Besides)
        possible.append([SAMPLES.get(name, "any")] if is_open else values if isinstance(values, tuple) else [values])
    return [dict(zip(row.settings, values, strict=True)) for values in itertools.product(*possible)]


def rows_of(row: Combination) -> list[Row]:
    front_end = row.front_end
    makers = [BY_SETTING.get((front_end, name)) for name in row.settings]
    make = next(filter(None, makers), None) or (WITHOUT_RANKS | WITH_ONE_RANK)[front_end]
    text = " ... ".join([row.error.__name__, *row.settings, "does not go with", f"({row.why})", row.instead])
    calls = [(lambda _, given=given: make(given), text) for given in samples(row)]
    return rows(front_end, 0 if front_end in WITHOUT_RANKS else 1, calls)


ROWS = [each for row in TABLE for each in rows_of(row)]
