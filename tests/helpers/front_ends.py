"""The front ends, a row for each. What holds for all of them, and is listed in tests/test_like_ddp.py and
tests/test_every_front_end.py, is tested of every row: a new front end adds its row."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config


def plain(model: nn.Module, config: None, **options: object) -> tuple:
    return DistributedDataParallel(model, **options), None


def attached(model: nn.Module, config: str | Config, **options: object) -> tuple:
    ddp = DistributedDataParallel(model, **options)
    return ddp, fusedcomm.attach(ddp, config, quiet=True)


def with_views(model: nn.Module, config: str | Config, **options: object) -> tuple:
    return attached(model, config, **{**options, "gradient_as_bucket_view": True})


def registered(model: nn.Module, config: str | Config, **options: object) -> tuple:
    ddp = DistributedDataParallel(model, **options)
    state = fusedcomm.CommState(config, process_group=options.get("process_group"), module=model)
    ddp.register_comm_hook(state, fusedcomm.comm_hook)
    return ddp, state


def reducer(model: nn.Module, config: str | Config, **options: object) -> tuple:
    names = {"bucket_cap_mb": "bucket_mib"}
    options = {names.get(name, name): value for name, value in options.items()}
    return model, fusedcomm.GradReducer(model, config, quiet=True, **options)


def data_parallel(model: nn.Module, config: str | Config, **options: object) -> tuple:
    wrapper = fusedcomm.DataParallel(model, config=config, quiet=True, **options)
    return wrapper, wrapper.comm


def sharded(model: nn.Module, config: str | Config, **options: object) -> tuple:
    return fully_shard(model), fusedcomm.attach(model, config, quiet=True)


def shards_and_copies(model: nn.Module, config: str | Config, **options: object) -> tuple:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("copies", "shards"))
    return fully_shard(model, mesh=mesh), fusedcomm.attach(model, config, quiet=True)


def replicated(model: nn.Module, config: str | Config, **options: object) -> tuple:
    replicate(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, fusedcomm.attach(model, config, quiet=True)


@dataclasses.dataclass(frozen=True)
class FrontEnd:
    """One way to have gradients synchronized.

    Attributes:
        make: of a model, a wire or a Config, and options of DistributedDataParallel, of which it may heed none: returns
            what runs the forward pass, and the handle.
        lacks: what it, or torch's part of it, does not have; see `Scenario.needs`.
        sum: in which parameters of any size are rounded. FSDP2 chooses itself, and sums small ones exactly.
        gathers: parameters are gathered in the gradients' wire.
    """

    make: Callable[..., tuple]
    lacks: frozenset[str] = frozenset()
    sum: str = "two-shot"
    gathers: bool = False

    def config(self, wire: str) -> Config:
        """All parameters are sent in `wire`, those of one dimension, too."""
        params = wire if self.gathers else "fp32"
        return Config(wire, "auto" if wire == "fp32" else self.sum, wires={"1d": wire}, params=params)


NOT_IN_DDP = frozenset({"unused sparse"})
WITHOUT_WRAPPER = frozenset({"buffers", "static_graph", "join", "own names"})
"""What DistributedDataParallel does beside synchronizing gradients, and GradReducer does not."""
NOT_IN_FSDP2 = NOT_IN_DDP | WITHOUT_WRAPPER | {"sparse", "several dtypes", "no dimensions", "memory order", "reentrant"}
NOT_IN_FSDP2 |= {"unused on a rank", "adds to means", "groups"}
"""`groups`: a process group, for which a mesh stands there."""

PLAIN = FrontEnd(plain)
"""DDP as it comes: what is right."""
FRONT_ENDS = {
    "hook": FrontEnd(attached, NOT_IN_DDP),
    "hook with views": FrontEnd(with_views, NOT_IN_DDP),
    "CommState": FrontEnd(registered, NOT_IN_DDP),
    "reducer": FrontEnd(reducer, WITHOUT_WRAPPER),
    "DataParallel": FrontEnd(data_parallel, frozenset({"join"})),
    "FSDP2": FrontEnd(sharded, NOT_IN_FSDP2, "auto"),
    "FSDP2, gathered in codes": FrontEnd(sharded, NOT_IN_FSDP2, "auto", gathers=True),
    "FSDP2, shards and copies": FrontEnd(shards_and_copies, NOT_IN_FSDP2 | {"three ranks"}, "auto"),
    "FSDP2, replicate": FrontEnd(replicated, NOT_IN_FSDP2, "auto"),
}


def with_all(*needs: str) -> list[str]:
    """The names of the front ends that have all of this."""
    return [name for name, front_end in FRONT_ENDS.items() if front_end.lacks.isdisjoint(needs)]


@contextlib.contextmanager
def adding_up(forward: nn.Module, comm: object) -> Iterator[None]:
    """Context of a pass that only adds up gradients."""
    if hasattr(forward, "set_requires_gradient_sync"):
        forward.set_requires_gradient_sync(False)
        yield
        forward.set_requires_gradient_sync(True)
        return
    no_sync = (forward if hasattr(forward, "no_sync") else comm).no_sync
    with no_sync():
        with no_sync():  # the end of an inner context changes nothing
            pass
        yield


def end(comm: object) -> None:
    """Detaches, where there is something to detach."""
    getattr(comm, "detach", lambda: None)()
