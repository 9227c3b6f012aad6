"""``fusedcomm.attach``: gives a DDP module the native communication hook."""

import os
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedcomm import env, log
from fusedcomm.autotune.auto import Auto
from fusedcomm.autotune.search import Tuning, loaded
from fusedcomm.autotune.space import Space
from fusedcomm.autotune.tuner import Tuner
from fusedcomm.config import (
    AUTO,
    OFF,
    WIRES,
    Config,
    LocalOptions,
    Off,
    Search,
    Wire,
    check,
    explains_moved,
    given,
    local_options,
    refuse_both,
)
from fusedcomm.ddp.handle import Handle, handles, targets
from fusedcomm.ddp.module import (
    bucket_nbytes_caps,
    forget_refused_hooks,
    named_tensors,
    options_to_agree,
    refuse_options,
    refuse_sparse,
    refuse_unhooked,
    wait_for_delayed,
)
from fusedcomm.ddp.off import attach_off
from fusedcomm.native import _C
from fusedcomm.reducer.data_parallel import DataParallel
from fusedcomm.session.parameters import NamedParameter, device_of, synchronised_parameters
from fusedcomm.session.session import Session


@explains_moved("attach")
def attach(
    ddp: DistributedDataParallel,
    config: Config | Auto | None = None,
    *,
    wire: Wire | Search | Off | None = None,
    local: LocalOptions | None = None,
    quiet: bool = False,
) -> Handle:
    """Replaces DDP's gradient all-reduce by fusedcomm's native hook. Call it on every rank, before or between steps.

    Args:
        ddp: a DistributedDataParallel module, with its parameters on cpu over a gloo group, or on one cuda device over
            an NCCL group.
        config: how gradients are sent: a :class:`fusedcomm.Config`, or a :class:`fusedcomm.Auto`, which searches for
            the fastest way in the first steps. None: ``Config()``.
        wire: short for ``Config(wire)``. Or "auto", short for ``Auto()``, which chooses DDP's own all-reduce, "fp32" or
            "bf16"; ``Auto(("fp32", "bf16", "int8"))`` may also choose int8. Or "off": DDP stays as it comes, without a
            hook, and the handle says so; for comparisons, where only this word changes.
        local: a :class:`fusedcomm.LocalOptions`: options that may differ from rank to rank. They have no effect on
            DDP's own all-reduce.
        quiet: whether rank 0 does not report the plan. Reports go through ``logging.getLogger("fusedcomm")``, and are
            printed if that has no handler (fusedcomm/log.py).

    Returns:
        A handle with ``stats()``, ``plan()``, ``tuning()``, ``trace()``, ``nonfinite_report()``, ``detach()``,
        ``state_dict()`` and ``load_state_dict()``.

    On cuda this compiles the kernels, which takes some seconds the first time. A training step cannot be captured into
    a CUDA graph: the hook raises RuntimeError under capture.

    The mean is over all ranks of DDP's group. Under ``Join(divide_by_initial_world_size=False)``, and after parameters
    have been converted (``.to(dtype)``) or replaced, the next forward pass raises RuntimeError.

    Raises:
        TypeError: `ddp` is not a DistributedDataParallel, or a keyword is an old one; names its new place.
        ValueError: an argument is out of range, or two cannot be combined.
        RuntimeError: the module has a hook or a DDP option that cannot be combined, fusedcomm has no path for the
            device or backend, or the ranks do not agree (the same text on every rank).
    """
    refuse_both(config, wire)
    is_off = wire == OFF
    chosen = Config("fp32") if is_off else _given(config, wire)
    local = local_options(local)
    quiet = quiet or env.quiet()
    space = Space(chosen) if isinstance(chosen, Auto) else None
    configs = [chosen] if space is None else [space.config(candidate) for candidate in space.first]
    _check_module(ddp)
    named = named_tensors(ddp.module, ddp.parameters_to_ignore)
    device = device_of(named)
    parameters, problem = [], None
    try:
        if ddp in targets:
            forget_refused_hooks(ddp)
        refuse_options(ddp)
        if not is_off:
            wait_for_delayed(ddp)
        parameters = synchronised_parameters(named, configs)
        if not is_off:
            refuse_unhooked(parameters)
        if space is not None:
            refuse_sparse(ddp, device)
    except (RuntimeError, ValueError) as error:  # perhaps on this rank alone: the session tells the others
        problem = error
    if is_off:
        handle = attach_off(ddp, parameters, device, local, problem)
        return _reported(ddp, handle, quiet)
    if space is None:
        runs = Session(
            configs[0],
            ddp.process_group,
            parameters,
            local,
            device,
            announce=not quiet,
            also_agree=options_to_agree(ddp),
            problem=problem,
        )
    else:
        runs = _tuner(ddp, space, parameters, local, device, chosen.tuned, announce=not quiet, problem=problem)
    target = _hook_of(ddp, runs)
    return _reported(ddp, Handle(ddp, runs, target), quiet)


