"""What attach() and comm_hook refuse with DDP."""

import inspect

import torch
import torch.distributed as dist
from front_ends import FRONT_ENDS
from models import Gradients, Mlp, synchronize
from refusals import differ, rows
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import fusedcomm
from fusedcomm.config import Config, LocalOptions


def of_gradients(**kwargs):
    fusedcomm.attach(DistributedDataParallel(Gradients((80, 64), (9,))), quiet=True, **kwargs)


ARGUMENTS = [
    ({"local": LocalOptions(isa="sse9")}, "ValueError: ... sse9 ... portable"),
    ({"local": 8}, "ValueError: ... local=8 ... a fusedcomm.LocalOptions(…)"),
    ({"config": "fp7"}, "ValueError: ... config='fp7' ... 'fp32', 'bf16', 'fp16', 'int8' ... 'int4', 'auto', 'off'"),
    ({"config": Config(hosts=5)}, "ValueError: ... hosts=5 ranks on each host ... 2 ranks"),
    (
        {"config": Config(wires={"wieghts*": "fp32"})},
        "ValueError: ... 'wieghts*' ... wires pattern 'wieghts*' matches none of the 2 parameters ... weights.0",
    ),
]


def with_a_hook(rank):
    ddp = DistributedDataParallel(Gradients((80, 64)))
    if rank == 1:
        ddp.register_comm_hook(None, lambda state, bucket: None)
    fusedcomm.attach(ddp, "off")


def with_builtin_hook(_):
    ddp = DistributedDataParallel(Mlp())
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    fusedcomm.attach(ddp)


def with_mixed_precision(_):
    ddp = DistributedDataParallel(Mlp())
    ddp.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)  # given to DDP, it may need a CUDA stream
    fusedcomm.attach(ddp)


def with_optimizer_in_backward(_):
    model = Mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    fusedcomm.attach(DistributedDataParallel(model))


def moved(part):
    def wrong(_):
        ddp = DistributedDataParallel(Mlp())
        part(ddp.module).to("meta")
        fusedcomm.attach(ddp)

    return wrong


def with_python_reducer(_):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        fusedcomm.attach(DistributedDataParallel(Mlp()))


class FirstOrLast(nn.Module):
    """Uses one of two parameters. Each parameter has its own bucket."""

    def __init__(self, used):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(5000) for _ in range(2))
        self.used = used

    def forward(self):
        return self.weights[self.used].sum()


def skipping(front_end, used):
    """Without the last bucket no step would end. Without the first bucket no step would begin."""
    options = {"bucket_cap_mb": 0.01, "find_unused_parameters": True, "skip_all_reduce_unused_params": True}

    def wrong(_):
        ddp, _ = FRONT_ENDS[front_end].make(FirstOrLast(used), Config("int8", wires={"1d": "int8"}), **options)
        for _ in range(4):
            ddp().backward()

    return wrong


def delayed(front_end):
    """DDP's options with which a weight is reduced when the gradient of another is there."""

    def wrong(_):
        model = Mlp()
        options = {"delay_all_reduce_named_params": [("layers.2.weight", model.layers[2].weight)]}
        options["param_to_hook_all_reduce"] = model.layers[0].weight
        ddp, _ = FRONT_ENDS[front_end].make(model, "int8", **options)
        ddp(torch.ones(1, 10)).sum().backward()

    return wrong


PARAMETER = nn.Parameter(torch.zeros(3))
NO_SKIPPING = "RuntimeError ... skip_all_reduce_unused_params=True ... without that option"
MODULES = [
    (with_builtin_hook, "RuntimeError ... built-in communication hook"),
    (moved(lambda model: model), "RuntimeError ... are on meta"),
    (moved(lambda model: model.layers[0]), "RuntimeError ... several devices"),
    (
        lambda _: fusedcomm.attach(
            DistributedDataParallel(Gradients((2, 2), (3,))).requires_grad_(False),
            Config(wires={"weigths.*": "fp32"}),
        ),
        "ValueError: ... 'weigths.*' matches none of the 2 parameters",
    ),
    (
        lambda _: fusedcomm.comm_hook(fusedcomm.CommState(), (torch.ones(3), PARAMETER)),
        "RuntimeError ... python_reducer ... tuple",
    ),
    *((delayed(name), "RuntimeError ... delay_all_reduce_named_params ... leave") for name in ("hook", "CommState")),
    (lambda _: fusedcomm.attach(replicate(Mlp()), "bf16"), "TypeError ... takes a DistributedDataParallel"),
]
if "skip_all_reduce_unused_params" in inspect.signature(DistributedDataParallel).parameters:
    MODULES += [(skipping(name, used), NO_SKIPPING) for name in ("hook", "CommState") for used in (0, 1)]


