"""One rank of test_fsdp_restarts.py: trains an FSDP2 model, and goes on from the last checkpoint if there is one."""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fusedcomm
from fusedcomm.config import Config, Rounding

NUM_STEPS = 12
SAVED_EVERY = 4


class Steps:
    """The number of steps taken, as distributed checkpointing saves it."""

    def __init__(self) -> None:
        self.taken = 0

    def state_dict(self) -> dict:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict) -> None:
        self.taken = state["taken"]


class Trained:
    """The model and its optimizer, as distributed checkpointing saves them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def main() -> None:
    folder, killed_at = Path(sys.argv[1]), int(sys.argv[2])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    # torch 2.13 with gloo looks for the ranks of the attempt before otherwise, fusedcomm or not.
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore(f"{attempt}", store), rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(33, 64), nn.Tanh(), nn.Linear(64, 5))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    comm = fusedcomm.attach(model, Config("int8", rounding=Rounding("stochastic")), quiet=True)
    steps = Steps()
    states = {"trained": Trained(model, optimizer), "comm": comm, "steps": steps}
    saved = sorted(folder.glob("step-*/.metadata"), key=lambda path: int(path.parent.name.split("-")[1]))
    if saved:
        dcp.load(states, checkpoint_id=saved[-1].parent)
    began_at = steps.taken
    while steps.taken < NUM_STEPS:
        generator = torch.Generator().manual_seed(100 * steps.taken + rank)
        model(torch.randn(8, 33, generator=generator)).square().mean().backward()
        if attempt == 0 and rank == 1 and steps.taken == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        steps.taken += 1
        if steps.taken % SAVED_EVERY == 0:
            dcp.save(states, checkpoint_id=folder / f"step-{steps.taken}")
    values = torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])
    found = {
        "attempt": attempt,
        "began_at": began_at,
        "digest": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    comm.detach()
    dist.barrier()
    dist.destroy_process_group()


main()
