"""Attaches fusedcomm to a model of FSDP2."""

import torch.distributed as dist
from torch import nn

from fusedcomm import env, log
from fusedcomm.autotune.auto import ConfigLike, chosen
from fusedcomm.config import OFF, Config, LocalOptions, combinations, local_options
from fusedcomm.fsdp.handle import FsdpHandle
from fusedcomm.fsdp.levels import Sums, sums_of
from fusedcomm.fsdp.mesh import MeshSums, by_mesh
from fusedcomm.fsdp.modules import Sharded, sharded_modules
from fusedcomm.session.served import refuse_served
from fusedcomm.session.session import NO_WIRE, Session


def attach_fsdp(
    model: nn.Module,
    config: ConfigLike | None = None,
    *,
    local: LocalOptions | None = None,
    quiet: bool = False,
) -> FsdpHandle:
    """Replaces the reduce-scatter of every FSDPModule in `model`. See :func:`fusedcomm.attach`.

    Modules on different meshes, as experts and dense layers are, have an engine for each mesh.

    Raises:
        TypeError: nothing in the model was given to fully_shard, or `config` is of another type.
        ValueError: an option that only DDP has, or a module whose reduce-scatter cannot be replaced.
        RuntimeError: the ranks do not agree (the same text on every rank).
    """
    local, quiet = local_options(local), quiet or env.quiet()
    sharded, problem = sharded_modules(model)
    if not sharded:
        raise TypeError("fusedcomm: fully_shard has sharded no parameters of this model: call it first, then attach")
    is_off, on_meshes = config == OFF, by_mesh(sharded)
    named = [(p.name, p.tensor) for each in sharded for p in each.parameters]

    def sums_with(config: Config) -> list[Sums]:
        groups = [(those[0].process_group, those[0].replicas) for those in on_meshes]
        return [Sums(None, None, config.wire_number) if is_off else sums_of(config, *each) for each in groups]

    try:
        refuse_served(named, FsdpHandle.serves_as, FsdpHandle.place)  # names the front end, not its reduce-scatter
        if problem is not None:
            raise problem
        wanted = Config("fp32") if is_off else _checked(config, named, on_meshes)
        sums = sums_with(wanted)
    except (TypeError, ValueError) as error:  # perhaps of this rank alone: the sessions tell the others
        wanted, problem = Config("fp32"), error
        sums = sums_with(wanted)
    meshes: list[MeshSums] = []
    made: list[Session] = []
    num_before = 0
    for those, of_mesh in zip(on_meshes, sums, strict=True):
        # All meshes are connected even after an error, because other ranks wait for this one there.
        try:
            for group in (those[0].process_group, those[0].replicas) if is_off else ():
                if group is not None and group.size() > 1:
                    Session(NO_WIRE, group, None, local, those[0].device, is_off=True, problem=problem)
            meshes.append(MeshSums.attached(wanted, of_mesh, those, num_before, local, not quiet, problem, made))
        except Exception as error:
            problem = problem or error
        num_before += len(those)
    if problem is None and not is_off and all(mesh.is_off for mesh in meshes):
        problem = ValueError("fusedcomm: this model is on one rank alone: leave attach() out")
    # A problem of one session reaches the ranks of the others, which must not wait in a forward pass.
    for session in made:
        try:
            session.confirm(problem)
        except Exception as error:
            problem = problem or error
    if problem is not None:
        for session in made:
            session.stop("fusedcomm could not attach")
        raise problem
    handle = FsdpHandle(model, meshes)
    for mesh in meshes:
        mesh.warn_of_hosts()
    if dist.get_rank() == 0:
        log.report(handle.plan, quiet)
    return handle


def _checked(config: ConfigLike | None, named: list[tuple[str, nn.Parameter]], those: list[list[Sharded]]) -> Config:
    """The configuration. Raises ValueError for one that is not possible with FSDP2, these parameters, or the modules of
    these meshes."""
    wanted, first = chosen(config, "FSDP2"), those[0][0]
    has_both = first.process_group is not None and first.replicas is not None
    given = {
        "sum": wanted.sum,
        "weighted": wanted.weighted,
        "feedback": wanted.feedback,
        "modules on several meshes": len(those) > 1,
        "HSDP on cuda": has_both and first.device.type != "cpu",
    }
    combinations.refuse("FSDP2", given)
    wanted.check_patterns(named)
    refuse_gathers(wanted, [each for of_mesh in those for each in of_mesh])
    return wanted


def refuse_gathers(config: Config, sharded: list[Sharded]) -> None:
    """Raises ValueError where parameters cannot be gathered in codes."""
    others = (f"{type(each.all_gather).__name__} of {each.title}" for each in sharded if each.has_own_all_gather)
    given = {
        "params": config.params,
        "replicas without shards": all(each.process_group is None for each in sharded),
        "a module's own all-gather": next(others, None),
    }
    combinations.refuse("FSDP2", given)
