"""What do Horovod's calls cost on fusedcomm's engine, beside torch.distributed, DDP and fusedcomm's own hook?

    python bench/horovod.py
    python bench/horovod.py --hosts 2 --link 100mbit 1gbit --parts steps --params 3e6 --size 1

Real ranks over gloo: processes of this machine, or with --hosts hosts of bench/hosts.py, which needs root. --device
cuda runs the steps over NCCL; ranks that have no GPU of their own share one. In each part all ways take turns, in
another order in each round; results are checked before anything is timed; the time of a turn is the slowest rank's.
Parts:

    latency  a small all-reduce, the same name again and again, beside dist.all_reduce of as many bytes; and 300 tensors
             of mixed sizes, submitted at once, beside 300 calls of dist.all_reduce
    idle     how often threads that hvd.init() has started wake up, in a second without work. The threads that
             agree on the order stand apart from gloo's, which wake up with every process group, DDP's too
    steps    training steps: DistributedOptimizer without compression, with bf16 and int8, beside DDP and beside
             fusedcomm.attach(ddp, "bf16" or "int8"). Every way has its own gradients and buckets

"samples/s" has the mean over steps ± 1.96 standard deviations, as Horovod's synthetic benchmarks print it. "x hook" is
the speed relative to fusedcomm's hook with the same wire.

Needs 1 GiB of memory for each rank; root, ip, tc and taskset with --hosts. A few minutes.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import hosts
import torch
from lib.common import Report, Row, print_table, run_command, with_ratios
from lib.models import MODELS
from lib.namespaces import CONGESTION

PARTS = ("latency", "idle", "steps")
DIST, DDP, HOOK = "dist.all_reduce", "ddp", "fusedcomm hook"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure (all)")
    hosts.add_options(parser, "1gbit")
    parser.add_argument("--congestion", help=f"TCP's congestion control: cubic, reno, bbr ({CONGESTION})")
    parser.add_argument("--model", choices=MODELS, default="transformer", help="(transformer)")
    parser.add_argument("--params", type=float, default=3e6, help="elements of the model (3e6)")
    parser.add_argument("--size", type=int, default=16, help="sequence length, or side of an image (16)")
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank (8)")
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), default="sgd", help="the fused one (sgd)")
    parser.add_argument("--rounds", type=int, default=10, help="(10)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps in each turn (4)")
    parser.add_argument("--calls", type=int, default=50, help="timed calls of a small all-reduce in each turn (50)")
    parser.add_argument("--idle-s", type=float, default=3.0, help="seconds without work (3)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds until stuck ranks end themselves (300)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the steps (cpu)")
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU: the times mean nothing")
    parser.add_argument("--json", metavar="PATH", help="write rows there as soon as they are measured")
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.device, arguments.quick, arguments.params, arguments.size = "cpu", True, 1e5, 16
    if arguments.quick:
        arguments.rounds, arguments.steps, arguments.calls, arguments.idle_s = 2, 2, 10, 1.0
    hosts.complete(parser, arguments, link=["1gbit"], congestion=CONGESTION, subnet=None)
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no CUDA GPU here")
        if arguments.ranks_per_host > torch.cuda.device_count():
            # Each rank sets NCCL_HOSTID: NCCL takes the ranks to be on different hosts, and lets them share a GPU.
            os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    for name in ("params", "size", "batch", "rounds", "steps", "calls", "idle_s", "timeout"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0")
    return arguments


def measure(arguments: argparse.Namespace, link: str, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        worker = [str(Path(__file__).with_name("_horovod_rank.py")), str(results), json.dumps(vars(arguments))]
        status = hosts.run_ranks(arguments, worker, link, arguments.subnet, arguments.congestion)
        found = json.loads(results.read_text()) if results.exists() else {"rows": []}
    if status:
        at = f" in {found['at']}" if "at" in found else ""
        report.missing(link, "the rest", f"the ranks ended with exit status {status}{at}")
    if "idle" in found:
        report.extra["idle"] = found["idle"]
    report.add(with_hook_ratios(with_ratios([Row(**row) for row in found["rows"]], [DIST, DDP])))


def with_hook_ratios(rows: list[Row]) -> list[Row]:
    """The rows with the speed of DistributedOptimizer relative to the hook with the same wire, as the ratio "hook"."""
    medians = {(row.case, row.impl): row.median_s for row in rows}
    for row in rows:
        hook_s = medians.get((row.case, row.impl.replace("hvd", HOOK)))
        if row.impl.startswith("hvd ") and hook_s is not None:
            row.ratios["hook"] = hook_s / row.median_s
    return rows


def print_more(report: Report) -> None:
    """Prints what the common table does not have."""
    for row in report.rows:
        if "samples_s" in row.figures:
            figures = row.figures
            print(
                f"{row.case} {row.impl}: {figures['samples_s']:.1f} ± {figures['samples_s_spread']:.1f} samples/s a "
                f"rank, synchronization alone {figures.get('sync_s', 0) * 1e3:.1f} ms, "
                f"{figures.get('wire_nbytes', 0) / 1e6:.2f} MB sent"
            )
    if "idle" in report.extra:
        idle = report.extra["idle"]
        print(
            f"idle: hvd's threads wake up {idle['own_wakeups_s']:.1f} times a second; "
            f"{idle['num_others']} threads of gloo in its process groups {idle['other_wakeups_s']:.1f} times each"
        )


def main() -> None:
    arguments = parse()
    with hosts.measuring("horovod.py", arguments) as (report, links):
        for link in links:
            measure(arguments, link, report)
    print_table(report.rows)
    print_more(report)
    report.finish()


if __name__ == "__main__":
    run_command(main)
