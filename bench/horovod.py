"""What do Horovod's operations cost, beside torch.distributed's?

    python bench/horovod.py
    sudo python bench/horovod.py --hosts 2 --link 1gbit

Real ranks over gloo: processes of this machine, or with --hosts hosts of bench/_hosts.py. A small all-reduce, the same
name again and again, beside dist.all_reduce of as many bytes; and 300 tensors of mixed sizes, submitted at once, beside
300 calls of dist.all_reduce. All take turns, in another order in each round; results are checked before anything is
timed; the time of a turn is the slowest rank's. What training steps cost with hvd.DistributedOptimizer: ddp_step.py.

Needs 1 GiB of memory for each rank; root, ip, tc and taskset with --hosts. A minute.
"""

import argparse

import _hosts as hosts
from lib.common import Report, Row, print_table, run_command, with_ratios

DIST = "dist.all_reduce"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hosts.add_options(parser, "1gbit")
    parser.add_argument("--rounds", type=int, default=20, help="(20)")
    parser.add_argument("--calls", type=int, default=50, help="timed calls of a small all-reduce in each turn (50)")
    parser.add_argument("--quick", action="store_true", help="two rounds of ten calls")
    parser.add_argument("--json", metavar="PATH", help="write rows there as soon as they are measured")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.calls = 2, 10
    hosts.complete(parser, arguments, link=["1gbit"], subnet=None)
    for name in ("rounds", "calls"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name} must be more than 0")
    return arguments


def measure(arguments: argparse.Namespace, link: str, report: Report) -> None:
    status, found = hosts.found_by_ranks(arguments, "_horovod_rank.py", link, {**vars(arguments), "case": link})
    if status:
        report.missing(link, "the rest", f"the ranks ended with exit status {status}")
    report.add(with_ratios([Row(**row) for row in found or []], [DIST]))


def main() -> None:
    arguments = parse()
    with hosts.measuring("horovod.py", arguments) as (report, links):
        for link in links:
            measure(arguments, link, report)
    print_table(report.rows)
    report.finish()


if __name__ == "__main__":
    run_command(main)
