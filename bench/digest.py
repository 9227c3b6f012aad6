"""What do the ranks' digests cost in a step?

DDP with parameters of 25 and 100 MiB on local ranks over gloo. A backward pass is dot products, real autograd and
cheap, so that the share of the digests is the largest that it can be; in other cases products of matrices come before
it, as a step computes something. Two attachments take turns, one with
Checks(digest=True) and one with False. The time of a step is the slowest rank's. The CPU time of a step is that of
all threads of a rank, the mean over ranks: it is less noisy where ranks share cores. Before anything is timed, both
attachments' means are compared: they must be equal, bit for bit.

Needs 2 GiB of memory for all ranks; a quarter of an hour, half a minute with --quick.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from lib.common import Report, Row, interleave, keep_memory, make_row, print_table, run_command, with_ratios
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Checks, Config
from fusedcomm.tools import local_ranks

WAYS = {"without": False, "with digests": True}
TENSOR_NUMEL = 1 << 20
MATRIX = 512
WARMUP = 3


class Model(nn.Module):
    """The loss is the sum of the parameters' dot products with values that differ between ranks."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        num_tensors = max(1, mib * (1 << 20) // (4 * TENSOR_NUMEL))
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._values = [torch.randn(TENSOR_NUMEL, generator=generator) for _ in range(num_tensors)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(1024, TENSOR_NUMEL // 1024)) for _ in self._values)

    def forward(self) -> torch.Tensor:
        return torch.stack([torch.dot(w.flatten(), v) for w, v in zip(self.weights, self._values, strict=True)]).sum()


def measure(wire: str, mib: int, products: int, rounds: int, path: str) -> int:
    """Rank 0 writes {way: {"seconds": [of each round], "cpu_s": mean of a step and rank}}."""
    torch.set_num_threads(1)
    keep_memory()
    matrix = torch.randn(MATRIX, MATRIX)
    models, cpu_s = {}, dict.fromkeys(WAYS, 0.0)
    for way, digest in WAYS.items():
        models[way] = DistributedDataParallel(Model(mib), gradient_as_bucket_view=True)
        checks = Checks(measure_every=0, digest=digest)
        fusedcomm.attach(models[way], Config(wire, checks=checks), quiet=True)

    def step(way: str, round_index: int) -> None:
        dist.barrier()
        began = time.process_time()
        for _ in range(products):
            torch.mm(matrix, matrix)
        models[way]().backward()
        cpu_s[way] += time.process_time() - began

    for way in WAYS:
        for _ in range(WARMUP):
            step(way, 0)
    first, second = (model.module.weights for model in models.values())
    if not all(torch.equal(a.grad, b.grad) for a, b in zip(first, second, strict=True)):
        raise AssertionError("the means differ between the two ways")
    cpu_s.update(dict.fromkeys(WAYS, 0.0))
    seconds = interleave({way: lambda index, way=way: step(way, index) for way in WAYS}, rounds, warmup=0)
    found = {way: {"seconds": seconds[way], "cpu_s": cpu_s[way] / rounds} for way in WAYS}
    of_ranks: list[dict] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, found)
    if dist.get_rank() == 0:
        merged = {
            way: {
                "seconds": [max(each) for each in zip(*(of[way]["seconds"] for of in of_ranks), strict=True)],
                "cpu_s": statistics.mean(of[way]["cpu_s"] for of in of_ranks),
            }
            for way in WAYS
        }
        Path(path).write_text(json.dumps(merged))
    return 0


def rows_of(wire: str, mib: int, num_ranks: int, products: int, rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        status = local_ranks.run("digest.py", num_ranks, measure, wire, mib, products, rounds, str(path))
        if status:
            raise SystemExit(status)
        found = json.loads(path.read_text())
    case, numel, rows = f"{wire}, {num_ranks} ranks, {mib} MiB, {products} products", mib * (1 << 18), []
    for way, of_way in found.items():
        row = make_row(case, way, numel, 4 * numel, of_way["seconds"], checked=True)
        row.figures["cpu_s"] = of_way["cpu_s"]
        rows.append(row)
    without, with_digests = (row.figures["cpu_s"] for row in rows)
    rows[-1].figures["more_cpu"] = with_digests / without - 1
    pairs = zip(found["with digests"]["seconds"], found["without"]["seconds"], strict=True)
    rows[-1].figures["more_time"] = statistics.median(a / b for a, b in pairs) - 1
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wires", nargs="+", default=["int8", "bf16"], help="(int8 bf16)")
    parser.add_argument("--mib", nargs="+", type=int, default=[25, 100], help="sizes of the gradients (25 100)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="numbers of ranks (2 4)")
    parser.add_argument(
        "--products", nargs="+", type=int, default=[0, 40], help=f"of {MATRIX} × {MATRIX} matrices (0 40)"
    )
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each way (60)")
    parser.add_argument(
        "--quick", action="store_true", help="int8, 25 MiB, two ranks, 10 rounds, where not given otherwise"
    )
    parser.add_argument("--json", metavar="PATH", help="file for the results")
    if parser.parse_args().quick:
        parser.set_defaults(wires=["int8"], mib=[25], ranks=[2], products=[0], rounds=10)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    report = Report(arguments.json, settings={k: v for k, v in vars(arguments).items() if k != "json"})
    for mib in arguments.mib:
        for num_ranks, products, wire in itertools.product(arguments.ranks, arguments.products, arguments.wires):
            rows = with_ratios(rows_of(wire, mib, num_ranks, products, arguments.rounds), ["without"])
            report.add(rows)
            print_table(rows)
            more = rows[-1].figures
            print(f"with digests: {more['more_time']:+.1%} time, {more['more_cpu']:+.1%} CPU time", flush=True)
    report.finish()


if __name__ == "__main__":
    run_command(main)
