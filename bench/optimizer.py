"""What does it cost, in loss and in time, that each parameter's owner steps it and sends the update?

    python bench/optimizer.py --part loss                                       # two ranks over loopback
    python bench/optimizer.py --part speed --hosts 4 --link 1gbit unlimited     # limited links, needs root
    python bench/optimizer.py --part speed --hosts 2 --ranks-per-host 2 --link 1gbit

fusedcomm.ShardedOptimizer beside the same optimizer on every rank. AdamW is torch's. "muon" is Muon for the hidden
layers' matrices and AdamW for the rest: torch's Muon, with its products in fp32 (bench/_optimizer_ways.py says why).

loss    A transformer and a perceptron learn the characters of Python's standard library, with every wire of gradients
        and of updates. "replicated" is GradReducer with that wire's two-shot, and the optimizer on every rank. With
        fp32 in both places the parameters at the end must have the replicated optimizer's bits, or the run ends.
        Columns: held-out loss, mean of the seeds; the difference from replicated with the same wire, of each seed;
        whether all seeds have the same bits; MB that a rank sends in a step; MiB of optimizer state of a rank.
speed   Time of a step of a list of matrices and biases shaped like a transformer's. Their gradients are fixed, and the
        passes are waits of --device-ms, as if an accelerator computed; the optimizer and the exchange run on the CPU.
        All ways take turns in each round. The slowest rank counts. Beside them: DDP, torch's ZeroRedundancyOptimizer
        over DDP, and over DDP with fusedcomm's hook. First all ranks' parameters are compared in all bits, and their
        changes with the replicated fp32 optimizer's; fp32 updates must have its bits.
        Columns: median ms; the ratio to the replicated optimizer's median; that of the rounds one by one, least and
        greatest; median ms that threads of all ranks were on cores, which other programs change less; MB that a rank
        sends in a step, in all and to other hosts, by the kernel's counters of the hosts' interfaces, headers included;
        MB by fusedcomm's count; MiB of optimizer state of rank 0.

Needs half a GiB of memory for each rank of loss, and scikit-learn; 3 GiB for each rank of speed; root, ip, tc and
taskset with --hosts. A quarter of an hour for loss on two idle cores, four minutes for each link; two minutes with
--quick.
"""

import argparse
import os
import statistics

import _hosts as hosts
from lib.common import env, run_command, write_document

