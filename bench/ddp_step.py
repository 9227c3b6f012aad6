"""How long is a training step, over links of a chosen speed, with each way of synchronizing gradients?

    python bench/ddp_step.py --hosts 2 --link 100mbit 1gbit --model transformer --params 25e6 --size 1

Whole steps (forward, backward with its synchronization, optimizer) of a residual network or a transformer, on hosts of
bench/_hosts.py, or with --hosts 0 on this machine's loopback, which needs no root. --params sets how much has to be
sent; --batch, --size or --compute-ms set how much there is to compute. With --size 1 communication is nearly all of a
step. The layers of --model waiting sleep instead of computing, as if an accelerator computed.

Every way has its own DDP module or reducer, gradients, buckets, optimizer and process group; weights are shared. All
ways take turns in every round, in another order each time. A turn is one step that is not timed and --steps that are.
The time of a step is the slowest rank's. The ranks' allocator keeps freed memory.

"ddp default" is DDP with its default options. "ddp tuned" and all other ways have gradient_as_bucket_view=True, which
saves a copy, and the best of several bucket sizes, which is searched first. But "auto" has DDP's own size, and
ways that cannot run with several buckets have one. "fusedcomm reducer" is fusedcomm.GradReducer in DDP's place, with
the best bucket size, too. "fusedcomm members" is that among ranks that may come and go, with the reducer's own bucket
size, and "hvd" is fusedcomm.horovod's DistributedOptimizer with that compression, with Horovod's.

Before that, each way is checked with gradients that are known on every rank, in three steps: the result must be as near
to their exact mean as the wire allows, and have the same bits on every rank.

The columns of the printed table, which bench/results/steps.md explains, too:

    x DDP      speed relative to the faster of "ddp default" and "ddp tuned"; x sync alone: of a backward pass that has
               nothing to compute
    x bytes    bytes that DDP's default sends / bytes that this way sends: the gain if a step were all communication
    of ideal   ideal step / step. The ideal is the longer of compute alone and the bytes' time on the line with headers
    cores busy part of all cores' time that is not idle during steps, on rank 0's machine (with --hosts: on this one)
    exposed    time that a step takes beyond the same step without synchronization ("compute alone")
    overlap    part of the synchronization that a step hides behind its compute
    MB/host    bytes that a host sends in a step, by its interface's counter (with --hosts 0: a rank, by its sockets')
    error      ‖mean − exact mean‖ / ‖exact mean‖ of known gradients: normal ones, of rank 1 or 2 for PowerSGD

Not measured: DDP over MPI or UCC, because torch's wheels have neither backend, and mpi4py does not add one; Horovod,
because its last release, 0.28.1, compiles as C++14, which the headers of torch 2.13 refuse.

With --device cuda the steps run over NCCL; ranks that have no GPU of their own share one.

Needs 1 GiB of memory for each rank with 10 million parameters; root, ip, tc and taskset with --hosts. Half an hour,
a few minutes with --quick.
"""

import argparse
import dataclasses
import itertools
import os
import statistics

import _hosts as hosts
import torch
import torch.distributed as dist
from _steps_report import Result, case_table
from lib.common import Report, Row, run_command, with_ratios
from lib.models import MODELS
from lib.namespaces import CONGESTION
from lib.ways import DEFAULT, TUNED, ways_by_name

