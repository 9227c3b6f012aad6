"""How much of the host's time does a communication hook take for each bucket?

Every hook is registered on its own DDP module and called through the reducer as the backward pass calls it
(`Reducer._run_comm_hook`). Hooks take turns, with buckets of the same size. Each hook has two figures:

    call/…      time until the hook returns, during which the backward pass waits
    result/…    time until the bucket's future is complete

With one rank (the default) the network takes no time, and the figures are the host's. --ranks 2 runs over loopback.
Small buckets show the host's time best. Results are checked before anything is timed.

--device cuda runs over NCCL. The device's queue is empty before each step and holds all calls of a step, so `call` is
the host's time. torch.profiler counts the kernels and copies that each bucket enqueues. If there are more ranks than
GPUs, ranks share a GPU over loopback sockets. Then results are checked and nothing is timed.

Needs 1 GiB of memory for each rank, and a GPU with --device cuda; a minute.
"""

import argparse
import json
import os

import _hosts as hosts
import torch
from lib.common import Report, Row, print_table, run_command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1, help="local ranks (1)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cpu with gloo, or cuda with nccl (cpu)"
    )
    parser.add_argument("--numel", type=int, nargs="+", default=[1024, 65536], help="elements in a bucket (1024 65536)")
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of 16 buckets each (200)")
    parser.add_argument("--quick", action="store_true", help="20 rounds")
    parser.add_argument("--check-only", action="store_true", help="check results, time nothing")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU: the times mean nothing")
    parser.add_argument("--json", metavar="PATH", help="write rows there as soon as they are measured")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds = 20
    if arguments.dry_run:
        arguments.device, arguments.numel, arguments.rounds = "cpu", [256], 2
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA GPU here")
    arguments.shared_gpu = arguments.device == "cuda" and arguments.ranks > torch.cuda.device_count()
    arguments.check_only |= arguments.shared_gpu
    return arguments


def print_launches(found: dict) -> None:
    for entry in found.get("launches", ()):
        print(
            f"launches/{entry['numel']:<8} {entry['impl']:<28} {entry['kernels']:6.2f} kernels a bucket "
            f"(NCCL's: {entry['nccl']:.2f}), {entry['copies']:.2f} copies"
        )


def main() -> None:
    arguments = parse()
    ranks = argparse.Namespace(hosts=0, ranks_per_host=arguments.ranks)
    status, found = hosts.found_by_ranks(ranks, "_hook_rank.py", "loopback", vars(arguments))
    if arguments.json and os.path.exists(arguments.json):
        with open(arguments.json) as file:
            found = json.load(file)
    if found is None:
        raise SystemExit("a rank failed; its error is above")
    report = Report(None)
    report.add([Row(**row) for row in found["rows"]])
    report.not_measured = found["not_measured"]
    print_table(report.rows)
    print_launches(found)
    if arguments.check_only:
        for numel, names in found.get("checked", {}).items():
            print(f"checked/{numel}: {', '.join(names)}")
    if status:
        raise SystemExit("a rank failed; its error is above")
    report.finish()


if __name__ == "__main__":
    run_command(main)