def _reported(ddp: DistributedDataParallel, handle: Handle, quiet: bool) -> Handle:
    """Enters the handle of an attached module; rank 0 reports its plan."""
    handles[ddp] = handle
    if ddp.process_group.rank() == 0:
        log.report(handle.plan, quiet)
    return handle


def _hook_of(ddp: DistributedDataParallel, runs: Session | Tuner) -> "_C.HookSwitch":
    """The switch that the module's reducer calls, registered if it has none. RuntimeError if it has another hook."""
    target = targets.get(ddp)
    if target is None:
        target = _C.HookSwitch(ddp.process_group)
        try:
            _C.register_ddp_hook(ddp.reducer, target)
        except RuntimeError as error:
            runs.stop("its module refused the hook")
            raise RuntimeError(
                "fusedcomm: this DDP module already has a built-in communication hook; a reducer keeps its first "
                "hook, so wrap the model in a new DistributedDataParallel"
            ) from error
        targets[ddp] = target
    ddp.logger._set_comm_hook_name("fusedcomm")
    return target


def _given(config: Config | Auto | None, wire: Wire | Search | None) -> Config | Auto:
    if wire is not None:
        check.choice("wire", wire, (*WIRES, AUTO, OFF))
    if wire != AUTO and not isinstance(config, Auto):
        return given(config, wire)
    return Auto() if config is None else config


def _check_module(ddp: DistributedDataParallel) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"fusedcomm.attach takes a DistributedDataParallel module, not {type(ddp).__name__}: wrap the model first, "
            "ddp = DistributedDataParallel(model), or shard it with torch.distributed.fsdp.fully_shard(model)"
        )
    if isinstance(ddp, DataParallel):
        raise TypeError(
            "fusedcomm.attach takes torch's DistributedDataParallel, and this is a fusedcomm.DataParallel, which sends "
            "its gradients itself: DataParallel(model, wire=…) chooses how, and model.comm tells what it does"
        )
    if ddp in handles:
        raise RuntimeError(
            "fusedcomm: this module already has fusedcomm attached; call .detach() on the handle before attaching again"
        )


def _tuner(
    ddp: DistributedDataParallel,
    space: Space,
    parameters: list[NamedParameter],
    local: LocalOptions,
    device: torch.device,
    tuned: Tuning | str | os.PathLike | None,
    announce: bool,
    problem: Exception | None,
) -> Tuner:
    try:
        tuned = loaded(tuned)
    except ValueError as error:
        tuned, problem = None, problem or error
    module = weakref.ref(ddp)
    return Tuner(
        space,
        ddp.process_group,
        parameters,
        local,
        device,
        announce=announce,
        also_agree=options_to_agree(ddp),
        caps=lambda: bucket_nbytes_caps(module()),
        tuned=tuned,
        problem=problem,
    )
