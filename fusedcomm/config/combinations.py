"""The settings that do not go together: one table, which every front end raises from, and the documents show.

What depends on a single value is checked where the setting is, and what depends on ranks where they are compared.
"""

from collections.abc import Mapping
from typing import NamedTuple


class Besides(tuple):
    """All values of a setting but these."""


GIVEN = Besides((None, False, 0))
"""Any value but those of a setting that is left out."""
SINGLE_LEVEL = Besides(("auto", "two-shot"))
"""Sums that have one level, and no codes of a rank's own to keep."""
_MOST_SHOWN = 80
"""Characters of a value in an error; a longer value is left out."""


class Combination(NamedTuple):
    """Settings that do not go together.

    Attributes:
        front_end: what the settings are given to. If there is one setting, it does not go with this.
        settings: values by name: one, a tuple of several, GIVEN or another Besides. A name that is no argument's is
            a fact, which is True or False, or names what it is true of.
        why: in a few words.
        instead: what to change.
        error: what is raised.
    """

    front_end: str
    settings: dict[str, object]
    why: str
    instead: str
    error: type[Exception] = ValueError

    def is_met(self, given: Mapping[str, object]) -> bool:
        """Whether `given` has all of these settings, with such values."""
        return all(name in given and _matches(given[name], values) for name, values in self.settings.items())

    def text(self, given: Mapping[str, object]) -> str:
        """The error's text, with the values that were given."""
        shown = [_shown(name, given[name]) for name in self.settings]
        *those, beside = shown if len(shown) > 1 else (*shown, self.front_end)
        return f"fusedcomm: {' with '.join(those)} does not go with {beside} ({self.why}): {self.instead}"


def found(front_end: str, given: Mapping[str, object]) -> Combination | None:
    """The first row of the front end that `given`, values by the settings' names, meets; None if there is none."""
    return next((row for row in TABLE if row.front_end == front_end and row.is_met(given)), None)


def text(front_end: str, given: Mapping[str, object]) -> str:
    """The text of the row that found() returns; empty if there is none."""
    row = found(front_end, given)
    return row.text(given) if row else ""


def refuse(front_end: str, given: Mapping[str, object]) -> None:
    """Raises the error of the row that found() returns, if there is one."""
    if row := found(front_end, given):
        raise row.error(row.text(given))


def _matches(value: object, values: object) -> bool:
    listed = values if isinstance(values, tuple) else (values,)
    # Only values of one type are compared: a tensor, for example, has no single answer.
    is_listed = any(value is each or (type(value) is type(each) and value == each) for each in listed)
    return is_listed != isinstance(values, Besides)


def _shown(name: str, value: object) -> str:
    text = repr(value)
    text = text if len(text) <= _MOST_SHOWN else "…"
    if name.isidentifier():
        return f"{name}={text}"
    return name if value is True else f"{name} ({text})"


ADDED_PASSES = "passes that add up gradients (no_sync(), backward_passes_per_step=)"
_HOOKLESS = "fusedcomm.attach(ddp, …) instead of register_comm_hook"
_PARALLEL = "fusedcomm.DataParallel(module, config=…, members=members)"
_INSIDE_HOSTS = "DDP or FSDP2 inside a host"
_ON_CUDA = "gradients on cuda"
_OWN_GROUP = "members bring their own group"
_NO_RESIDUALS = "residuals would take as much memory on each rank as all gradients, which sharding is to save"

