"""What attach() refuses with DDP."""

from models import Gradients
from refusals import differ, rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, LocalOptions


def of_gradients(**kwargs):
    fusedcomm.attach(DistributedDataParallel(Gradients((80, 64), (9,))), quiet=True, **kwargs)


ARGUMENTS = [
    ({"local": LocalOptions(isa="sse9")}, "ValueError: ... sse9 ... portable"),
    ({"local": 8}, "ValueError: ... local=8 ... a fusedcomm.LocalOptions(…)"),
    ({"config": "fp7"}, "ValueError: ... config='fp7' ... 'fp32', 'bf16', 'fp16', 'int8' ... 'int4', 'auto', 'off'"),
    (
        {"config": {"wire": "int8"}},
        "TypeError: ... config={'wire': 'int8'} ... a wire's name ('fp32', ... a fusedcomm.Config(…)",
    ),
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


WIRES = {"weights.0": "int8", "weights.1": "fp8"}
REVERSED = dict(reversed(WIRES.items()))
# What rank 1 has, and the other ranks. The order of wires matters: a parameter's wire comes from the first pattern that
# matches, and the bytes of a message are in the order of the wires.
CONFIGS = [
    *(
        (one, other, f"wire is {other!r} on rank 0 and {one!r} on rank 1")
        for other, one in (("off", "bf16"), ("bf16", "off"), ("auto", "off"))
    ),
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
NO_DDP = "not Linear: wrap the model first"
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
    *rows("attach", 2, [(lambda _, given=given: of_gradients(**given), text) for given, text in ARGUMENTS]),
    *rows("attach", 2, [(with_a_hook, f"{TOLD} {HOOK} / RuntimeError: fusedcomm: {HOOK} ... {HOOK} ... {WRAP}")]),
    *rows("attach", 3, [(differ(make, other, one), text) for make, one, other, text in DIFFERENT], is_same=True),
]
