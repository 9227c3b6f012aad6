"""How do the wires change gradients, and how does that change training?

    error by ranks   vNMSE = Σ(x − mean)² / Σ mean², where x is every rank's result and mean the float64 mean: of every
                     wire and sum, for 2 to 4096 simulated ranks, of random gradients and of recorded gradients of a
                     small transformer
    training         a network for handwritten digits and that transformer, trained with the mean of 4 simulated ranks'
                     gradients over each wire: final loss, gradient error, error of the gradient's norm

fusedcomm.simulate computes every mean, with the CPU codec. In one case every way gets the same gradients.
bench/_report.py makes tables of the JSON, bench/_pictures.py draws it, and docs/accuracy.md discusses it.

Needs scikit-learn, 2.6 GiB of memory, and one core for hours; minutes with --quick.
"""

import argparse
import dataclasses
import itertools
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import _report
import torch
import torch.nn.functional as F
from lib.characters import Characters, Transformer, character_loss
from lib.common import env, run_command, worst, write_document
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import fusedcomm
from fusedcomm.config import Config
from fusedcomm.native import _C

# Elements. Gradients are cut at multiples of it, which are boundaries of blocks of any size.
GRAIN = 4096
# Elements of a sample of random gradients for each rank, and the least and the greatest number of samples.
SAMPLE_NUMEL, MIN_SAMPLES, MAX_SAMPLES = 4 * GRAIN, 4, 64
# Elements of all ranks together that one piece has, to limit memory.
MATRIX_NUMEL = 1 << 24
NUM_TRAINING_RANKS = 4
# Steps from one measurement of the gradient's error to the next.
GRADIENT_ERROR_EVERY = 10


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of computing the mean."""

    name: str
    wire: str
    sum: str
    reversed: bool = False  # ranks in reverse order
    error_feedback: str | None = None

    def mean(
        self,
        grads: Sequence[Tensor],
        exempt_mask: Tensor | None = None,
        residuals: fusedcomm.Residuals | None = None,
    ) -> Tensor:
        grads = list(grads)[:: -1 if self.reversed else 1]
        return fusedcomm.simulate(
            grads,
            Config(self.wire, sum=self.sum),
            exempt_mask=exempt_mask,
            residuals=residuals,
        )


TWO_SHOT = [Way(wire, wire, "two-shot") for wire in fusedcomm.WIRES]
OTHERS = [
    Way("fp32 exact", "fp32", "exact"),
    Way("bf16 ring", "bf16", "direct"),
    Way("fp16 ring", "fp16", "direct"),
]
WAYS = [*OTHERS, *TWO_SHOT]

UNMODIFIED = Way("fp32", "fp32", "exact")
REPEAT = Way("fp32, ranks added in reverse", "fp32", "exact", reversed=True)
TRAINING_WAYS = [
    UNMODIFIED,
    REPEAT,
    *[way for way in TWO_SHOT if way.name in ("bf16", "int8", "fp8", "int4")],
    Way("int4, feedback", "int4", "two-shot", error_feedback="fp32"),
    Way("int4, feedback in bf16", "int4", "two-shot", error_feedback="bf16"),
]


# ---- gradients


def gaussian(num_ranks: int, numel: int, generator: torch.Generator) -> Tensor:
    """fp32 [num_ranks, numel], independent on every rank. Relative errors are greatest then: the mean is small."""
    return torch.randn(num_ranks, numel, generator=generator)


def gaussian_with_common_part(num_ranks: int, numel: int, generator: torch.Generator) -> Tensor:
    """fp32 [num_ranks, numel]. Each rank's own part and the part that all ranks share are of the same size."""
    return gaussian(num_ranks, numel, generator).add_(torch.randn(numel, generator=generator))


def student_t(degrees: int) -> Callable[[int, int, torch.Generator], Tensor]:
    def draw(num_ranks: int, numel: int, generator: torch.Generator) -> Tensor:
        squares = torch.zeros(num_ranks, numel)
        for _ in range(degrees):
            squares += torch.randn(num_ranks, numel, generator=generator).square_()
        return gaussian(num_ranks, numel, generator).div_(squares.div_(degrees).sqrt_())

    return draw


RANDOM_GRADIENTS = {
    "gaussian": gaussian,
    "gaussian, common part": gaussian_with_common_part,
    "student t, 3 degrees": student_t(3),
    "student t, 2 degrees": student_t(2),
}