# A row is two lines: where and what; why and what to change.
# fmt: off
TABLE = tuple(Combination(*row) for row in (
    ("Config", {"wire": "auto"},
     "it is a search", "give fusedcomm.attach or fusedcomm.GradReducer 'auto' in place of a Config"),
    ("Config", {"wire": "off"},
     "it is DDP's own all-reduce", "use fusedcomm.attach(ddp, 'off'), or wire='fp32', which is as exact"),
    ("Config", {"sum": "direct", "wire": Besides(("bf16", "fp16"))},
     "it adds in the wire, in 16 bits", "use sum='two-shot', or for 'fp32' sum='exact'"),
    ("Config", {"sum": "exact", "wire": Besides(("fp32",))},
     "it is an fp32 all-reduce", "use wire='fp32' with it"),
    ("Config", {"sum": ("direct", "exact"), "wires": GIVEN},
     "it adds a bucket in one dtype", "use sum='two-shot', or no other wires"),
    ("Config", {"sum": "direct", "weighted": GIVEN},
     "it carries 16-bit numbers alone", "use sum='two-shot'"),
    ("Config", {"feedback": GIVEN, "wires that are all 'fp32'": True},
     "nothing is rounded", "leave it out"),
    ("Config", {"feedback": GIVEN, "sum": "direct"},
     "the transport rounds and adds", "use sum='two-shot' or 'one-shot'"),
    ("Config", {"hosts": GIVEN, "sum": SINGLE_LEVEL},
     "that sum has one level", "use sum='auto' or 'two-shot', or hosts='auto', which has two levels where the sum has"),
    ("Config", {"local_wire": Besides(("fp32",)), "wire": "fp32"},
     "it would round what the wire does not", "leave it out, or use 'fp32'"),
    ("Config", {"params_kept": True, "params": "fp32"},
     "torch gathers them, and codes are kept", "give the wire of parameters, or leave it out"),
    ("sums on two levels", {"hosts": GIVEN, "feedback": GIVEN, "weighted": GIVEN},
     "residuals of a host's ranks have no weight", "use hosts=None, or leave one of them out"),
    ("gradients without shards", {"params": Besides(("fp32",))},
     "it is for FSDP2's all-gathers", "leave it out"),
    ("every front end", {"isa": GIVEN, _ON_CUDA: True},
     "it is for the CPU's codec", "leave it out"),
    ("every front end", {"codec_threads": GIVEN, _ON_CUDA: True},
     "they are for the CPU's codec", "leave it out"),
    ("every front end", {"weighted": "mean", ADDED_PASSES: True},
     "each pass would have to be multiplied by its weight", "let losses be sums, and use weighted='sum'", RuntimeError),
    ("simulate", {"config": "auto"},
     "a search needs real steps", "name the wire"),
    ("simulate", {"config": "off"},
     "it is DDP's own all-reduce", "config='fp32' is as exact"),
    ("simulate", {"params": Besides(("fp32",))},
     "it has sums alone", "leave it out"),
    ("simulate", {"weighted": GIVEN, "weights": None},
     "each rank has a weight", "give weights=[…], one for each rank"),

    ("attach", {"members": GIVEN},
     "DDP's own reducer ends when a rank is lost", f"make {_PARALLEL} in place of DistributedDataParallel"),
    ("attach", {"mixed_precision": GIVEN},
     "DDP registers a hook of its own", "use torch.autocast; config= is the dtype that is sent", RuntimeError),
    ("attach", {"parameters of _apply_optimizer_in_backward()": True},
     "it registers a hook of its own", "call optimizer.step() after backward() instead", RuntimeError),
    ("attach", {"optimize_ddp": "python_reducer"},
     "it ignores what a hook returns", "set another torch._dynamo.config.optimize_ddp before wrapping", RuntimeError),
    ("attach", {"skip_all_reduce_unused_params": True},
     "steps are counted by the last bucket", "make DDP without that option; find_unused_parameters=True is possible",
     RuntimeError),
    ("attach", {"delay_all_reduce_named_params": True},
     "nothing waits for that all-reduce beside a hook", "leave the option out", RuntimeError),
    ("attach", {"config": "auto", "Join(…, divide_by_initial_world_size=False)": True},
     "a search also tries sums over all ranks", "leave the option out, or name a wire, config='bf16' for example",
     RuntimeError),
    ("attach", {"config": "auto", "sparse gradients on cuda": GIVEN},
     "it tries NCCL's all-reduce, which has none of these", "name a wire, which sends them exactly"),
    ("CommState", {"config": "auto"},
     "a registered hook cannot be changed", f"use {_HOOKLESS}"),
    ("CommState", {"config": "off"},
     "DDP's own all-reduce needs no hook", f"do not register one, or use {_HOOKLESS}"),
    ("CommState", {"weighted": GIVEN},
     "a registered hook has no handle to give weights to", f"use {_HOOKLESS}"),
    ("CommState", {"delay_all_reduce_named_params": True},
     "nothing waits for that all-reduce beside a hook", "leave the option out", RuntimeError),
    ("CommState", {"wires": GIVEN, "module": None},
     "a hook sees no names", "pass module=model, or use fusedcomm.attach"),

    ("FSDP2", {"config": "auto"},
     "its reduce-scatters have one wire from the start", "name the wire"),
    ("FSDP2", {"sum": Besides(("auto",))},
     "every rank adds what is for it", "leave it out"),
    ("FSDP2", {"feedback": GIVEN, "shards without replicas": True},
     _NO_RESIDUALS, "leave it out"),
    ("FSDP2", {"params": Besides(("fp32",)), "replicas without shards": True},
     "nothing is gathered", "leave it out"),
    ("FSDP2", {"params": Besides(("fp32",)), "a module's own all-gather": GIVEN},
     "it would take that one's place", "attach before set_custom_all_gather(), or leave one of them out"),
    ("FSDP2", {"weighted": GIVEN, "modules on several meshes": True},
     "a rank would have a weight on each", "scale the loss instead, or put all modules on one mesh"),
    ("FSDP2", {"weighted": GIVEN, "feedback": GIVEN, "HSDP on cuda": True},
     "the host does not know what shards weigh", "use a mesh of one dimension, or leave one of them out"),
    ("FSDP2", {"members": GIVEN},
     "a lost rank's shard could not be summed again",
     f"leave the model whole on each rank, {_PARALLEL}, or train from checkpoints"),

    ("GradReducer", {"config": "off"},
     "it has no sums of DDP's", "use fusedcomm.attach(ddp, 'off'), or config='fp32', which is as exact"),
    ("GradReducer", {"parameters of _apply_optimizer_in_backward()": GIVEN},
     "it steps before gradients are means", "call optimizer.step() after backward() instead", RuntimeError),
    ("DataParallel", {"members": GIVEN, "process_group": GIVEN},
     _OWN_GROUP, "leave one of them out"),
    ("DataParallel", {"members": GIVEN, "device_mesh": GIVEN},
     _OWN_GROUP, "leave one of them out"),
    ("DataParallel", {"members": GIVEN, "buffers that are broadcast": True},
     "they need a process group", "use broadcast_buffers=False; each rank then has its own"),
    ("DataParallel", {"mixed_precision": GIVEN},
     "it is for DDP's own reducer", "use torch.autocast; config= is the dtype that is sent"),
    ("DataParallel", {"delay_all_reduce_named_params": GIVEN},
     "gradients leave when their bucket is complete", "leave it out"),
    ("DataParallel", {"param_to_hook_all_reduce": GIVEN},
     "gradients leave when their bucket is complete", "leave it out"),
    ("DataParallel", {"skip_all_reduce_unused_params": GIVEN},
     "every rank sends every bucket", "freeze what is never used, requires_grad_(False)"),
    ("DataParallel", {"bucket_cap_mb_list": GIVEN},
     "all buckets but the first have one cap", "use bucket_cap_mb="),
    ("DataParallel", {"batched_grad_copy": GIVEN},
     "gradients are not copied", "leave it out"),
    ("DataParallel", {"dim": GIVEN},
     "a process has one device", "leave it out: inputs are not split"),
    ("Members", {"process_group": GIVEN},
     _OWN_GROUP, "leave one of them out"),
    ("Members", {"find_unused_parameters": True},
     "a lost rank cannot say what it has used", "use every parameter in every pass; leave static_graph out, too"),
    ("Members", {"config": "auto"},
     "ranks that come and go change what it measures", "name a wire"),
    ("Members", {"sum": SINGLE_LEVEL},
     "it keeps no codes that could be summed again", "use sum='auto' or 'two-shot'"),
    ("Members", {"hosts": GIVEN},
     "two levels need the same ranks on every host", "leave it out"),
    ("Members", {"microbatches": GIVEN, "weighted": Besides(("mean",))},
     "ranks weigh as their microbatches", "give Config(…, weighted='mean')"),
    ("Members", {"a default group over NCCL": True, _ON_CUDA: True},
     "torch's watchdog ends the process when a rank is lost",
     "call init_process_group('gloo'); members make communicators of their own"),

    ("ShardedOptimizer", {"members": GIVEN},
     "each rank takes its state with it when it leaves", "make the GradReducer without members"),
    ("ShardedOptimizer", {"config": "auto"},
     "it needs one wire from the start", "name the GradReducer's wire"),
    ("ShardedOptimizer", {"feedback": GIVEN},
     _NO_RESIDUALS, "make the GradReducer without it"),
    ("ShardedOptimizer", {"sum": SINGLE_LEVEL},
     "it has no second half in which an owner could step", "use sum='auto' or 'two-shot'"),

    ("LocalSteps", {"config": "auto"},
     "merges are too seldom for a search", "name the wire"),
    ("LocalSteps", {"config": "off"},
     "it would merge nothing", "name the wire"),
    ("LocalSteps", {"weighted": GIVEN},
     "it is for backward passes", "leave it out: where every= is a time, ranks weigh as their steps"),
    ("LocalSteps", {"compare_every": Besides((None, 1000))},
     "ranks differ between merges, and merged states are always compared", "leave it out"),
    ("LocalSteps", {"compare": Besides(("warn",))},
     "ranks differ between merges, and merged states are always compared", "leave it out"),
    ("LocalSteps", {"feedback": GIVEN},
     "it takes memory, and no measured loss was lower with it", "leave it out"),
    ("LocalSteps", {"sum": "direct"},
     "a merge has numbers that must stay exact", "use sum='auto'"),
    ("LocalSteps", {"every as a time": GIVEN, _INSIDE_HOSTS: True},
     "its ranks must begin a merge after the same step", "give every= in steps, or the plain module"),
))
# fmt: on
