"""Everything that fusedcomm reads of a DDP module, partly from private fields, and refusals of modules that it cannot
attach to. Another version of torch may need changes here and nowhere else."""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.config import combinations
from fusedcomm.native import _C
from fusedcomm.session.parameters import NamedParameter, ParameterWatch, has_sparse_gradient, trainable


def native_hook(state: object, bucket: object) -> None:
    """Represents the native hook in ``ddp._comm_hooks``. Python never calls that hook."""
    raise RuntimeError(
        "fusedcomm: the hook was called from Python, as compiled autograd's python reducer does, and its result would "
        "be ignored: set torch._dynamo.config.optimize_ddp to something other than 'python_reducer'"
    )


def refuse_options(ddp: DistributedDataParallel) -> None:
    """Raises RuntimeError if the module has a hook, or a DDP option that fusedcomm cannot support; names it."""
    options = {
        "mixed_precision": ddp.mixed_precision,
        "parameters of _apply_optimizer_in_backward()": any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters()
        ),
        "optimize_ddp": "python_reducer" if getattr(ddp, "_use_python_reducer", False) else None,
        "skip_all_reduce_unused_params": getattr(ddp, "skip_all_reduce_unused_params", False),
        "delay_all_reduce_named_params": bool(getattr(ddp, "_delay_all_reduce_params", None)),
    }
    combinations.refuse("attach", options)
    # A copied module has the entry but not the hook.
    ddp._comm_hooks[:] = [hook for hook in ddp._comm_hooks if hook[0] is not native_hook]
    if ddp._comm_hooks:
        name = getattr(ddp._comm_hooks[0][0], "__qualname__", ddp._comm_hooks[0][0])
        raise RuntimeError(
            f"fusedcomm: this DDP module already has the communication hook {name}; a reducer keeps its first hook, "
            "so wrap the model in a new DistributedDataParallel"
        )


def refuse_join(ddp: DistributedDataParallel) -> None:
    """Raises RuntimeError if the module, during a search, is under ``Join(divide_by_initial_world_size=False)``."""
    joined = join_of(ddp) == ACTIVE_RANKS
    combinations.refuse("attach", {"config": "auto", "Join(…, divide_by_initial_world_size=False)": joined})


NO_JOIN, ALL_RANKS, ACTIVE_RANKS = range(3)
"""How the native hook numbers what gradients are divided by under ``Join``."""


def join_of(ddp: DistributedDataParallel | None) -> int:
    """NO_JOIN if the module is not under ``Join``; else what gradients are divided by there."""
    if ddp is None or not ddp._join_config.enable:
        return NO_JOIN
    return ALL_RANKS if getattr(ddp, "_divide_by_initial_world_size", True) else ACTIVE_RANKS


def forget_refused_hooks(ddp: DistributedDataParallel) -> None:
    """Removes the hooks that the reducer has refused from ``ddp._comm_hooks``.

    Call it only while fusedcomm's hook is in the reducer, which has one hook at most.

    ``register_comm_hook`` adds its entry, and gives the hook's name to DDP's logger, before it asks the reducer.
    """
    ddp._comm_hooks[:] = [hook for hook in ddp._comm_hooks if hook[0] is native_hook]
    ddp.logger._set_comm_hook_name("fusedcomm")


def refuse_delayed(parameters: Iterable[torch.Tensor]) -> None:
    """Raises RuntimeError if one of these parameters starts the all-reduce of ``delay_all_reduce_named_params``."""
    own = DistributedDataParallel._delayed_all_reduce_hook
    hooks = (hook for parameter in parameters for hook in (parameter._backward_hooks or {}).values())
    starts_one = any(getattr(hook, "__func__", None) is own for hook in hooks)
    combinations.refuse("CommState", {"delay_all_reduce_named_params": starts_one})


