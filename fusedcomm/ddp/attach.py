"""``fusedcomm.attach``: gives a DDP module the native communication hook."""

import weakref

from torch.nn.parallel import DistributedDataParallel

from fusedcomm import env, log
from fusedcomm.autotune.auto import Auto, ConfigLike, chosen
from fusedcomm.autotune.tuner import Tuner
from fusedcomm.config import OFF, Config, LocalOptions, local_options
from fusedcomm.ddp.handle import Handle, targets
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
from fusedcomm.session.off import OffSession, told
from fusedcomm.session.parameters import device_of, synchronized_parameters
from fusedcomm.session.served import refuse_served
from fusedcomm.session.session import Session


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
    with told(ddp.process_group if isinstance(ddp, DistributedDataParallel) else None):
        wanted = chosen(config)
        _check_module(ddp)
        named = named_tensors(ddp.module, ddp.parameters_to_ignore)
        if not in_turns:
            refuse_served(named, Handle.serves_as, Handle.place)
        is_off = wanted == OFF
        local = local_options(local)
        quiet = quiet or env.quiet()
        is_search = isinstance(wanted, Auto)
        configs = wanted.configs if isinstance(wanted, Auto) else (Config("fp32") if is_off else wanted,)
        device = device_of(named)
        if ddp in targets:
            forget_refused_hooks(ddp)
        refuse_options(ddp)
        if not is_off:
            wait_for_delayed(ddp)
        parameters = synchronized_parameters(named, configs)
        if not is_off:
            refuse_unhooked(parameters)
        if is_search:
            refuse_sparse(ddp, device)
    runs: Session | Tuner | OffSession
    if is_off:
        runs = OffSession(ddp.process_group, parameters, local, device)
    elif not is_search:
        runs = Session(
            configs[0],
            ddp.process_group,
            parameters,
            local,
            device,
            announce=not quiet,
            also_agree=options_to_agree(ddp),
        )
    else:
        module = weakref.ref(ddp)
        runs = Tuner(
            configs,
            ddp.process_group,
            parameters,
            local,
            device,
            has_off=True,
            announce=not quiet,
            also_agree=options_to_agree(ddp),
            caps=lambda: bucket_nbytes_caps(module()),
        )
    handle = Handle(ddp, runs, None if isinstance(runs, OffSession) else _hook_of(ddp, runs))
    if ddp.process_group.rank() == 0:
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


def _check_module(ddp: DistributedDataParallel) -> None:
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            f"fusedcomm.attach takes a DistributedDataParallel module, not {type(ddp).__name__}: wrap the model first, "
            "ddp = DistributedDataParallel(model), or shard it with torch.distributed.fsdp.fully_shard(model)"
        )
