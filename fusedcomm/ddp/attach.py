"""``fusedcomm.attach``: gives a DDP module the native communication hook."""

import os
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedcomm import env, log
from fusedcomm.autotune.auto import Auto, ConfigLike, chosen
from fusedcomm.autotune.search import Tuning, loaded
from fusedcomm.autotune.space import Space
from fusedcomm.autotune.tuner import Tuner
from fusedcomm.config import OFF, Config, LocalOptions, local_options
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
from fusedcomm.native import _C
from fusedcomm.session.off import OffSession
from fusedcomm.session.parameters import NamedParameter, device_of, synchronized_parameters
from fusedcomm.session.session import Session


def attach(
    ddp: DistributedDataParallel,
    config: ConfigLike | None = None,
    *,
    local: LocalOptions | None = None,
    quiet: bool = False,
) -> Handle:
    """Replaces DDP's gradient all-reduce by fusedcomm's native hook; see :func:`fusedcomm.attach`.

    Raises:
        TypeError: `ddp` is not a DistributedDataParallel, or `config` is of another type.
        ValueError: an argument is out of range, or two cannot be combined.
        RuntimeError: the module has a hook or a DDP option that cannot be combined, fusedcomm has no path for the
            device or backend, or the ranks do not agree (the same text on every rank).
    """
    wanted = chosen(config)
    is_off = wanted == OFF
    local = local_options(local)
    quiet = quiet or env.quiet()
    space = Space(wanted) if isinstance(wanted, Auto) else None
    configs = [Config("fp32") if is_off else wanted] if space is None else [space.config(each) for each in space.first]
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
        parameters = synchronized_parameters(named, configs)
        if not is_off:
            refuse_unhooked(parameters)
        if space is not None:
            refuse_sparse(ddp, device)
    except (RuntimeError, ValueError) as error:  # perhaps on this rank alone: the session tells the others
        problem = error
    runs: Session | Tuner | OffSession
    if is_off:
        runs = OffSession(ddp.process_group, parameters, local, device, problem)
    elif space is None:
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
        runs = _tuner(ddp, space, parameters, local, device, wanted.tuned, announce=not quiet, problem=problem)
    handle = Handle(ddp, runs, None if is_off else _hook_of(ddp, runs))
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


def _check_module(ddp: DistributedDataParallel) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"fusedcomm.attach takes a DistributedDataParallel module, not {type(ddp).__name__}: wrap the model first, "
            "ddp = DistributedDataParallel(model), or shard it with torch.distributed.fsdp.fully_shard(model)"
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
