"""Step times of FSDP2 as it comes, with gradients reduced in bf16, and with fusedcomm in each wire.

    python bench/fsdp.py --hosts 2 --link 100mbit 1gbit       # hosts with limited links, needs root (bench/_hosts.py)
    python bench/fsdp.py                                      # two ranks over loopback
    python bench/fsdp.py --part loss                          # what parameters in codes cost in loss, over loopback

speed
A step gathers the parameters, in --param-dtype unless a way names another wire, once for the forward pass and once for
the backward pass, and reduce-scatters the gradients. "kept": the second time within the host. "gradients" is the part
of the step that a step without the reduce-scatter and with parameters in --param-dtype does not take.

    step ms    median of a rank's step
    gradients  ms of it for the gradients
    x fp32     how many times as fast the gradients are as with fully_shard as it comes
    MB         that a rank has to send for the gradients of a step: elements times bits, and scales
    line MB    that rank 0's host sent in a step, parameters and headers included; over loopback, rank 0's sockets
    error      ‖gradient − exact gradient‖ / ‖exact gradient‖ of the first step

loss
A transformer learns the characters of Python's standard library, with its parameters gathered in every wire; and
adapters of low rank, on such a transformer that is frozen, learn that text with capitals and small letters exchanged.
Columns: held-out loss, mean of the seeds; its difference from exact parameters', of each seed, and where the held-out
text is read with exact parameters; bytes of the all-gathers over exact ones'.

Needs 1 GiB of memory for each rank; root, ip, tc and taskset with --hosts. A few minutes.
"""

import argparse
import statistics

import _hosts as hosts
from _fsdp_loss_rank import EXACT
from _fsdp_rank import GATHER, PLAIN, WAYS
from lib.common import Report, Row, env, print_table, run_command, with_ratios, write_document


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hosts.add_options(parser, "1gbit")
    parser.add_argument("--part", choices=("speed", "loss"), default="speed", help="(speed)")
    parser.add_argument("--layers", type=int, default=4, help="blocks, each a group of its own (4)")
    parser.add_argument("--width", type=int, default=384, help="(384)")
    parser.add_argument("--param-dtype", choices=("fp32", "bf16"), default="fp32", help="for torch's policy (fp32)")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways to compare (all)")
    parser.add_argument("--rounds", type=int, default=6, help="(6)")
    parser.add_argument("--steps", type=int, default=2, help="timed steps in each turn (2)")
    of_loss = parser.add_argument_group("of loss")
    of_loss.add_argument("--train-steps", type=int, default=150, help="(150)")
    of_loss.add_argument("--pretrain", type=int, default=400, help="steps of what adapters begin with (400)")
    of_loss.add_argument("--seeds", type=int, default=3, help="(3)")
    of_loss.add_argument("--gradients", default="fp32", help="wire of gradients (fp32)")
    parser.add_argument("--quick", action="store_true", help="defaults of one block and one round of one step")
    parser.add_argument("--json", metavar="PATH", help="write rows there as soon as they are measured")
    if parser.parse_args().quick:
        parser.set_defaults(layers=1, rounds=1, steps=1, train_steps=2, pretrain=2, seeds=1)
    arguments = parser.parse_args()
    hosts.complete(parser, arguments, link=["1gbit"], subnet=None)
    arguments.ways = [way for way in WAYS if way in {*arguments.ways, PLAIN, GATHER}]
    return arguments


def measure(arguments: argparse.Namespace, link: str, report: Report) -> None:
    status, found = hosts.found_by_ranks(arguments, "_fsdp_rank.py", link, {**vars(arguments), "case": link})
    rows = [Row(**row) for row in found or []]
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


# ---- loss


def print_losses(rows: list[dict]) -> None:
    print(f"\n{'model':<12} {'params':<6} {'loss':>7} {'bytes':>6}  difference of each seed, read exactly")
    of = {(row["model"], row["params"], row["seed"]): row for row in rows}
    for model, params in dict.fromkeys((row["model"], row["params"]) for row in rows):
        own = [row for row in rows if (row["model"], row["params"]) == (model, params)]
        told = []
        for name in ("loss", "exact_loss"):
            exact = [of[model, EXACT, row["seed"]][name] for row in own]
            told.append(" ".join(f"{row[name] - base:+.4f}" for row, base in zip(own, exact, strict=True)))
        loss = statistics.mean(row["loss"] for row in own)
        print(f"{model:<12} {params:<6} {loss:7.4f} {own[0]['of_exact']:6.3f}  {told[0]}, {told[1]}")


def measure_loss(arguments: argparse.Namespace) -> None:
    names = ("pretrain", "seeds", "gradients")
    settings = {name: getattr(arguments, name) for name in names} | {
        "steps": arguments.train_steps,
        "lr": 3e-3,
        "batch": 4,
    }
    loopback = argparse.Namespace(**{**vars(arguments), "hosts": 0, "ranks_per_host": 2})
    rows = hosts.rows_of_ranks(loopback, "_fsdp_loss_rank.py", "loopback", settings)
    print_losses(rows)
    if arguments.json:
        write_document(arguments.json, {"env": env(), "settings": settings, "loss": rows})


def main() -> None:
    arguments = parse()
    if arguments.part == "loss":
        measure_loss(arguments)
        return
    with hosts.measuring("fsdp.py", arguments) as (report, links):
        for link in links:
            measure(arguments, link, report)
    print_table(report.rows)
    print_gradients(report.rows)
    report.finish()


if __name__ == "__main__":
    run_command(main)