class SameParameters:
    """Tells whether DDP still synchronizes the parameters that it was made with.

    DDP has hooks at the autograd nodes of these tensors. A parameter that is replaced, as by
    ``load_state_dict(assign=True)``, or converted, as by ``.to(dtype)``, has another node, and DDP does not notice.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: list[NamedParameter]) -> None:
        self._watch, self._parameters = ParameterWatch(ddp.module), parameters
        self._kinds = [(p.tensor.dtype, p.tensor.device) for p in parameters]
        self._nodes = _C.ReducerNodes([p.tensor for p in parameters])

    def refuse_changes(self) -> None:
        """Raises RuntimeError if a parameter has been replaced or converted; names it."""
        unknown, converted = self._watch.unknown(), self._nodes.replaced()
        replaced = [index for index, parameter in enumerate(self._parameters) if parameter.name in unknown]
        indices = sorted({*replaced, *converted})
        if indices:
            said = "; ".join(self._describe(index, index in replaced) for index in indices[:3])
            more = f"; and {len(indices) - 3} more parameters have changed" if len(indices) > 3 else ""
            raise RuntimeError(
                "fusedcomm: parameters have changed since fusedcomm was attached, so neither DDP nor fusedcomm "
                f"synchronizes their gradients any more: {said}{more}. Make a new "
                "DistributedDataParallel of the model and attach to that. Convert a model before DDP is made, and load "
                "with load_state_dict(state, assign=False)"
            )

    def _describe(self, index: int, is_replaced: bool) -> str:
        """What has happened to this parameter, for an error."""
        parameter, (dtype, device) = self._parameters[index], self._kinds[index]
        if is_replaced:
            return f"{parameter.name!r} is another tensor"
        now = parameter.tensor
        if now.dtype != dtype:
            was, is_now = (str(each).removeprefix("torch.") for each in (dtype, now.dtype))
        elif now.device != device:
            was, is_now = f"on {device}", f"on {now.device}"
        else:
            return f"{parameter.name!r} was converted and converted back"
        return f"{parameter.name!r} was {was} and is {is_now}"


def refuse_unhooked(parameters: list[NamedParameter]) -> None:
    """Raises RuntimeError if DDP's reducer has no hook at a parameter that requires gradients; names it."""
    now = [p for p in trainable(parameters) if not p.tensor.is_meta]  # the session refuses that device
    names = [now[index].name for index in _C.ReducerNodes([p.tensor for p in now]).missing()]
    if names:
        shown = ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise RuntimeError(
            f"fusedcomm: DDP does not synchronize the gradients of {shown}: converted (.to(dtype)), replaced or thawed "
            "after DDP was made, these parameters have no hook of DDP's. Make a new DistributedDataParallel of the "
            "model, and attach to that"
        )


def refuse_sparse(ddp: DistributedDataParallel, device: torch.device) -> None:
    """Raises ValueError if gradients on cuda are sparse: NCCL cannot all-reduce them, as config="auto" would."""
    for name, module in ddp.module.named_modules() if device.type != "cpu" else ():
        is_taken = f"{name}.weight" not in ddp.parameters_to_ignore
        if is_taken and has_sparse_gradient(module) and module.weight.requires_grad:
            combinations.refuse("attach", {"config": "auto", "sparse gradients on cuda": f"{name}.weight"})


def named_tensors(module: torch.nn.Module, ignored: Collection[str]) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters that DDP's reducer takes if they require gradients: all except the `ignored`.

    They are in the order of named_parameters(). A tied parameter appears once under each of its names.

    As in DDP, a tied parameter is left out only if all its names are ignored, and `ignored` must name a parameter of
    `module` itself with a leading dot.
    """
    taken = {
        id(tensor)
        for path, child in module.named_modules()
        for name, tensor in child.named_parameters(recurse=False)
        if f"{path}.{name}" not in ignored
    }
    return [(name, tensor) for name, tensor in module.named_parameters(remove_duplicate=False) if id(tensor) in taken]


def synchronized_tensors(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """The parameters whose gradients DDP synchronizes if they require any."""
    return [tensor for _, tensor in named_tensors(ddp.module, ddp.parameters_to_ignore)]


def options_to_agree(ddp: DistributedDataParallel) -> dict[str, object]:
    """Returns the options that decide what DDP's ranks exchange, JSON-serializable. If they differ between ranks, DDP
    fails or waits for ever.

    ``gradient_as_bucket_view`` and ``batched_grad_copy`` may differ. So may ``bucket_cap_mb`` if DDP begins with one
    bucket and rebuilds it as rank 0 does.
    """
    options = {
        "bucket_cap_mb_list": _in_mib(ddp.bucket_bytes_cap_list),
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
    }
    if next(ddp.module.buffers(), None) is not None:
        # Older versions of torch name it broadcast_buffers.
        name = "forward_sync_buffers" if hasattr(ddp, "forward_sync_buffers") else "broadcast_buffers"
        options[name] = getattr(ddp, name)
    agreed: dict[str, object] = {"ddp": options}
    if ddp.find_unused_parameters and not ddp.static_graph:
        # Not in `options`, which are compared first: all ranks have this key or none has it.
        agreed["ddp.bucket_cap_mb"] = _in_mib(dict.fromkeys(bucket_nbytes_caps(ddp)))
    return agreed


def _in_mib(caps_nbytes: Iterable[int]) -> str:
    """The caps in MiB, separated by commas; empty if there are none."""
    return ", ".join(f"{nbytes / (1 << 20):.10g}" for nbytes in caps_nbytes)


def bucket_nbytes_caps(ddp: DistributedDataParallel | None) -> list[int] | None:
    """The caps, in bytes, with which DDP rebuilds its buckets: one for each bucket, the last for all that follow. None
    if the module is gone."""
    if ddp is None:
        return None
    config = getattr(ddp, "_bucket_config", None)
    if config is not None:
        return list(config.per_bucket_bytes_caps) or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]
    # torch 2.11
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    return list(ddp.bucket_bytes_cap_list) or [first, ddp.bucket_bytes_cap]
