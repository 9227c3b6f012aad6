"""What DataParallel refuses, and with which reason."""

import functools
import gc

import torch
import torch.distributed as dist
from models import Mlp, refusal
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.reducer.ddp_arguments import check_devices


def wrapped(module: object, **kwargs) -> fusedcomm.DataParallel:
    return fusedcomm.DataParallel(module, **{"config": "fp32", "quiet": True, **kwargs})


ARGUMENTS = {
    "mixed_precision": (object(), "torch.autocast"),
    "delay_all_reduce_named_params": ([("a", nn.Parameter(torch.zeros(1)))], "leave it out"),
    "param_to_hook_all_reduce": (nn.Parameter(torch.zeros(1)), "leave it out"),
    "skip_all_reduce_unused_params": (True, "requires_grad_(False)"),
    "bucket_cap_mb_list": ([1, 2], "bucket_cap_mb="),
    "batched_grad_copy": (True, "no copies to batch"),
    "dim": (1, "not split along a dimension"),
    "device_ids": ([0], "for a module on cpu, None"),
    "output_device": (0, "for a module on cpu, None"),
    "bucket_cap_mb": (0, "bucket_mib"),
    "init_sync": (1, "init_sync"),
    "broadcast_buffers": (None, "broadcast_buffers"),
    "static_graph": ("yes", "static_graph"),
    "check_reduction": (2, "check_reduction"),
    "gradient_as_bucket_view": (0.5, "gradient_as_bucket_view"),
    "find_unused_parameters": (1, "find_unused_parameters"),
    "config": ("int9", "int9"),
    "local": (3, "LocalOptions"),
}


def arguments(rank, world_size):
    found = {name: refusal(lambda n=name, v=value: wrapped(Mlp(), **{n: v})) for name, (value, _) in ARGUMENTS.items()}
    found["two devices"] = refusal(lambda: wrapped(Mlp(), device_ids=[0, 1]))
    frozen = Mlp().requires_grad_(False)
    found |= {
        "unknown": refusal(lambda: wrapped(Mlp(), no_such_argument=1)),
        "no module": refusal(lambda: wrapped([])),
        "ddp": refusal(lambda: wrapped(DistributedDataParallel(Mlp()))),
        "frozen": refusal(lambda: wrapped(frozen)),
        "lazy": refusal(lambda: wrapped(nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)))),
        "devices": refusal(lambda: wrapped(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))),
    }
    module = Mlp()
    model = wrapped(module)
    found |= {
        "wrapper": refusal(lambda: wrapped(model)),
        "attach": refusal(lambda: fusedcomm.attach(model, "fp32")),
        "reducer": refusal(lambda: fusedcomm.GradReducer(model, "fp32")),
        "hook": refusal(lambda: model.register_comm_hook(None, lambda state, bucket: None)),
        "builtin hook": refusal(lambda: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)),
        "buffer hook": refusal(lambda: model._register_buffer_comm_hook(None, lambda state, buffers: None)),
        "logging": refusal(model._get_ddp_logging_data),
        "join": refusal(model.join),
        "Join": refusal(lambda: Join([model], divide_by_initial_world_size=False)),
    }
    model(torch.ones(2, 10)).sum().backward()  # it works in spite of all this
    ddp_module = Mlp()
    kept = DistributedDataParallel(ddp_module)
    found["in ddp"] = refusal(lambda: wrapped(ddp_module))
    assert kept.module is ddp_module
    gc.collect()  # a watch that outlives the test would wait for its store
    return found