def random_samples(kind: str, num_ranks: int, total_numel: int) -> Iterator[list[Tensor]]:
    """Samples with one piece each, [num_ranks, SAMPLE_NUMEL]. All have this size, because the outliers of a heavy tail
    grow with the size of the sample."""
    generator = torch.Generator().manual_seed(num_ranks)
    num_samples = min(max(total_numel // (num_ranks * SAMPLE_NUMEL), MIN_SAMPLES), MAX_SAMPLES)
    for _ in range(num_samples):
        yield [RANDOM_GRADIENTS[kind](num_ranks, SAMPLE_NUMEL, generator)]


def recorded_sample(recorded: Tensor, num_ranks: int) -> Iterator[list[Tensor]]:
    """One sample of all recorded elements, in pieces [num_ranks, ≤ MATRIX_NUMEL / num_ranks]."""
    yield [recorded[:num_ranks, begin:end] for begin, end in _spans(recorded.shape[1], num_ranks)]


def _spans(numel: int, num_ranks: int) -> Iterator[tuple[int, int]]:
    step = max(MATRIX_NUMEL // num_ranks // GRAIN, 1) * GRAIN
    for begin in range(0, numel, step):
        yield begin, min(begin + step, numel)


# ---- error by ranks


def error_by_ranks(kind: str, num_ranks: int, samples: Iterator[list[Tensor]]) -> list[dict]:
    """One row for each way: the median of the samples."""
    found: dict[str, list[float]] = {way.name: [] for way in WAYS}
    for pieces in samples:
        errors, energy = dict.fromkeys(found, 0.0), 0.0
        for grads in pieces:
            mean = grads.mean(dim=0, dtype=torch.float64)
            energy += mean.square().sum().item()
            for way in WAYS:
                errors[way.name] += (way.mean(grads) - mean).square().sum().item()
        for name, error in errors.items():
            found[name].append(error / energy)
    rows = []
    for name, values in found.items():
        vnmse = float(f"{statistics.median(values):.6g}")
        rows.append({"gradients": kind, "ranks": num_ranks, "way": name, "vnmse": vnmse})
    return rows


# ---- gradients of a transformer on characters


def record(characters: Characters, num_ranks: int, steps: int, batch: int) -> Tensor:
    """fp32 [num_ranks, numel]: gradients of one batch for each rank, taken after `steps` steps of training."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = characters.batches(seed=1, batch=16)
    for _ in range(steps):
        optimizer.zero_grad()
        character_loss(model, next(batches)).backward()
        optimizer.step()
    batches = characters.batches(seed=2, batch=batch)
    recorded = None
    for rank in range(num_ranks):
        model.zero_grad()
        character_loss(model, next(batches)).backward()
        flat = flat_gradient(model)
        recorded = flat.new_empty(num_ranks, flat.numel()) if recorded is None else recorded
        recorded[rank] = flat
    return recorded


def flat_gradient(model: nn.Module) -> Tensor:
    """fp32 [numel], in the order of DDP's buckets: the last parameter first."""
    return torch.cat([parameter.grad.flatten() for parameter in reversed(list(model.parameters()))])


# ---- training


@dataclasses.dataclass(frozen=True)
class Task:
    """A model and how it is trained. `batches` takes (seed, rank). `final` returns the trained model's "loss", and its
    "accuracy" if the task has one."""

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    batches: Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]
    final: Callable[[nn.Module], dict[str, float]]


def characters_task(characters: Characters, held_out: int) -> Task:
    test = next(characters.batches(seed=3, batch=held_out, test=True))
    return Task(
        name="characters",
        model=Transformer,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        loss=character_loss,
        batches=lambda seed, rank: characters.batches(seed=1000 * (seed + 1) + rank, batch=4),
        final=lambda model: {"loss": character_loss(model, test).item()},
    )


def digits_task() -> Task:
    """scikit-learn's 8×8 digits. The final loss is the loss on all training digits."""
    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().div(16).view(-1, 1, 8, 8)
    split = train_test_split(images, torch.from_numpy(labels), test_size=0.3, random_state=0, stratify=labels)
    train_images, test_images, train_labels, test_labels = split

    def batches(seed: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        shard = slice(rank, len(train_labels) // NUM_TRAINING_RANKS * NUM_TRAINING_RANKS, NUM_TRAINING_RANKS)
        shard_images, shard_labels = train_images[shard], train_labels[shard]
        generator = torch.Generator().manual_seed(seed)
        while True:
            for chosen in torch.randperm(len(shard_labels), generator=generator).split(32)[:-1]:
                yield shard_images[chosen], shard_labels[chosen]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def final(model: nn.Module) -> dict[str, float]:
        accuracy = (model(test_images).argmax(dim=1) == test_labels).double().mean().item()
        return {"loss": loss(model, (train_images, train_labels)).item(), "accuracy": accuracy}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def network() -> nn.Module:
        convolutions = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
        linear = [nn.Linear(64 * 4 * 4, 256), nn.ReLU(), nn.Linear(256, 10)]
        return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *linear)

    return Task("digits", network, optimizer, loss, batches, final)


def rank_gradients(task: Task, model: nn.Module, batches: Sequence[Iterator]) -> list[Tensor]:
    """The flat gradient of every rank, each on the rank's next batch."""
    grads = []
    for of_rank in batches:
        model.zero_grad()
        task.loss(model, next(of_rank)).backward()
        grads.append(flat_gradient(model))
    return grads


def set_gradient(model: nn.Module, flat: Tensor) -> None:
    """The inverse of `flat_gradient`."""
    parameters = list(reversed(list(model.parameters())))
    for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = grad.view(parameter.shape)


def train(task: Task, way: Way, seed: int, steps: int) -> dict:
    """Trains with one bucket and returns the run's figures. On wires with scales, biases and norms are sent in fp32, as
    attach() does by default."""
    torch.manual_seed(seed)
    model = task.model()
    named = list(reversed(list(model.named_parameters())))
    config = Config(wire=way.wire)
    exempt = torch.cat([torch.full((p.numel(),), config.wire_number(name, p) == _C.EXACT_WIRE) for name, p in named])
    exempt = exempt if exempt.any() else None
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=steps)
    batches = [task.batches(seed, rank) for rank in range(NUM_TRAINING_RANKS)]
    residuals = fusedcomm.Residuals(way.error_feedback) if way.error_feedback else None
    errors, norm_errors = [], []
    for step in range(steps):
        grads = rank_gradients(task, model, batches)
        mean = way.mean(grads, exempt, residuals)
        if step % GRADIENT_ERROR_EVERY == 0:
            right = torch.stack(grads).mean(dim=0, dtype=torch.float64)
            errors.append(((mean - right).square().sum() / right.square().sum()).item())
            norm_errors.append(abs((mean.double().norm() / right.norm()).item() - 1))
        set_gradient(model, mean)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        final = task.final(model)
    return {
        "model": task.name,
        "way": way.name,
        "seed": seed,
        "steps": steps,
        **final,
        "vnmse_median": statistics.median(errors),
        "vnmse_max": worst(errors),
        "norm_error_median": statistics.median(norm_errors),
        "norm_error_max": worst(norm_errors),
    }


def training_summary(runs: list[dict]) -> list[dict]:
    """One row for each model and way. A difference compares a run with the unmodified run of the same seed."""
    result = []
    for model, way in dict.fromkeys((run["model"], run["way"]) for run in runs):
        own = [run for run in runs if (run["model"], run["way"]) == (model, way)]
        of_seed = {run["seed"]: run for run in runs if (run["model"], run["way"]) == (model, UNMODIFIED.name)}
        row = {"model": model, "way": way, "loss": [run["loss"] for run in own]}
        row["loss_difference"] = [run["loss"] - of_seed[run["seed"]]["loss"] for run in own]
        if "accuracy" in own[0]:
            row["accuracy"] = [run["accuracy"] for run in own]
        row["vnmse_median"] = statistics.median(run["vnmse_median"] for run in own)
        row["vnmse_max"] = worst([run["vnmse_max"] for run in own])
        row["norm_error_median"] = statistics.median(run["norm_error_median"] for run in own)
        row["norm_error_max"] = worst([run["norm_error_max"] for run in own])
        result.append(row)
    return result


# ---- command line


@dataclasses.dataclass(frozen=True)
class Sizes:
    ranks: tuple[int, ...] = (2, 8, 32, 128, 512, 4096)
    # Elements of all ranks and samples together. MIN_SAMPLES and MAX_SAMPLES take precedence.
    total_numel: int = 1 << 26
    record_steps: int = 300
    record_batch: int = 4
    train_steps: int = 300
    seeds: int = 3
    # Windows of the text to test on.
    held_out: int = 512
    models: tuple[str, ...] = ("digits", "characters")


QUICK = Sizes((2, 8), 1 << 15, record_steps=3, record_batch=1, train_steps=3, seeds=1, held_out=8)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few ranks, elements and steps: the figures mean little")
    parser.add_argument("--parts", nargs="+", choices=("error", "training"), default=["error", "training"])
    parser.add_argument("--threads", type=int, default=1, help="threads that torch uses (1)")
    parser.add_argument("--json", metavar="PATH", help="write figures there as soon as they are known")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    sizes = QUICK if arguments.quick else Sizes()
    document = {"env": env(), "quick": arguments.quick, "sizes": dataclasses.asdict(sizes)}
    started = time.monotonic()

    def done(what: str) -> None:
        document["seconds"] = round(time.monotonic() - started)
        document["peak_memory_gib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)
        print(f"[{document['seconds']:>5} s] {what}", flush=True)
        if arguments.json:
            write_document(arguments.json, document)

    characters = Characters()
    if "error" in arguments.parts:
        rows = document["error_by_ranks"] = []
        recorded = record(characters, sizes.ranks[-1], sizes.record_steps, sizes.record_batch)
        done(f"recorded {len(recorded)} gradients of {recorded.shape[1]} elements")
        for ranks in sizes.ranks:
            rows += error_by_ranks("recorded", ranks, recorded_sample(recorded, ranks))
            done(f"recorded, {ranks} ranks")
        del recorded
        for kind, ranks in itertools.product(RANDOM_GRADIENTS, sizes.ranks):
            rows += error_by_ranks(kind, ranks, random_samples(kind, ranks, sizes.total_numel))
            done(f"{kind}, {ranks} ranks")
        print(_report.error_table(document))
    if "training" in arguments.parts:
        runs = []
        for task in (digits_task(), characters_task(characters, sizes.held_out)):
            for seed, way in itertools.product(range(sizes.seeds), TRAINING_WAYS):
                runs.append(train(task, way, seed, sizes.train_steps))
                document["training_summary"] = training_summary(runs)
                done(f"{task.name}, {way.name}, seed {seed}: loss {runs[-1]['loss']:.5f}")
        print(_report.training_table(document))
    done("all")


if __name__ == "__main__":
    run_command(main)