PARTS = ("loss", "speed")
OPTIMIZERS = ("adamw", "muon")
REPLICATED = "replicated"
MOST_BYTES = 0.01
"""By so much of the two-shot's bytes a ShardedOptimizer of AdamW may send more or less."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="(both)")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS), help="(both)")
    parser.add_argument("--models", nargs="+", default=["transformer", "perceptron"], help="of loss (both)")
    parser.add_argument("--wires", nargs="+", default=["fp32", "int8"], help="of gradients, of loss (fp32 int8)")
    parser.add_argument("--updates", nargs="+", default=["fp32", "bf16", "int8"], help="of loss (fp32 bf16 int8)")
    parser.add_argument("--steps", type=int, default=300, help="of loss (300)")
    parser.add_argument("--seeds", type=int, default=3, help="of loss (3)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank, of loss (4)")
    parser.add_argument("--lr", type=float, default=3e-3, help="of AdamW (3e-3)")
    parser.add_argument("--muon-lr", type=float, default=2e-2, help="of Muon (2e-2)")
    hosts.add_options(parser.add_argument_group("of speed"), "1gbit unlimited")
    parser.add_argument("--width", type=int, default=128, help="of speed's layers (128)")
    parser.add_argument("--depth", type=int, default=51, help="layers of 12 x width x width elements, of speed (51)")
    parser.add_argument("--device-ms", type=float, default=100, help="of both passes of speed, waited for (100)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each way of speed (5)")
    parser.add_argument("--quick", action="store_true", help="few steps, seeds and layers: the figures mean little")
    parser.add_argument("--json", metavar="PATH", help="write the results there as soon as they are known")
    if parser.parse_args().quick:
        parser.set_defaults(steps=10, seeds=1, depth=2, rounds=2, device_ms=10)
    arguments = parser.parse_args()
    hosts.complete(parser, arguments, link=["1gbit", "unlimited"], subnet=None)
    return arguments


# ---- loss


def check_bytes(rows: list[dict]) -> None:
    """Raises RuntimeError if a ShardedOptimizer of AdamW does not send the bytes of the two-shot of its wire."""
    for row in rows:
        wire, kind = row["way"].split()[0], row["way"].split()[-1]
        if row["optimizer"] != "adamw" or wire != kind:
            continue
        of_two_shot = found(rows, {**row, "way": f"{wire} {REPLICATED}"})["sent_nbytes"]
        row["bytes_ratio"] = row["sent_nbytes"] / of_two_shot
        if abs(row["bytes_ratio"] - 1) > MOST_BYTES:
            raise RuntimeError(f"{row['way']}: sends {row['sent_nbytes']} bytes, the two-shot {of_two_shot}")


def found(rows: list[dict], like: dict) -> dict:
    keys = ("model", "optimizer", "way", "seed")
    return next(row for row in rows if all(row[key] == like[key] for key in keys))


def print_losses(rows: list[dict]) -> None:
    print(f"\n{'model':<12} {'':<6} {'way':<18} {'loss':>7} {'bits':>4} {'MB':>7} {'MiB':>6}  difference of each seed")
    for model, kind, way in dict.fromkeys((row["model"], row["optimizer"], row["way"]) for row in rows):
        own = [row for row in rows if (row["model"], row["optimizer"], row["way"]) == (model, kind, way)]
        base = f"{way.split()[0]} {REPLICATED}"
        more = [row["loss"] - found(rows, {**row, "way": base})["loss"] for row in own]
        told = f"seeds {min(r['loss'] for r in own):.4f} to {max(r['loss'] for r in own):.4f}"
        if way != base:
            told = " ".join(f"{each:+.5f}" for each in more)
        bits = "yes" if all(row["bit_equal"] for row in own) else "no"
        sizes = f"{own[0]['sent_nbytes'] * 1e-6:7.3f} {own[0]['state_nbytes'] / (1 << 20):6.2f}"
        loss = statistics.mean(row["loss"] for row in own)
        print(f"{model:<12} {kind:<6} {way:<18} {loss:7.4f} {bits:>4} {sizes}  {told}")


def measure_loss(arguments: argparse.Namespace) -> list[dict]:
    loopback = argparse.Namespace(**{**vars(arguments), "hosts": 0, "ranks_per_host": 2})
    rows = hosts.rows_of_ranks(loopback, "_optimizer_rank.py", "loopback", vars(arguments))
    check_bytes(rows)
    return rows


# ---- speed


def summary(row: dict, baseline: dict) -> dict:
    """What the table has of one way. Times are in seconds."""
    ratios = [ours / theirs for ours, theirs in zip(row["step_s"], baseline["step_s"], strict=True)]
    median_s = statistics.median(row["step_s"])
    return {
        "median_s": median_s,
        "ratio": median_s / statistics.median(baseline["step_s"]),
        "least": min(ratios),
        "most": max(ratios),
        "cores_s": statistics.median(row["cores_s"]),
    }


def print_speed(title: str, rows: list[dict]) -> None:
    columns = ("ms", 8), ("ratio", 6), ("least", 6), ("most", 6), ("cores", 8), ("MB", 7), ("away", 7), ("counted", 8)
    print(f"\n{title}\n{'':<6} {'way':<34} " + " ".join(f"{name:>{width}}" for name, width in columns) + "     MiB")
    for row in rows:
        baseline = next(each for each in rows if each["optimizer"] == row["optimizer"])
        of = summary(row, baseline)
        ratios = " ".join(f"{of[name]:6.3f}" for name in ("ratio", "least", "most"))
        times = f"{1e3 * of['median_s']:8.1f} {ratios} {1e3 * of['cores_s']:8.1f}"
        widths = {"tx_nbytes": 7, "away_nbytes": 7, "sent_nbytes": 8}
        sent = " ".join(
            f"{'–':>{width}}" if row[name] is None else f"{row[name] * 1e-6:{width}.2f}"
            for name, width in widths.items()
        )
        print(f"{row['optimizer']:<6} {row['way']:<34} {times} {sent} {row['state_nbytes'] / (1 << 20):7.2f}")


def main() -> None:
    arguments = parse()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "link")}
    document = {"env": env(), "settings": settings, "load": []}

    def keep() -> None:
        document["load"].append(round(os.getloadavg()[0], 1))
        if arguments.json:
            write_document(arguments.json, document)

    keep()
    with hosts.measuring("optimizer.py", arguments) as (_, links):
        if "loss" in arguments.part:
            document["loss"] = measure_loss(arguments)
            keep()
            print_losses(document["loss"])
        for link in links if "speed" in arguments.part else []:
            given = vars(arguments)
            document.setdefault("speed", {})[link] = hosts.rows_of_ranks(
                arguments, "_optimizer_speed_rank.py", link, given
            )
            keep()
            print_speed(link, document["speed"][link])


if __name__ == "__main__":
    run_command(main)
