"""One rank of bench/optimizer.py --parts loss: trains the same models in every way, one after another, and writes rows
as JSON."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _optimizer_ways import (
    REPLICATED,
    SHARDED,
    Float32Muon,
    Hyperparameters,
    Trained,
    Way,
    flat,
    refuse_different,
    refuse_other_bits,
    two_shot,
)
from lib.characters import Characters, Transformer, character_loss
from lib.common import drop_memory
from lib.rank import started
from torch import Tensor, nn

HELD_OUT = 256
"""Pieces of text."""
CHECKED_STEPS = 100
"""Of torch's own Muon, which is too slow on most processors to be trained with here."""


class Perceptron(nn.Module):
    """Three layers that see the last eight characters: 102,000 parameters."""

    SEEN, WIDTH = 8, 24

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.head = nn.Embedding(128, self.WIDTH), nn.Linear(192, 128)
        self.layers = nn.Sequential(nn.Linear(self.SEEN * self.WIDTH, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (self.SEEN - 1, 0)).unfold(1, self.SEEN, 1)
        return self.head(self.layers(self.codes(padded).flatten(2)))


MODELS = {"transformer": Transformer, "perceptron": Perceptron}


def ways(wires: list[str], updates: list[str]) -> list[Way]:
    """Of each gradients' wire the replicated optimizer first, over the two-shot in which owners step."""
    found = []
    for wire in wires:
        found.append(Way(f"{wire} {REPLICATED}", REPLICATED, two_shot(wire)))
        found += [Way(f"{wire} update {update}", SHARDED, two_shot(wire), update) for update in updates]
    return found


def train(
    way: Way,
    name: str,
    kind: str,
    seed: int,
    settings: dict,
    characters: Characters,
    muon: type[torch.optim.Optimizer] = Float32Muon,
) -> tuple[dict, Tensor]:
    """The row, and the parameters at the end."""
    torch.manual_seed(seed)
    trained = Trained(way, MODELS[name](), Hyperparameters(kind, settings["lr"], settings["muon_lr"], muon))
    steps = settings["steps"]
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 1, 0, total_iters=steps) for each in trained.optimizers]
    batches = characters.batches(1000 * (seed + 1) + dist.get_rank(), settings["batch"])
    for _ in range(steps):
        trained.zero_grad()
        character_loss(trained.module, next(batches)).backward()
        trained.step()
        for schedule in schedules:
            schedule.step()
    refuse_different(trained.model, way.name)
    with torch.no_grad():
        loss = character_loss(trained.model, next(characters.batches(seed=3, batch=HELD_OUT, test=True)))
    row = {
        "model": name,
        "optimizer": kind,
        "way": way.name,
        "seed": seed,
        "loss": float(loss),
        "sent_nbytes": trained.sent_nbytes(steps),
        "state_nbytes": trained.state_nbytes,
    }
    trained.close()
    return row, flat(trained.model)


def compare(name: str, kind: str, seed: int, settings: dict, characters: Characters) -> list[dict]:
    """A row for each way. Raises RuntimeError if an fp32 update of fp32 gradients changes a bit."""
    rows, replicated = [], None
    for way in ways(settings["wires"], settings["updates"]):
        row, parameters = train(way, name, kind, seed, settings, characters)
        drop_memory()
        if way.front == REPLICATED:
            replicated = parameters
        row["bit_equal"] = torch.equal(parameters, replicated)
        if way.config.wire == way.update == "fp32":
            refuse_other_bits(parameters, replicated, f"{name}, {kind}, {way.name}, {settings['steps']} steps")
        rows.append(row)
        if dist.get_rank() == 0:
            print(f"{name:12} {kind:6} {way.name:18} seed {seed}  {row['loss']:.4f}", flush=True)
    return rows


def check_torchs_muon(settings: dict, characters: Characters) -> None:
    """Raises RuntimeError if an fp32 update of fp32 gradients with torch's own Muon changes a bit."""
    few = {**settings, "steps": min(settings["steps"], CHECKED_STEPS)}
    replicated, sharded = (
        train(way, "transformer", "muon", 0, few, characters, torch.optim.Muon)[1] for way in ways(["fp32"], ["fp32"])
    )
    refuse_other_bits(sharded, replicated, f"torch.optim.Muon, {few['steps']} steps")


def main() -> None:
    with started() as (settings, hand_over):
        characters, rows = Characters(), []
        if "muon" in settings["optimizers"]:
            check_torchs_muon(settings, characters)
        for seed in range(settings["seeds"]):
            for kind in settings["optimizers"]:
                for name in settings["models"]:
                    rows += compare(name, kind, seed, settings, characters)
                    hand_over(rows)


if __name__ == "__main__":
    main()
