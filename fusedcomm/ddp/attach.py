"""``fusedcomm.attach``: gives a DDP module the native communication hook."""

import weakref
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedcomm import env, log
from fusedcomm.autotune.auto import ConfigLike, chosen
from fusedcomm.autotune.tuner import EXACT, Tuner
from fusedcomm.config import AUTO, OFF, Config, LocalOptions, local_options
from fusedcomm.ddp.handle import Handle, targets
from fusedcomm.ddp.module import (
    bucket_nbytes_caps,
    forget_refused_hooks,
    named_tensors,
    options_to_agree,
    refuse_options,
    refuse_sparse,
    refuse_unhooked,
)
from fusedcomm.native import _C
from fusedcomm.session.parameters import NamedParameter, device_of, synchronized_parameters
from fusedcomm.session.served import refuse_served
from fusedcomm.session.session import NO_WIRE, Session


def attach(
    ddp: DistributedDataParallel,
    config: ConfigLike | None = None,
    *,
    local: LocalOptions | None = None,
    quiet: bool = False,
    in_turns: bool = False,
) -> Handle:
    """Replaces DDP's gradient all-reduce by fusedcomm's native hook; see :func:`fusedcomm.attach`.

    in_turns: whether other front ends may serve the parameters: each step goes through one of them only.

    Raises:
        TypeError: `ddp` is not a DistributedDataParallel, or `config` is of another type.
        ValueError: an argument is out of range, two cannot be combined, or another front end serves a parameter.
        RuntimeError: the module has a hook or a DDP option that cannot be combined, fusedcomm has no path for the
            device or backend, or the ranks do not agree (the same text on every rank).
    """
    if not isinstance(ddp, DistributedDataParallel):
        chosen(config)  # a configuration that is not possible is said first
        raise TypeError(
            f"fusedcomm.attach takes a DistributedDataParallel module, not {type(ddp).__name__}: wrap the model first, "
            "ddp = DistributedDataParallel(model), or shard it with torch.distributed.fsdp.fully_shard(model)"
        )
    options, device, problem = LocalOptions(), torch.device("cpu"), None
    cfg = EXACT
    parameters: list[NamedParameter] = []
    is_off = is_search = False
    try:
        wanted = chosen(config)
        named = named_tensors(ddp.module, ddp.parameters_to_ignore)
        if not in_turns:
            refuse_served(named, Handle.serves_as, Handle.place)
        device = device_of(named)
        if ddp in targets:
            forget_refused_hooks(ddp)
        refuse_options(ddp)
        is_off, is_search = wanted == OFF, wanted == AUTO
        cfg = wanted if isinstance(wanted, Config) else NO_WIRE if is_off else EXACT
        parameters = synchronized_parameters(named, cfg)
        if not is_off:
            refuse_unhooked(parameters)
        if is_search:
            refuse_sparse(ddp, device)
        options = local_options(local)
    except (TypeError, ValueError, RuntimeError) as error:  # perhaps of this rank alone: the session tells the others
        problem = error
    quiet = quiet or env.quiet()
    on = ddp.process_group, parameters, options, device, not quiet
    how: dict[str, Any] = {"also_agree": options_to_agree(ddp), "problem": problem}
    runs: Session | Tuner
    if is_search:
        module = weakref.ref(ddp)
        runs = Tuner(*on, **how, has_off=True, caps=lambda: bucket_nbytes_caps(module()))
    else:
        runs = Session(cfg, *on, **how, is_off=is_off)
    handle = Handle(ddp, runs, None if is_off else _hook_of(ddp, runs))
    if handle.session.rank == 0:
        log.report(handle.plan, quiet)
    return handle


def _hook_of(ddp: DistributedDataParallel, runs: Session | Tuner) -> "_C.HookSwitch":
    """The switch that the module's reducer calls, registered if it has none. RuntimeError on every rank if one
    of them has another hook."""
    target, problem = targets.get(ddp), None
    if target is None:
        target = _C.HookSwitch(ddp.process_group)
        try:
            _C.register_ddp_hook(ddp.reducer, target)
            targets[ddp] = target
        except RuntimeError:
            problem = RuntimeError(
                "fusedcomm: this DDP module already has a built-in communication hook; a reducer keeps its first "
                "hook, so wrap the model in a new DistributedDataParallel"
            )
    runs.session.confirm(problem, runs.stop)
    ddp.logger._set_comm_hook_name("fusedcomm")
    return target