THIS_BENCH = "this torch has it, but this benchmark only uses gloo"
NOT_MEASURED = {
    "ddp over mpi": THIS_BENCH
    if dist.is_mpi_available()
    else "torch's wheels are built without it, and mpi4py does not add it",
    "ddp over ucc": THIS_BENCH if dist.is_ucc_available() else "torch's wheels are built without it",
    "horovod": "0.28.1, its last release, compiles as C++14, which the headers of torch 2.13 refuse",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hosts.add_options(parser, "1gbit")
    parser.add_argument("--congestion", help=f"TCP's congestion control: cubic, reno, bbr ({CONGESTION})")
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["transformer"])
    parser.add_argument("--params", type=float, default=10e6, help="elements of the model (10e6)")
    parser.add_argument("--size", type=int, default=16, help="sequence length, or side of an image (16)")
    samples = parser.add_mutually_exclusive_group()
    samples.add_argument("--batch", type=int, default=1, help="samples of each rank (1)")
    samples.add_argument("--compute-ms", type=float, help="choose samples so that a step without sync takes this long")
    parser.add_argument("--optimizer", choices=("sgd", "momentum", "adamw"), default="sgd", help="the fused one (sgd)")
    parser.add_argument("--ways", nargs="+", choices=list(ways_by_name()), help="ways to compare (all)")
    parser.add_argument("--caps", type=float, nargs="*", default=[5, 100], help="bucket_cap_mb to try (5 100)")
    parser.add_argument("--rounds", type=int, default=8, help="(8)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in each turn (3)")
    parser.add_argument("--repeat", type=int, default=1, help="times to run all this, each in new processes (1)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds until a stuck way is given up (120)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    parser.add_argument("--quick", action="store_true", help="defaults of 1e6 parameters, two rounds, no search")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU: the times mean nothing")
    parser.add_argument("--json", metavar="PATH", help="write rows there as soon as they are measured")
    if parser.parse_args().quick:
        parser.set_defaults(params=1e6, rounds=2, steps=2, caps=[])
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.device, arguments.params, arguments.rounds, arguments.steps = "cpu", 1e5, 2, 2
        arguments.size, arguments.batch = min(arguments.size, 16), min(arguments.batch, 8)
    hosts.complete(parser, arguments, link=["1gbit"], congestion=CONGESTION, subnet=None)
    for name, least in (("params", 1), ("size", 1), ("batch", 1), ("rounds", 1), ("steps", 1), ("repeat", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be at least {least}")
    if arguments.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device cuda: torch sees no CUDA GPU here")
        if arguments.ranks_per_host > torch.cuda.device_count():
            # Each rank sets NCCL_HOSTID: NCCL takes the ranks to be on different hosts, and lets them share a GPU.
            os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    return arguments


def measure(arguments: argparse.Namespace, link: str, model: str, report: Report) -> None:
    case = f"{model}/{link}"
    runs = []
    for number in range(1, arguments.repeat + 1):
        settings = {**vars(arguments), "model": model}
        status, found = hosts.found_by_ranks(arguments, "_ddp_step_rank.py", link, settings)
        found = found or {"rows": [], "not_measured": []}
        report.not_measured += [entry for entry in found["not_measured"] if entry not in report.not_measured]
        if status:
            at = f", at {found['at']}" if "at" in found else ""
            what = "all" if not found["rows"] else "the rest"
            what += f" of run {number}" if arguments.repeat > 1 else ""
            report.missing(case, what, f"the ranks ended with exit status {status}{at}")
        runs.append(found)
    rows = of_runs([[Row(**row) for row in found["rows"]] for found in runs])
    cases = [found["case"] for found in runs if found.get("case")]
    of_all = {"runs": cases} if arguments.repeat > 1 else {}
    report.extra.setdefault("cases", {})[case] = {**(cases[-1] if cases else {}), **of_all}
    report.add(with_ratios(rows, [DEFAULT, TUNED]))


def of_runs(runs: list[list[Row]]) -> list[Row]:
    """One row for each way: medians over the runs that have the way, and each run's median as "medians_s"."""
    if len(runs) == 1:
        return runs[0]
    by_impl: dict[str, list[Row]] = {}
    for row in itertools.chain(*runs):
        by_impl.setdefault(row.impl, []).append(row)

    def medians(of_each: list[dict[str, float]]) -> dict[str, float]:
        return {name: statistics.median(one[name] for one in of_each if name in one) for name in of_each[0]}

    return [
        dataclasses.replace(
            rows[0],
            median_s=statistics.median(row.median_s for row in rows),
            best_s=min(row.best_s for row in rows),
            percentiles_s=medians([row.percentiles_s for row in rows]),
            figures={**medians([row.figures for row in rows]), "medians_s": [row.median_s for row in rows]},
        )
        for rows in by_impl.values()
    ]


def main() -> None:
    arguments = parse()
    with hosts.measuring("ddp_step.py", arguments) as (report, links):
        for impl, reason in NOT_MEASURED.items():
            report.missing("any", impl, reason, failed=False)
        for model, link in [(model, link) for model in arguments.model for link in links]:
            measure(arguments, link, model, report)
    document = {"env": report.env, **report.extra, "not_measured": report.not_measured}
    document["rows"] = [dataclasses.asdict(row) for row in report.rows]
    for case in {row.case: None for row in report.rows}:
        print(f"\n{case_table(Result('', document, case))}")
    report.finish()


if __name__ == "__main__":
    run_command(main)
