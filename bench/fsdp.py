"""Step times of FSDP2 as it comes, with gradients reduced in bf16, and with fusedcomm in each wire.

    python bench/fsdp.py --hosts 2 --link 100mbit 1gbit       # hosts with limited links, needs root (bench/hosts.py)
    python bench/fsdp.py                                      # two ranks over loopback

A step gathers the parameters in fp32, once for the forward pass and once for the backward pass, and reduce-scatters the
gradients. "gradients" is the part of the step that a step without the reduce-scatter does not take.

    step ms    median of a rank's step
    gradients  ms of it for the gradients
    x fp32     how many times as fast the gradients are as with fully_shard as it comes
    MB         that a rank has to send for the gradients of a step: elements times bits, and scales
    line MB    that rank 0's host sent in a step, parameters and headers included; over loopback, rank 0's sockets
    error      ‖gradient − exact gradient‖ / ‖exact gradient‖ of the first step

Needs 1 GiB of memory for each rank; root, ip, tc and taskset with --hosts. A few minutes.
"""

import argparse
import json
import tempfile
from pathlib import Path

import hosts
from _fsdp_rank import GATHER, PLAIN, WAYS
from lib.common import Report, Row, print_table, run_command, with_ratios
from lib.namespaces import CONGESTION


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hosts.add_options(parser, "1gbit")
    parser.add_argument("--layers", type=int, default=4, help="blocks, each a group of its own (4)")
    parser.add_argument("--width", type=int, default=384, help="(384)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways to compare (all)")
    parser.add_argument("--rounds", type=int, default=6, help="(6)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps in each turn (2)")
    parser.add_argument("--quick", action="store_true", help="defaults of one block and one round of one step")
    parser.add_argument("--json", metavar="PATH", help="write rows there as soon as they are measured")
    if parser.parse_args().quick:
        parser.set_defaults(layers=1, rounds=1, steps=1)
    arguments = parser.parse_args()
    hosts.complete(parser, arguments, link=["1gbit"], subnet=None)
    arguments.ways = [way for way in WAYS if way in {*arguments.ways, PLAIN, GATHER}]
    return arguments


def measure(arguments: argparse.Namespace, link: str, report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        worker = [str(Path(__file__).with_name("_fsdp_rank.py")), str(results)]
        worker.append(json.dumps({**vars(arguments), "case": link}))
        status = hosts.run_ranks(arguments, worker, link, arguments.subnet, CONGESTION)
        rows = [Row(**row) for row in json.loads(results.read_text())] if results.exists() else []
    if status:
        report.missing(link, "all" if not rows else "the rest", f"the ranks ended with exit status {status}")
    report.add(with_ratios(rows, [PLAIN]))


def print_gradients(rows: list[Row]) -> None:
    width = max((len(row.impl) for row in rows), default=4)
    print(f"\n{'way':<{width}} {'step ms':>9} {'gradients':>9} {'x fp32':>7} {'MB':>8} {'line MB':>8} {'error':>8}")
    plain = {row.case: row.figures["gradients_s"] for row in rows if row.impl == PLAIN}
    case = None
    for row in rows:
        if row.case != case:
            case = row.case
            print(f"{case}, {row.numel:,} parameters")
        gradients_s = row.figures["gradients_s"]
        ratio = f"{plain[case] / gradients_s:7.2f}" if gradients_s > 0 and case in plain else " " * 7
        print(
            f"{row.impl:<{width}} {row.median_s * 1e3:9.1f} {gradients_s * 1e3:9.1f} {ratio} "
            f"{row.figures['sent_nbytes'] * 1e-6:8.2f} {row.figures['line_nbytes'] * 1e-6:8.2f} "
            f"{row.figures['error']:8.1e}{'' if row.checked else '  WRONG'}"
        )


def main() -> None:
    arguments = parse()
    with hosts.measuring("fsdp.py", arguments) as (report, links):
        for link in links:
            measure(arguments, link, report)
    print_table(report.rows)
    print_gradients(report.rows)
    report.finish()


if __name__ == "__main__":
    run_command(main)
