"""Attaches fusedcomm to a model of FSDP2."""

import dataclasses

import torch.distributed as dist
from torch import nn

from fusedcomm import env, log
from fusedcomm.autotune.auto import Auto
from fusedcomm.config import AUTO, Checks, Config, LocalOptions, Wire, given, local_options
from fusedcomm.fsdp.comm import FusedReduceScatter
from fusedcomm.fsdp.handle import FsdpHandle
from fusedcomm.fsdp.levels import Sums, check_names, sums_of
from fusedcomm.fsdp.modules import Sharded, sharded_modules
from fusedcomm.fsdp.replicas import ReplicaSums
from fusedcomm.fsdp.verify import Verifier
from fusedcomm.session.session import Session


def attach_fsdp(
    model: nn.Module,
    config: Config | None = None,
    *,
    wire: Wire | None = None,
    local: LocalOptions | None = None,
    quiet: bool = False,
) -> FsdpHandle:
    """Replaces the reduce-scatter of every FSDPModule in `model`. See :func:`fusedcomm.attach`.

    Raises:
        TypeError: nothing in the model was given to fully_shard.
        ValueError: an option that only DDP has, or a module whose reduce-scatter cannot be replaced.
        RuntimeError: the ranks do not agree (the same text on every rank).
    """
    local, quiet = local_options(local), quiet or env.quiet()
    sharded, problem = sharded_modules(model)
    if not sharded:
        raise TypeError(
            "fusedcomm: no module of this model has parameters that fully_shard has sharded: call fully_shard(model) "
            "first, then attach"
        )
    group, replicas = (
        _only("sharded", [each.process_group for each in sharded], problem),
        _only("replicated", [each.replicas for each in sharded], problem),
    )
    try:
        chosen = _checked(config, wire, [(p.name, p.tensor) for each in sharded for p in each.parameters])
        sums = sums_of(chosen, group, replicas)
    except ValueError as error:  # perhaps of this rank alone: the sessions tell the others
        problem, chosen = problem or error, Config("fp32")
        sums = sums_of(chosen, group, replicas)
    rows, between = _sessions(chosen, sums, sharded, group, replicas, local, not quiet, problem)
    check_names(chosen, rows, None if between is None else between.session)
    comms = [
        # The backward pass ends with the first module, as a rule the model itself.
        FusedReduceScatter(rows, between, each, index, index == 0, sums.wire_of)
        for index, each in enumerate(sharded)
    ]
    verifier = Verifier(
        chosen.checks.verify_every,
        len(comms),
        [each.process_group for each in (rows, between and between.session) if each is not None],
    )
    handle = FsdpHandle(model, chosen, sums, rows, between, comms, verifier)
    if dist.get_rank() == 0:
        log.report(handle.plan, quiet)
    return handle


def _checked(config: Config | None, wire: Wire | None, named: list[tuple[str, nn.Parameter]]) -> Config:
    """The configuration. Raises ValueError for one that is not possible with FSDP2 or these parameters."""
    _refuse_searches(config, wire)
    chosen = given(config, wire)
    refuse_options(chosen)
    chosen.check_patterns(named)
    return chosen


def _sessions(
    config: Config,
    sums: Sums,
    sharded: list[Sharded],
    group: dist.ProcessGroup | None,
    replicas: dist.ProcessGroup | None,
    local: LocalOptions,
    announce: bool,
    problem: Exception | None,
) -> tuple[Session | None, ReplicaSums | None]:
    """Of the reduce-scatter and of the all-reduce. Raises this rank's `problem`, or another's, on every rank."""
    parameters = [p for each in sharded for p in each.parameters]
    # Every rank decodes what all others have encoded for it, as the owner of a part does in a two-shot.
    also_agree = {
        "fsdp": [[p.name, p.row_numel] for p in parameters],
        "levels": repr(config),  # the two sums have configurations of their own
    }
    options = {"announce": announce, "also_agree": also_agree}
    device = sharded[0].device
    rows, between = None, None
    if sums.rows is not None:
        try:
            rows = Session(sums.rows, group, None, local, device, reduces_rows=True, problem=problem, **options)
        except Exception as error:
            if sums.replicas is None:
                raise
            problem = problem or error  # for the ranks with the same shards, which are told next
    if sums.replicas is not None:
        wires = {p.name: config.wire_number(p.name, p.tensor) for p in parameters}
        try:
            session = Session(sums.replicas, replicas, None, local, device, problem=problem, **options)
        except Exception:
            if rows is not None:
                rows.stop("fusedcomm could not attach")
            raise
        between = ReplicaSums(session, wires)
    if rows is None and between is None:
        raise problem or ValueError(
            "fusedcomm: this model is on one rank alone, so there is nothing to reduce: leave attach() out"
        )
    return rows, between


def _only(how: str, groups: list[dist.ProcessGroup | None], problem: ValueError | None) -> dist.ProcessGroup | None:
    """The modules' one process group. Raises `problem`, or else a ValueError, if they have several."""
    if len({id(group) for group in groups}) > 1:
        raise problem or ValueError(
            f"fusedcomm: the modules of this model are {how} over different meshes: call attach on the modules of each "
            "mesh by themselves"
        )
    return groups[0]


def _refuse_searches(config: object, wire: object) -> None:
    if isinstance(config, Auto) or wire == AUTO:
        raise ValueError(
            "fusedcomm: FSDP2's reduce-scatters have one wire from the start: name it, for example wire='bf16'"
        )
    if wire == "off":
        raise ValueError("fusedcomm: with FSDP2 leave attach() out instead of wire='off'")


def refuse_options(config: Config) -> None:
    """Raises ValueError for an option that has no effect on a reduce-scatter."""
    default = Config(config.wire)
    refused = {
        "sum": "every rank adds what is for it",
        "checks": "of these only Checks(verify_every) is for FSDP2",
    }
    default = dataclasses.replace(default, checks=Checks(verify_every=config.checks.verify_every))
    for name, why in refused.items():
        if getattr(config, name) != getattr(default, name):
            raise ValueError(f"fusedcomm: {name}={getattr(config, name)!r} is not possible with FSDP2: {why}")
