"""What DataParallel refuses."""

import torch
import torch.distributed as dist
from models import Mlp, reducer_of
from refusals import differ, rows
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm


def wrapped(module: object, **kwargs) -> fusedcomm.DataParallel:
    return fusedcomm.DataParallel(module, **{"config": "fp32", "quiet": True, **kwargs})


def given(**kwargs):
    return lambda _: wrapped(Mlp(), **kwargs)


ARGUMENTS = [
    (given(device_ids=[0]), "ValueError ... for a module on cpu, None"),
    (given(device_ids=[0, 1]), "ValueError ... one device"),
    (given(output_device=0), "ValueError ... for a module on cpu, None"),
    (given(bucket_cap_mb=0), "ValueError: ... bucket_mib"),
    (given(init_sync=1), "ValueError: ... init_sync"),
    (given(broadcast_buffers=None), "ValueError: ... broadcast_buffers"),
    (given(static_graph="yes"), "ValueError: ... static_graph"),
    (given(check_reduction=2), "ValueError: ... check_reduction"),
    (given(gradient_as_bucket_view=0.5), "ValueError: ... gradient_as_bucket_view"),
    (given(find_unused_parameters=1), "ValueError: ... find_unused_parameters"),
    (given(config="int9"), "ValueError: ... int9"),
    (given(local=3), "ValueError: ... LocalOptions"),
    (given(no_such_argument=1), "TypeError: ... no_such_argument"),
    (lambda _: wrapped([]), "TypeError ... not a list"),
    (lambda _: wrapped(DistributedDataParallel(Mlp())), "TypeError ... ddp.module"),
    (lambda _: wrapped(Mlp().requires_grad_(False)), "RuntimeError ... requires a gradient"),
    (
        lambda _: wrapped(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))),
        "RuntimeError ... '1.weight' is not initialized",
    ),
    (
        lambda _: wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))),
        "ValueError ... ['cpu', 'meta']",
    ),
    (
        lambda _: (module := Mlp(), ddp := DistributedDataParallel(module), wrapped(module), ddp),
        "ValueError ... a DistributedDataParallel already synchronizes",
    ),
]


def of_wrapper(call):
    """What is done with a wrapped model, which works in spite of it."""

    def wrong(_):
        model = wrapped(Mlp())
        try:
            call(model)
        finally:
            model(torch.ones(2, 10)).sum().backward()

    return wrong


NO_JOIN = "has no Join ... a rank without data sets model.comm.weight = 0"
OF_WRAPPER = [
    (wrapped, "TypeError ... this is a DataParallel"),
    (lambda m: fusedcomm.attach(m, "fp32"), "TypeError ... a fusedcomm.DataParallel, which sends"),
    (reducer_of, "TypeError ... has one: model.comm"),
    (lambda m: m.register_comm_hook(None, lambda state, bucket: None), "RuntimeError ... config="),
    (
        lambda m: m._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS),
        "RuntimeError ... config= ... hook",
    ),
    (
        lambda m: m._register_buffer_comm_hook(None, lambda state, buffers: None),
        "RuntimeError ... broadcast_buffers=False",
    ),
    (lambda m: m._get_ddp_logging_data(), "RuntimeError ... comm.stats()"),
    (lambda m: m.join(), f"RuntimeError ... {NO_JOIN}"),
    (lambda m: Join([m], divide_by_initial_world_size=False), f"RuntimeError ... {NO_JOIN}"),
]


class Buffered(nn.Module):
    def __init__(self, size: int = 2, dtype: torch.dtype = torch.float32, name: str = "mark", counts: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.counts = nn.Parameter(torch.zeros(counts, dtype=torch.int64), requires_grad=False)
        self.register_buffer(name, torch.zeros(size, dtype=dtype))


def of_buffered(**kwargs):
    wrapped(Buffered(**kwargs))


def of_mlp(**kwargs):
    wrapped(Mlp(), **kwargs)


AGREE = "DisagreementError ... the ranks do not agree:"
DIFFERENT = [  # beside what GradReducer refuses
    (differ(of_buffered, {}, {"size": 3}), f"{AGREE} buffer mark[0][0] is 2 on rank 0 and 3 on rank 1"),
    (differ(of_buffered, {}, {"dtype": torch.int32}), f"{AGREE} buffer mark[1] is 'torch.float32' ... torch.int32"),
    (differ(of_buffered, {}, {"name": "other"}), f"{AGREE} buffer mark is ... None on rank 1"),
    (differ(of_buffered, {}, {"counts": 5}), f"{AGREE} parameter counts[0][0] is 4 on rank 0 and 5 on rank 1"),
    (
        differ(of_mlp, {"broadcast_buffers": True}, {"broadcast_buffers": False}),
        f"{AGREE} broadcast_buffers[0] is True",
    ),
    (differ(of_mlp, {"init_sync": False}, {"init_sync": True}), f"{AGREE} init_sync is False on rank 0"),
    (
        differ(of_mlp, {"static_graph": False}, {"static_graph": True}),
        "DisagreementError ... find_unused_parameters is False on rank 0",
    ),
]
ROWS = [
    *rows("DataParallel", 2, ARGUMENTS),
    *rows("DataParallel", 2, [(of_wrapper(call), text) for call, text in OF_WRAPPER]),
    *rows("DataParallel", 3, DIFFERENT, is_same=True),
]