def pattern_on_rank_1(front_end):
    def wrong(rank):
        config = Config("int8", wires={"weights.7": "fp32"} if rank == 1 else {})
        ddp, _ = FRONT_ENDS[front_end].make(Gradients((50,)), config)
        synchronize(ddp, [torch.ones(50)])

    return wrong


WIRES = {"weights.0": "int8", "weights.1": "fp8"}
REVERSED = dict(reversed(WIRES.items()))
# What rank 1 has, and the other ranks. The order of wires matters: a parameter's wire comes from the first pattern that
# matches, and the bytes of a message are in the order of the wires.
CONFIGS = [
    *(
        (one, other, f"wire is {other!r} on rank 0 and {one!r} on rank 1")
        for other, one in (("off", "bf16"), ("bf16", "off"), ("auto", "off"), ("auto", "int8"), ("bf16", "auto"))
    ),
    # A wire has its own default block, its own exempt parameters and its own wire within a host.
    *(
        (Config(one, hosts=hosts), Config(other, hosts=hosts), f"wire is {other!r} on rank 0 and {one!r} on rank 1")
        for other, one, hosts in (("int4", "bf16", "auto"), ("int8", "int4", "auto"), ("fp32", "bf16", 3))
    ),
    (Config(hosts=[[0], [1], [2]]), Config(hosts=[[0, 1, 2]]), "config.hosts.groups is [[0, 1, 2]] on rank 0"),
    (
        Config("int4", wires={**REVERSED, "1d": "int4"}),
        Config("int4", wires={**WIRES, "1d": "int4"}),
        "config.wires",
    ),
]


def with_options(*, wire, broadcast_buffers=True, **options):
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **options)
    ddp.broadcast_buffers = broadcast_buffers  # given to the constructor, it would make the constructor wait
    fusedcomm.attach(ddp, wire, quiet=True)


UNUSED = {"find_unused_parameters": True}
OPTIONS = [
    (UNUSED, {}, "find_unused_parameters is False on rank 0 and True on rank 1"),
    ({}, {"static_graph": True}, "static_graph is True on rank 0 and False on rank 1"),
    ({**UNUSED, "bucket_cap_mb": 30}, UNUSED, "bucket_cap_mb is '1, 25' on rank 0 and '30' on rank 1"),
    ({}, {"bucket_cap_mb_list": [1, 2.5]}, "bucket_cap_mb_list is '1, 2.5' on rank 0 and '' on rank 1"),
    ({}, {"broadcast_buffers": False}, "_buffers is False on rank 0 and True on rank 1"),
]
AGREE = "DisagreementError: fusedcomm: the ranks do not agree:"
NO_DDP = "not Linear: wrap the model first ... or shard it with torch.distributed.fsdp.fully_shard(model)"
TOLD = "DisagreementError: fusedcomm: rank 1 cannot attach:"
WRAP = "; a reducer keeps its first hook, so wrap the model in a new DistributedDataParallel"
HOOK = "this DDP module already has the communication hook"
DIFFERENT = [
    *((of_gradients, {"config": one}, {"config": other}, f"{AGREE} ... {text}") for one, other, text in CONFIGS),
    *(
        (with_options, {"wire": wire, **one}, {"wire": wire, **other}, f"{AGREE} ddp. ... {text}. Give every rank")
        for wire in ("int8", "auto")
        for one, other, text in OPTIONS
    ),
]
ROWS = [
    *rows("attach", 0, [(lambda _: fusedcomm.attach(nn.Linear(2, 2)), f"TypeError ... {NO_DDP}")]),
    *rows("attach", 2, MODULES),
    *rows(
        "attach",
        3,
        [
            (pattern_on_rank_1(name), f"{TOLD} / ValueError: ... 'weights.7' matches none")
            for name in ("hook", "CommState")
        ],
    ),
    *rows("attach", 2, [(lambda _, given=given: of_gradients(**given), text) for given, text in ARGUMENTS]),
    *rows("attach", 2, [(with_a_hook, f"{TOLD} {HOOK} / RuntimeError: fusedcomm: {HOOK} ... {HOOK} ... {WRAP}")]),
    *rows("attach", 3, [(differ(make, other, one), text) for make, one, other, text in DIFFERENT], is_same=True),
]
