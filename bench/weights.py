"""What do means over ranks get wrong if ranks have unequal numbers of tokens?

The transformer of bench/accuracy.py is trained on paragraphs of source files, 1 to 64 characters of each: packed
sequences of unequal length. Every way gets the same batches on NUM_RANKS simulated ranks. Losses are means over a
rank's characters.

    equal     every rank has the same weight, as with DDP
    tokens    Config(weighted="mean"), and each rank's number of characters as its weight

Printed are the loss for each held-out character every EVERY steps, and how far the first gradient is from that of one
process with all characters. fusedcomm.simulate computes every mean. Results are checked before they are printed.

Needs one core for some minutes; --quick a tenth of that.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from accuracy import flat_gradient, set_gradient
from lib.characters import Characters, Transformer
from lib.common import env, run_command, write_document
from torch import Tensor, nn

import fusedcomm
from fusedcomm.config import Config

NUM_RANKS, SEQUENCES = 4, 2
EVERY = 50
NO_TARGET = -100


@dataclasses.dataclass(frozen=True)
class Batch:
    """`inputs`, `targets`: int64 [sequences, CONTEXT]; NO_TARGET where a sequence has ended."""

    inputs: Tensor
    targets: Tensor

    @property
    def num_tokens(self) -> int:
        return int((self.targets != NO_TARGET).sum())

    def loss(self, model: nn.Module, reduction: str = "mean") -> Tensor:
        logits = model(self.inputs).flatten(0, 1)
        return F.cross_entropy(logits, self.targets.flatten(), ignore_index=NO_TARGET, reduction=reduction)


def paragraphs(codes: Tensor) -> list[Tensor]:
    """Pieces between empty lines, at most a context long, each with the character that follows it."""
    whole = bytes(codes.tolist()).split(b"\n\n")
    most = Characters.CONTEXT + 1
    pieces = [each[begin : begin + most] for each in whole for begin in range(0, len(each), most)]
    return [torch.tensor(list(piece)) for piece in pieces if len(piece) > 1]


def batches(pieces: list[Tensor], seed: int, size: int) -> Iterator[Batch]:
    """Endless batches of `size` pieces, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.zeros(size, Characters.CONTEXT, dtype=torch.int64)
        targets = torch.full_like(inputs, NO_TARGET)
        for row, index in enumerate(torch.randint(len(pieces), (size,), generator=generator).tolist()):
            piece = pieces[index]
            inputs[row, : len(piece) - 1], targets[row, : len(piece) - 1] = piece[:-1], piece[1:]
        yield Batch(inputs, targets)


def gradients(model: nn.Module, of_ranks: list[Batch]) -> list[Tensor]:
    found = []
    for batch in of_ranks:
        model.zero_grad()
        batch.loss(model).backward()
        found.append(flat_gradient(model))
    return found


def mean(way: str, found: list[Tensor], of_ranks: list[Batch]) -> Tensor:
    if way == "equal":
        return fusedcomm.simulate(found, "fp32")
    config = Config("fp32", weighted="mean")
    return fusedcomm.simulate(found, config, weights=[batch.num_tokens for batch in of_ranks])


def of_one_process(model: nn.Module, of_ranks: list[Batch]) -> Tensor:
    model.zero_grad()
    together = Batch(torch.cat([b.inputs for b in of_ranks]), torch.cat([b.targets for b in of_ranks]))
    together.loss(model).backward()
    return flat_gradient(model)


def held_out(model: nn.Module, tests: list[Batch]) -> float:
    with torch.no_grad():
        losses = sum(float(batch.loss(model, "sum")) for batch in tests)
    return losses / sum(batch.num_tokens for batch in tests)


def train(way: str, seed: int, steps: int, train_pieces: list[Tensor], tests: list[Batch]) -> dict:
    torch.manual_seed(seed)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    of_ranks = [batches(train_pieces, 1000 * seed + rank, SEQUENCES) for rank in range(NUM_RANKS)]
    losses, errors = [], []
    for step in range(steps):
        drawn = [next(batches_of_rank) for batches_of_rank in of_ranks]
        result = mean(way, gradients(model, drawn), drawn)
        if step % EVERY == 0:
            exact = of_one_process(model, drawn)
            errors.append(float((result - exact).norm() / exact.norm()))
        set_gradient(model, result)
        optimizer.step()
        if (step + 1) % EVERY == 0:
            losses.append(held_out(model, tests))
    if way == "tokens" and max(errors) > 1e-5:
        raise AssertionError(f"weighted means are off by {max(errors)} of the gradient")
    return {"way": way, "seed": seed, "losses": losses, "gradient_errors": errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, 50 steps")
    parser.add_argument("--json", type=Path, help="also writes the results to this file")
    options = parser.parse_args()
    steps, seeds = (EVERY, [0]) if options.quick else (300, [0, 1, 2])
    characters = Characters()
    pieces = paragraphs(characters.train)
    tests = [batch for batch, _ in zip(batches(paragraphs(characters.test), 7, 64), range(8), strict=False)]
    runs = [train(way, seed, steps, pieces, tests) for seed in seeds for way in ("equal", "tokens")]
    print("loss for each held-out character")
    print("seed  way     " + "  ".join(f"{(i + 1) * EVERY:>6}" for i in range(steps // EVERY)) + "  gradient off by")
    for run in runs:
        numbers = "  ".join(f"{loss:6.3f}" for loss in run["losses"])
        print(f"{run['seed']:<5} {run['way']:7} {numbers}  {statistics.mean(run['gradient_errors']):.2g}")
    if options.json:
        write_document(options.json, {"env": env(), "runs": runs})


if __name__ == "__main__":
    run_command(main)
