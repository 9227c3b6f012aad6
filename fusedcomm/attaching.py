"""``fusedcomm.attach``: takes any model whose gradients are reduced across ranks, and finds its front end."""

import sys
from typing import TYPE_CHECKING, overload

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.autotune.auto import ConfigLike
from fusedcomm.config import Config, LocalOptions, Off, Wire, combinations
from fusedcomm.ddp.attach import attach as attach_ddp
from fusedcomm.ddp.handle import Handle
from fusedcomm.reducer.data_parallel import DataParallel

if TYPE_CHECKING:
    from fusedcomm.fsdp.handle import FsdpHandle


@overload
def attach(
    model: DistributedDataParallel,
    config: ConfigLike | None = None,
    *,
    local: LocalOptions | None = None,
    quiet: bool = False,
) -> Handle: ...


@overload
def attach(
    model: nn.Module,
    config: Config | Wire | Off | None = None,
    *,
    local: LocalOptions | None = None,
    quiet: bool = False,
) -> "Handle | FsdpHandle": ...


def attach(
    model: nn.Module,
    config: ConfigLike | None = None,
    *,
    local: LocalOptions | None = None,
    quiet: bool = False,
    members: object = None,
) -> "Handle | FsdpHandle":
    """Sends a model's gradients in a wire. Call it on every rank, before or between steps.

    Args:
        model: one of
            a DistributedDataParallel module, with its parameters on cpu over a gloo group, or on one cuda device over
            an NCCL group;
            a model with modules of FSDP2 (``fully_shard``, or ``replicate`` of torch's replicate_with_fsdp), on cpu
            over a gloo group, or on one cuda device over an NCCL group: every such module's reduce-scatter, and the
            all-reduce of replicas;
            what ``torch.compile`` or Lightning Fabric has made of one of these.
        config: a wire's name, a :class:`fusedcomm.Config`, "off", or, for DDP, "auto"; see
            :func:`fusedcomm.autotune.auto.chosen`.
        local: a :class:`fusedcomm.LocalOptions`: options that may differ from rank to rank. They have no effect on
            DDP's own all-reduce.
        quiet: whether rank 0 does not report the plan. Reports go through ``logging.getLogger("fusedcomm")``, and are
            printed if that has no handler (fusedcomm/log.py).
        members: refused: DDP's own reducer and FSDP2's shards do not outlive a rank.

    Returns:
        A handle with ``stats()``, ``plan()``, ``trace()``, ``nonfinite_report()``, ``state_dict()``,
        ``load_state_dict()`` and ``detach()``; for DDP also with ``tuning()``.

    On cuda this compiles the kernels, which takes some seconds the first time. A training step cannot be captured into
    a CUDA graph: the hook raises RuntimeError under capture.

    DDP's mean is over all ranks of its group. Under ``Join(divide_by_initial_world_size=False)`` it is over those with
    inputs, and with ``Config(weighted=…)`` each rank weighs as its handle's ``weight``. After parameters of DDP's have
    been converted (``.to(dtype)``) or replaced, the next forward pass raises RuntimeError.

    Raises:
        TypeError: `model` or `config` is none of these.
        ValueError: an argument is out of range, two cannot be combined, `members` is given, or another front end serves
            one of the parameters.
        RuntimeError: the module has a hook or an option that cannot be combined, fusedcomm has no path for the device
            or backend, or the ranks do not agree (the same text on every rank).
    """
    model = unwrapped(model)
    is_fsdp2 = is_sharded(model)
    combinations.refuse("FSDP2" if is_fsdp2 else "attach", {"members": members})
    if is_fsdp2:
        from fusedcomm.fsdp.attach import attach_fsdp  # imports FSDP2, which takes a while

        return attach_fsdp(model, config, local=local, quiet=quiet)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(model, fsdp.FullyShardedDataParallel):
        raise TypeError(
            "fusedcomm.attach takes FSDP2, and this is FullyShardedDataParallel, which is FSDP1: use "
            "torch.distributed.fsdp.fully_shard(model) in its place"
        )
    if isinstance(model, DataParallel):
        raise TypeError(
            "fusedcomm.attach takes torch's DistributedDataParallel, and this is a fusedcomm.DataParallel, which sends "
            "its gradients itself: DataParallel(model, config=…) chooses how, and model.comm tells what it does"
        )
    return attach_ddp(model, config, local=local, quiet=quiet)


def is_sharded(model: nn.Module) -> bool:
    """Whether `model` has modules of FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model has modules of it only if it has been imported
    if fsdp is None or not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
        return False
    return any(isinstance(each, fsdp.FSDPModule) for each in model.modules())


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that torch.compile or Lightning Fabric has wrapped; else `model`."""
    while True:
        # Named by their classes, because importing these would take seconds or may not be possible.
        kind = type(model).__name__
        if kind == "OptimizedModule" and hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif kind == "_FabricModule" and hasattr(model, "_forward_module"):
            model = model._forward_module
        else:
            return model