def test_refusals_say_the_reason(ranks):
    for found in ranks.run(arguments, world_size=2):
        for name, (_, reason) in ARGUMENTS.items():
            assert found[name].startswith(("ValueError", "TypeError")) and reason in found[name], found[name]
        assert "one device" in found["two devices"] and "no_such_argument" in found["unknown"]
        assert found["no module"].startswith("TypeError") and "not a list" in found["no module"]
        assert found["ddp"].startswith("TypeError") and "ddp.module" in found["ddp"]
        assert found["frozen"].startswith("RuntimeError") and "requires a gradient" in found["frozen"]
        assert found["lazy"].startswith("RuntimeError") and "'1.weight' is not initialized" in found["lazy"]
        assert "['cpu', 'meta']" in found["devices"]
        assert found["wrapper"].startswith("TypeError") and "this is a DataParallel" in found["wrapper"]
        assert found["reducer"].startswith("TypeError") and "has one: model.comm" in found["reducer"]
        assert "a DistributedDataParallel already synchronizes" in found["in ddp"]
        assert found["attach"].startswith("TypeError") and "a fusedcomm.DataParallel, which sends" in found["attach"]
        assert "broadcast_buffers=False" in found["buffer hook"]
        for name in ("join", "Join"):
            assert "has no Join" in found[name] and "a rank without data sets model.comm.weight = 0" in found[name]
        assert "config=" in found["hook"] and "config=" in found["builtin hook"] and "comm.stats()" in found["logging"]


CUDA_1 = torch.device("cuda", 1)


def test_device_ids_name_the_modules_device():
    for given in ([1], ["cuda:1"], [CUDA_1], ["cuda"]):
        assert check_devices(CUDA_1, given, None) == ([1], 1)
    assert check_devices(CUDA_1, [1], CUDA_1) == ([1], 1)
    for given in (None, []):
        assert check_devices(CUDA_1, given, None) == (None, None)
        assert check_devices(torch.device("cpu"), given, None) == (None, None)
    for given in (([0], None), (["cuda:2"], None), (["cpu"], None), ([1], 0), (None, 0)):
        assert "the module's device, cuda:1" in refusal(functools.partial(check_devices, CUDA_1, *given))


class Buffered(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype = torch.float32, name: str = "mark") -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.counts = nn.Parameter(torch.zeros(4, dtype=torch.int64), requires_grad=False)
        self.register_buffer(name, torch.zeros(size, dtype=dtype))


def differing(rank, world_size):
    is_odd = rank == 1
    second = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 if is_odd else 2))
    more = nn.Sequential(*(nn.Linear(2, 2) for _ in range(2 + is_odd)))
    integers = Buffered(2)
    if is_odd:
        integers.counts = nn.Parameter(torch.zeros(5, dtype=torch.int64), requires_grad=False)
    found = {
        "shape": refusal(lambda: wrapped(second)),
        "dtype": refusal(lambda: wrapped(nn.Linear(2, 2, dtype=torch.float64 if is_odd else None))),
        "count": refusal(lambda: wrapped(more)),
        "buffer shape": refusal(lambda: wrapped(Buffered(2 + is_odd))),
        "buffer dtype": refusal(lambda: wrapped(Buffered(2, torch.int32 if is_odd else torch.float32))),
        "buffer name": refusal(lambda: wrapped(Buffered(2, name="other" if is_odd else "mark"))),
        "integers": refusal(lambda: wrapped(integers)),
        "buffers": refusal(lambda: wrapped(Mlp(), broadcast_buffers=not is_odd)),
        "init_sync": refusal(lambda: wrapped(Mlp(), init_sync=is_odd)),
        "static": refusal(lambda: wrapped(Mlp(), static_graph=is_odd)),
        "wire": refusal(lambda: wrapped(Mlp(), config="bf16" if is_odd else "fp32")),
    }
    gc.collect()  # a watch that outlives the test would wait for its store
    return found


def test_ranks_that_differ_are_named_on_every_rank(ranks):
    of_all = ranks.run(differing, world_size=3)
    assert of_all[0] == of_all[1] == of_all[2]
    found = of_all[0]
    for name, text in found.items():
        assert text.partition(":")[0] in ("RuntimeError", "DisagreementError"), (name, text)
        assert "rank 1" in text and "rank 2" not in text, (name, text)
    for name, part in {
        "shape": "[1][0] is 2 on rank 0 and 3 on rank 1",
        "buffer shape": "mark",
        "buffer name": "other",
        "integers": "counts",
    }.items():
        assert part in found[name]
    assert "torch.int32" in found["buffer dtype"] and "different init_sync" in found["init_sync"]
