"""Jobs of LocalSteps for its tests: a model by itself, or inside hosts of two ranks with DDP, FSDP2 or HSDP."""

import contextlib
import dataclasses
import types
from collections.abc import Sequence

import pytest
import torch
from checkpoints import file_of, read
from patience import wait_until
from plain_simulation import Net, Run, flat_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.local_steps import windows


@dataclasses.dataclass(frozen=True)
class InSeconds(Run):
    """In windows of time; `every` is in seconds."""

    def period(self) -> str:
        return f"{self.every}s"

    def weight(self, num_steps: int) -> float:
        return num_steps


class Narrow(Net):
    """Its last module has one row, so the second shard of it is empty; three rows give shards of two and one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.layers.append(nn.Linear(3, 1))
        with torch.no_grad():
            for parameter in self.layers[-1].parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    """What this rank has of the parameters."""
    return [getattr(parameter, "to_local", lambda p=parameter: p)().detach() for parameter in model.parameters()]


def flat(model: nn.Module) -> torch.Tensor:
    """A copy of what this rank has of the parameters."""
    return flat_of(locals_of(model))


class Job:
    """One rank of a run. inside: "ddp", "fsdp" or "hsdp", which has copies and no shards, over the two ranks of a host;
    LocalSteps merges between hosts then. gradients: the wire of those within a host. shards: a name for the mesh's
    dimension. options: of LocalSteps."""

    def __init__(
        self,
        run: Run,
        rank: int,
        config="fp32",
        inside: str = "",
        gradients: str = "",
        shards: str = "shards",
        device="cpu",
        **options,
    ) -> None:
        self.run, self.rank, self.model = run, rank, (Narrow() if inside else run.model()).to(device)
        if inside:
            names = ("hosts", "copies", "shards") if inside == "hsdp" else ("hosts", shards)
            num_hosts = torch.distributed.get_world_size() // 2
            mesh = init_device_mesh("cpu", (num_hosts, 2, 1)[: len(names)], mesh_dim_names=names)
            options.setdefault("process_group", mesh.get_group("hosts"))
            if inside == "ddp":
                self.model = DistributedDataParallel(self.model, process_group=mesh.get_group(shards))
            else:
                within = mesh["copies", "shards"] if inside == "hsdp" else mesh[shards]
                fully_shard(self.model.layers[2], mesh=within)
                fully_shard(self.model, mesh=within)
        if gradients:
            fusedcomm.attach(self.model, gradients, quiet=True)
        self.optimizer = run.optimizer(self.model)
        self.comm = fusedcomm.LocalSteps(
            self.model,
            self.optimizer,
            run.period(),
            delay=run.delay,
            config=config,
            quiet=True,
            **options,
        )

    def train(self, steps: Sequence[int]) -> list[torch.Tensor]:
        """This rank's parameters after each step."""
        seen = []
        for step in steps:
            self.run.step(self.model, self.optimizer, self.rank, step)
            seen.append(flat(self.model))
        return seen

    def finish(self) -> torch.Tensor:
        """This rank's parameters after finish(); nothing is merged any more."""
        self.comm.finish()
        self.comm.detach()
        return flat(self.model)

    def merged(self) -> torch.Tensor:
        return self.comm.merges.state.anchor.to("cpu", copy=True)

    def save(self) -> bytes:
        """A checkpoint."""
        return file_of([locals_of(self.model), self.optimizer.state_dict(), self.comm.state_dict()])

    def load(self, file: bytes) -> None:
        parameters, optimizer, comm = read(file, weights_only=True)
        torch._foreach_copy_(locals_of(self.model), parameters)
        self.optimizer.load_state_dict(optimizer)
        self.comm.load_state_dict(comm)


def until_arrived(comm: fusedcomm.LocalSteps) -> None:
    """Waits for the message under way, if there is one and windows of time begin when it has arrived."""
    wait_until(lambda: comm.merges.window is None or comm.merges.window._began is not None, "the message has arrived")


@contextlib.contextmanager
def clock():
    """Stands in for `time` where windows of time are measured; `now` is the time."""
    with pytest.MonkeyPatch.context() as patch:
        made = types.SimpleNamespace(now=0.0, monotonic=lambda: made.now)
        patch.setattr(windows, "time", made)
        yield made
