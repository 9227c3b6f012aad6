"""How much of the host's time does a reducer take for each parameter?

A backward pass brings gradients to many small parameters: alone ("no reducer"), under DDP, under DDP with fusedcomm's
hook, and under fusedcomm.GradReducer. They take turns. A row's times are the seconds on a core of the thread that runs
backward(), divided by the number of parameters; what the reducer adds is in "figures", beyond_plain_s. The means are
checked before anything is timed.

Needs 1 GiB of memory for each rank; a minute.
"""

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from lib.common import Report, in_turn, make_row, print_table, run_command, with_ratios
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.ranks import groups
from fusedcomm.tools import local_ranks

PLAIN, DDP = "no reducer", "ddp"
WARMUP = 5


class Spread(torch.autograd.Function):
    """Gives each parameter a gradient of its own, at little cost."""

    @staticmethod
    def forward(ctx, gradients: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple:
        return None, *(of_parameter.clone() for of_parameter in ctx.gradients)


class Model(nn.Module):
    def __init__(self, num_parameters: int, numel: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numel) for _ in range(num_parameters))

    def forward(self, gradients: torch.Tensor) -> torch.Tensor:
        return Spread.apply(gradients, *self.weights)


def make_ways(num_parameters: int, numel: int) -> tuple[dict[str, nn.Module], list[object]]:
    """(the module of each way, what has to stay alive)."""

    def model() -> Model:
        return Model(num_parameters, numel)

    hooked, fp32, bf16 = DistributedDataParallel(model()), model(), model()
    ways = {
        PLAIN: model(),
        DDP: DistributedDataParallel(model()),
        "ddp, bucket views": DistributedDataParallel(model(), gradient_as_bucket_view=True),
        "fusedcomm hook, bf16": hooked,
        "fusedcomm reducer, fp32": fp32,
        "fusedcomm reducer, bf16": bf16,
    }
    kept = [
        fusedcomm.attach(hooked, fusedcomm.Config("bf16", wires={"1d": "bf16"}), quiet=True),
        fusedcomm.GradReducer(fp32, "fp32", quiet=True),
        fusedcomm.GradReducer(bf16, fusedcomm.Config("bf16", wires={"1d": "bf16"}), quiet=True),
    ]
    return ways, kept


def backward_s(name: str, module: nn.Module, gradients: torch.Tensor) -> float:
    """Seconds of this thread on a core in a backward pass."""
    module.zero_grad(set_to_none="views" not in name)
    loss = module(gradients)
    begin = time.thread_time()
    loss.backward()
    return time.thread_time() - begin


def measure(arguments: argparse.Namespace) -> int:
    """Runs on every rank; rank 0 reports. Returns the exit status."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    ways, kept = make_ways(arguments.parameters, arguments.numel)
    # Whole numbers: their mean is exact in every wire.
    gradients = torch.full((arguments.parameters, arguments.numel), float(2 * rank))
    for name, module in ways.items():
        backward_s(name, module, gradients)
        expected = 2.0 * rank if name == PLAIN else float(arguments.ranks - 1)
        if not all(torch.all(weight.grad == expected) for weight in module.parameters()):
            raise RuntimeError(f"{name}: wrong mean on rank {rank}")
    seconds = {name: [] for name in ways}
    for turn in range(-WARMUP, arguments.rounds):
        for name in in_turn(ways, turn):
            dist.barrier()
            spent = backward_s(name, ways[name], gradients)
            if turn >= 0:
                seconds[name].append(spent / arguments.parameters)
    if rank == 0:
        report(seconds, arguments)
    groups.end_together()
    return 0


def report(seconds: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    case, nbytes = f"backward/{arguments.parameters} parameters, {arguments.ranks} ranks", 4 * arguments.numel
    plain_s = statistics.median(seconds[PLAIN])
    rows = [make_row(case, name, arguments.numel, nbytes, of_way, checked=True) for name, of_way in seconds.items()]
    for row in rows:
        row.figures["beyond_plain_s"] = row.median_s - plain_s
    results = Report(arguments.json)
    results.add(with_ratios(rows, [DDP]))
    print_table(results.rows)
    for row in results.rows:
        print(f"{row.impl}: {row.figures['beyond_plain_s'] * 1e6:.1f} us a parameter beyond the backward pass alone")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1, help="local ranks (1)")
    parser.add_argument("--parameters", type=int, default=1000, help="parameters (1000)")
    parser.add_argument("--numel", type=int, default=256, help="elements of each (256)")
    parser.add_argument("--rounds", type=int, default=100, help="timed backward passes of each way (100)")
    parser.add_argument("--quick", action="store_true", help="10 passes")
    parser.add_argument("--json", metavar="PATH", help="file for the results")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 10
    return arguments


def main() -> None:
    arguments = parse()
    status = local_ranks.run("reducer_host.py", arguments.ranks, measure, arguments)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    run_command(main)
