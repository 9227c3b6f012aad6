"""One rank of test_fsdp_elastic.py: trains an FSDP2 model in each of WIRES, side by side, saves distributed checkpoints
every SAVE_EVERY steps, and goes on from the last ones that are complete.

    elastic_job.py FOLDER DYING

In the first life the rank DYING is killed in the middle of a backward pass of step DIES_AT. With -1 none is, and a
second model in each wire loads its checkpoint at RESUMED_AT as soon as it has saved it.
"""

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
from fusedcomm import Config, Feedback

NUM_STEPS, SAVE_EVERY, DIES_AT, RESUMED_AT = 30, 10, 17, 10
ACCUMULATED = 2
WIRES = {  # as in test_fsdp_elastic.py
    "int8": Config("int8"),
    "int4 with feedback": Config("int4", feedback=Feedback(unsharded=True)),
}


class Training:
    def __init__(self, folder: Path, wire: str) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 63), nn.Tanh(), nn.Linear(63, 65), nn.Tanh(), nn.Linear(65, 8))
        self.teacher = torch.randn(32, 8)
        for layer in self.model[::2]:
            fully_shard(layer)
        fully_shard(self.model)
        self.comm = fusedcomm.attach(self.model, WIRES[wire], quiet=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.losses: list[float] = []

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        for part in range(ACCUMULATED):
            self.model.set_requires_gradient_sync(part == ACCUMULATED - 1)
            generator = torch.Generator().manual_seed((step * ACCUMULATED + part) * 2 + self.rank)
            inputs = torch.randn(8, 32, generator=generator)
            loss = nn.functional.cross_entropy(self.model(inputs), (inputs @ self.teacher).argmax(dim=1))
            self.losses.append(loss.item())
            (loss / ACCUMULATED).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def save(self, step: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        states = {"model": model, "optimizer": optimizer, "comm": self.comm}
        dcp.save(states, checkpoint_id=self.folder / f"step{step}")

    def load(self, step: int) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer, "comm": self.comm}, checkpoint_id=self.folder / f"step{step}")
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def die_in_backward(self, died: Path) -> None:
        """Kills this process in its next backward pass, when the last layer's gradients are being sent. `died`: a file
        that then says so."""

        def die(module: nn.Module, gradients: tuple, of_outputs: tuple) -> None:
            died.write_text(str(self.rank))
            os.kill(os.getpid(), signal.SIGKILL)

        self.model[2].register_full_backward_hook(die)

    def digest(self) -> str:
        """A hash of all parameters."""
        values = torch.cat([p.detach().full_tensor().flatten() for p in self.model.parameters()])
        return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def result_of(training: Training) -> dict:
    calls = set(training.comm.state_dict()["calls"].values())
    return {"losses": training.losses, "digest": training.digest(), "calls": sorted(calls)}


def main() -> None:
    folder, dying = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    trainings = {wire: Training(folder / wire, wire) for wire in WIRES}
    reloading = {f"{wire}, reloaded": Training(folder / f"{wire}, reloaded", wire) for wire in WIRES if dying < 0}
    last = folder / "last"
    began = int(last.read_text()) if last.exists() else 0
    dist.barrier()  # before a rank saves
    if began:
        for training in trainings.values():
            training.load(began)
    for step in range(began, NUM_STEPS):
        if (life, rank, step) == (0, dying, DIES_AT):
            trainings[next(iter(WIRES))].die_in_backward(folder / "died")
        for training in (*trainings.values(), *reloading.values()):
            training.step(step)
            if (step + 1) % SAVE_EVERY == 0:
                training.save(step + 1)
        if (step + 1) % SAVE_EVERY == 0 and rank == 0:  # all ranks have saved
            (folder / "next").write_text(str(step + 1))
            (folder / "next").rename(last)
        if step + 1 == RESUMED_AT:
            for training in reloading.values():
                training.load(RESUMED_AT)
    results = {name: result_of(training) for name, training in {**trainings, **reloading}.items()}
    (folder / f"rank{rank}.json").write_text(json.dumps({"life": life, "began": began, "runs": results}))
    for training in (*trainings.values(), *reloading.values()):
        training.comm.detach()
    dist.destroy_process_group()


main()
