"""Which code of about four bits has the least error, and do unequal widths lower the loss?

    codes      vNMSE = Σ(x − decoded)² / Σx² of one rounding, of random and of recorded gradients
    training   as in bench/accuracy.py, four simulated ranks and a two-shot sum: int4's code and those that it had
               before, and equal steps with 5, 4 or 3 bits by energy, with and without error feedback

bench/_codes.py has the codes; docs/notes/int4.md and docs/accuracy.md discuss the figures.
"""

import argparse
import itertools
from collections.abc import Callable, Sequence

import _codes
import accuracy
import torch
from lib.common import env, run_command, write_document
from torch import Tensor

import fusedcomm
from fusedcomm.config import Config

NUMEL = 1 << 18
PARTS = accuracy.NUM_TRAINING_RANKS
# Elements of a group that has one width.
GROUP = 256


class Simulated:
    """A two-shot sum of a code that only exists here, for accuracy.train. Use it for one run: it keeps residuals."""

    wire = "int4"
    error_feedback = None

    def __init__(self, name: str, code: Callable[[Tensor], Tensor], feedback: bool) -> None:
        self.name, self._code, self._feedback = name, code, feedback
        self._residuals: dict[int, Tensor] = {}

    def mean(
        self,
        grads: Sequence[Tensor],
        exempt_mask: Tensor | None = None,
        step: int = 0,
        residuals: fusedcomm.Residuals | None = None,
    ) -> Tensor:
        mean = torch.stack(list(grads)).sum(0) / len(grads)
        lossy = torch.ones_like(mean, dtype=torch.bool) if exempt_mask is None else ~exempt_mask
        padding = -int(lossy.sum()) % (PARTS * GROUP)
        rows = [torch.nn.functional.pad(grad[lossy], (0, padding)).view(PARTS, -1) for grad in grads]
        total = sum(self._sent(rank, row) for rank, row in enumerate(rows))
        sent = self._sent(len(grads), total * (1 / len(grads))).view(-1)
        mean[lossy] = sent[: len(sent) - padding]
        return mean

    def _sent(self, encoder: int, rows: Tensor) -> Tensor:
        if self._feedback and encoder in self._residuals:
            rows = rows + self._residuals[encoder]
        sent = self._code(rows)
        if self._feedback:
            self._residuals[encoder] = rows - sent
        return sent


def samples(characters: accuracy.Characters) -> dict[str, Tensor]:
    """fp32 [n·1024] by kind: NUMEL random elements, or the recorded gradient of one rank."""
    generator = torch.Generator().manual_seed(0)
    recorded = accuracy.record(characters, 1, 300, 4)[0]
    uniform = torch.rand(NUMEL, generator=generator) - 0.5
    return {
        "gaussian": accuracy.gaussian(1, NUMEL, generator)[0],
        "laplace": uniform.sign() * -(1 - 2 * uniform.abs()).clamp(min=1e-7).log(),
        "student t, 3 degrees": accuracy.student_t(3)(1, NUMEL, generator)[0],
        "recorded": recorded[: len(recorded) // 1024 * 1024],
    }


def error(x: Tensor, decoded: Tensor) -> float:
    return ((x.double() - decoded).square().sum() / x.double().square().sum()).item()


def code_errors(characters: accuracy.Characters) -> list[dict]:
    """One row for each code, with the error of each kind of gradients. "the wire" is what fusedcomm sends."""
    kinds = samples(characters)
    rows = []
    for name, (nbits, code) in _codes.CODES.items():
        rows.append({"code": name, "bits": nbits, **{kind: error(x, code(x)) for kind, x in kinds.items()}})
    config = Config("int4", sum="one-shot")
    sent = {kind: error(x, fusedcomm.simulate([x], config)) for kind, x in kinds.items()}
    rows.append({"code": "the wire int4", "bits": 4.5, **sent})
    whole = {
        kind: error(x, _codes.adaptive_code(x[: len(x) // GROUP * GROUP].view(1, -1)).view(-1))
        for kind, x in kinds.items()
    }
    rows.append({"code": "5, 4 or 3 bits by energy", "bits": 4.51, **whole})
    return rows


def trained(characters: accuracy.Characters, seeds: int, steps: int, held_out: int) -> list[dict]:
    """The runs: fp32, and each code with and without feedback."""
    runs = []
    codes = {
        "int4": _codes.int4,
        "signed scale": _codes.signed_code,
        "5, 4 or 3 bits": _codes.adaptive_code,
        "absmax / 7": _codes.absmax_code,
    }
    for task in (accuracy.digits_task(), accuracy.characters_task(characters, held_out)):
        for seed in range(seeds):
            runs.append(accuracy.train(task, accuracy.UNMODIFIED, seed, steps))
            for (name, code), feedback in itertools.product(codes.items(), (False, True)):
                way = Simulated(f"{name}, feedback" if feedback else name, code, feedback)
                runs.append(accuracy.train(task, way, seed, steps))
                print(f"{task.name}, {way.name}, seed {seed}: loss {runs[-1]['loss']:.5f}", flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("codes", "training"), default=["codes", "training"])
    parser.add_argument("--quick", action="store_true", help="three steps and one seed: the losses mean nothing")
    parser.add_argument("--json", metavar="PATH", help="write figures there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = accuracy.QUICK if arguments.quick else accuracy.Sizes()
    characters = accuracy.Characters()
    document: dict[str, object] = {"env": env(), "quick": arguments.quick}
    if "codes" in arguments.parts:
        rows = document["codes"] = code_errors(characters)
        body = [[str(row["code"]), *(f"{value:.5g}" for value in list(row.values())[1:])] for row in rows]
        accuracy.print_markdown(list(rows[0]), body)
    if "training" in arguments.parts:
        runs = trained(characters, sizes.seeds, sizes.train_steps, sizes.held_out)
        document["training_summary"] = accuracy.training_summary(runs)
        accuracy.print_training(document["training_summary"])
    if arguments.json:
        write_document(arguments.json, document)


if __name__ == "__main__":
    run_command(main)
