"""One rank of bench/fsdp.py --part loss: trains the same models with parameters gathered in every wire, one after
another, and hands over rows."""

import copy
import math

import torch
import torch.distributed as dist
from lib.characters import Characters, Transformer, character_loss
from lib.rank import started
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fusedcomm
from fusedcomm.config import Config

EXACT = "fp32"
WIRES = (EXACT, "bf16", "int8", "fp8", "int4")
HELD_OUT = 256
"""Pieces of text."""
ADAPTER_RANK = 4


class Adapted(nn.Module):
    """A frozen layer and an adapter of low rank (LoRA), which begins as nothing."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(ADAPTER_RANK, base.in_features) / math.sqrt(base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, ADAPTER_RANK))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def adapted(base: nn.Module) -> nn.Module:
    """A copy of a trained model that is frozen, with adapters in its blocks."""
    model = copy.deepcopy(base).requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    return model


def trained(model: nn.Module, wire: str, seed: int, characters: Characters, settings: dict) -> dict:
    """Shards a model and trains what is not frozen. Returns the held-out loss, with parameters as in training and
    exactly, and bytes."""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    config = Config(settings["gradients"], params=wire)
    with fusedcomm.attach(model, config, quiet=True) as comm:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings["lr"])
        batches = characters.batches(1000 * (seed + 1) + dist.get_rank(), settings["batch"])
        for _ in range(settings["steps"]):
            optimizer.zero_grad()
            character_loss(model, next(batches)).backward()
            optimizer.step()
        test, plan = next(characters.batches(seed=3, batch=HELD_OUT, test=True)), comm.plan()
        with torch.no_grad():
            losses = {"loss": character_loss(model, test).item()}
            with comm.exact_params():
                losses["exact_loss"] = character_loss(model, test).item()
    return {
        **losses,
        "gathered_nbytes": plan.gathered_nbytes,
        "of_exact": plan.gathered_nbytes / plan.exact_gathered_nbytes,
    }


def pretrained(seed: int, characters: Characters, settings: dict) -> nn.Module:
    """The base of adapters, the same on every rank."""
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])
    batches = characters.batches(seed, 2 * settings["batch"])
    for _ in range(settings["pretrain"]):
        optimizer.zero_grad()
        character_loss(model, next(batches)).backward()
        optimizer.step()
    return model


def main() -> None:
    with started() as (settings, hand_over):
        characters, rows = Characters(), []
        # Another text, for the adapters to learn: capitals and small letters change places.
        swapped = Characters(bytes(characters.train.tolist()).swapcase())
        for seed in range(settings["seeds"]):
            torch.manual_seed(seed)
            tasks = {
                "transformer": (Transformer(), characters),
                "adapters": (adapted(pretrained(seed, characters, settings)), swapped),
            }
            for task, (model, text) in tasks.items():
                for wire in WIRES:
                    found = trained(copy.deepcopy(model), wire, seed, text, settings)
                    rows.append({"model": task, "params": wire, "seed": seed, **found})
                    hand_over(rows, f"{task:12} {wire:5} seed {seed}  {found['loss']:.4f}")


if __name__ == "__main__":
    main()
