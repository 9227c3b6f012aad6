"""What do local steps save, and what do they cost in loss?

    python bench/local_steps.py --hosts 2 --link 20mbit       # hosts with limited links, needs root (bench/_hosts.py)
    python bench/local_steps.py                               # two ranks over loopback

A character transformer is trained from scratch on Python's standard library. Every way takes the same batches; the loss
is for each held-out character, of the mean of all ranks' parameters, after the last merge. With --finetune this mean is
trained on afterwards, on English prose, by DDP in fp32 for every way.

    no communication   each rank for itself: the bound of steps a second
    DDP                gradients averaged in every step, fp32
    int4 every step    the same with fusedcomm's int4 and error feedback
    PowerSGD           torch's hook, matrix rank 4, from the tenth step on
    H=… post-local SGD torch's: gradients averaged for a tenth of the steps, then parameters every H steps, blocking
    H=… average        parameters averaged every H steps, blocking
    H=… corrected      5 steps late; fp32 unless a wire is named

    loss      mean of the seeds, and the difference from DDP: mean, least and greatest of the seeds
    steps/s   median of the seeds; without evaluations
    MB        that a rank sends in the whole run
    to loss   seconds until the loss of DDP at two thirds of its steps is reached; mean of the seeds that reach it
    finetuned, forgot    after --finetune: loss on the prose, and on what the model was trained on before; means

Needs scikit-learn, half a GiB of memory for each rank; root, ip, tc and taskset with --hosts. Half an hour for each
link and H; two minutes with --quick.
"""

import argparse
import statistics

import _hosts as hosts
from lib.common import env, run_command, write_document

DDP = "DDP"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hosts.add_options(parser, "20mbit")
    parser.add_argument("--every", nargs="+", type=int, default=[10, 30], help="steps from merge to merge (10 30)")
    parser.add_argument("--delay", nargs="+", type=int, default=[5], help="steps that late merges are late (5)")
    parser.add_argument("--finetune", type=int, default=0, metavar="STEPS", help="steps on another text afterwards (0)")
    parser.add_argument("--ways", nargs="+", default=[], help="regular expressions: only ways that match one (all)")
    parser.add_argument("--steps", type=int, default=300, help="(300)")
    parser.add_argument("--seeds", type=int, default=3, help="(3)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank (8)")
    parser.add_argument("--width", type=int, default=64, help="of the model (64)")
    parser.add_argument("--depth", type=int, default=2, help="its blocks or layers (2)")
    parser.add_argument("--lr", type=float, default=3e-3, help="of AdamW (3e-3)")
    parser.add_argument("--quick", action="store_true", help="40 steps, one seed, H = 10")
    parser.add_argument("--json", metavar="PATH", help="write the curves there")
    arguments = parser.parse_args()
    hosts.complete(parser, arguments, link=["20mbit"], subnet=None)
    if arguments.quick:
        arguments.steps, arguments.seeds, arguments.every = 40, 1, [10]
    arguments.look_every = max(arguments.steps // 10, 1)
    return arguments


def seconds_to(loss: float, curve: list) -> float | None:
    return next((seconds for _, seconds, seen in curve if seen <= loss), None)


def print_rows(link: str, rows: list[dict]) -> None:
    of_ddp = {row["seed"]: row for row in rows if row["way"] == DDP}
    columns = ("loss", 7), ("less DDP", 9), ("least", 8), ("most", 8), ("steps/s", 8), ("MB", 9), ("to loss", 8)
    after = [name for name in ("finetuned", "forgot") if name in rows[0]]
    columns += tuple((name, 9) for name in after)
    print(f"\n{link}\n{'way':<38} " + " ".join(f"{name:>{width}}" for name, width in columns))
    for way in dict.fromkeys(row["way"] for row in rows):
        seeds = [row for row in rows if row["way"] == way]
        more = [row["loss"] - of_ddp[row["seed"]]["loss"] for row in seeds if row["seed"] in of_ddp]
        spread = f"{statistics.mean(more):+9.4f} {min(more):+8.4f} {max(more):+8.4f}" if more else " " * 27
        reached = []
        for row in seeds:
            if row["seed"] in of_ddp:
                curve = of_ddp[row["seed"]]["curve"]
                reached.append(seconds_to(curve[len(curve) * 2 // 3][2], row["curve"]))
        found = [each for each in reached if each is not None]
        to_loss = f"{statistics.mean(found):8.1f}" if found else "       –"
        loss = statistics.mean(row["loss"] for row in seeds)
        speed = statistics.median(row["steps_per_s"] for row in seeds)
        sent = seeds[0]["sent_nbytes"] * 1e-6
        print(f"{way:<38} {loss:7.4f} {spread} {speed:8.2f} {sent:9.2f} {to_loss}", end="")
        print("".join(f" {statistics.mean(row[name] for row in seeds):9.4f}" for name in after))


def main() -> None:
    arguments = parse()
    found = {}
    with hosts.measuring("local_steps.py", arguments) as (_, links):
        for link in links:
            found[link] = hosts.rows_of_ranks(arguments, "_local_steps_rank.py", link, vars(arguments))
            if arguments.json:
                settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "link")}
                write_document(arguments.json, {"env": env(), "settings": settings, "runs": found})
    for link, rows in found.items():
        print_rows(link, rows)


if __name__ == "__main__":
    run_command(main)
