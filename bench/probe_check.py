"""Is `fusedcomm probe` right? Compares its predicted steps with measured ones over links of several speeds, and its
recommendation with the best choice that was measured.

    python bench/probe_check.py --link 100mbit 1gbit 10gbit unlimited --mix 0 0.5 2

It runs on hosts of bench/hosts.py, or with --hosts 0 on loopback. For each link and mix of compute and communication
the ranks run the probe on a model. In the same processes they run real training steps with DDP's own all-reduce and
with each wire, half of them before the probe and half after it, in turns as in bench/ddp_step.py. --mix is a step's
compute as a multiple of the time that DDP's gradients take at the link's speed (10 Gbit/s if it is unlimited). 0 means
as little compute as possible.

A row is one choice. Its figures are predicted_s; ratio, the predicted step / the measured one; and ratio_at_speed. A
machine's speed may change within minutes if others use it, too. ratio_at_speed therefore has the prediction for cores
that are slower by the same factor as compute alone was beside the measured steps.

In the JSON `cases` has for each link and mix: the greatest and the median error, by both ratios; the recommended and
the best choice; and regret, the measured step of the recommended choice / that of the best one, minus 1. The probe may
recommend every wire of --wires here. "by_default" has the same for the recommendation among the wires that the probe
accepts by default, by its predictions alone.
"""

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import hosts
from lib.common import Report, Row, print_table, run_command, with_ratios
from lib.models import MODELS

WIRES = ("bf16", "int8", "fp8", "int4")
OFF = "off"
FASTEST_BITS_S = 10**10
BYTES_PER_ELEMENT = 4
MIN_PARAMS, MAX_PARAMS = 3e6, 20e6
LINKS = ("100mbit", "1gbit", "10gbit", "unlimited")
STEP_S = 0.3
"""A link's model is chosen so that its gradients take DDP this many seconds, within MIN_PARAMS and MAX_PARAMS."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="hosts to make, which needs root; 0: loopback (2)")
    parser.add_argument("--ranks-per-host", type=int, help="ranks on each host (1; with --hosts 0: 2)")
    parser.add_argument("--link", nargs="+", help=f"speeds of a host's link ({' '.join(LINKS)})")
    parser.add_argument("--subnet", help="a private subnet for the hosts that this machine does not use")
    parser.add_argument("--mix", nargs="+", type=float, default=[0, 0.5, 2], help="compute / communication (0 0.5 2)")
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--params", type=float, help="elements of the model (by the link, 3e6 to 20e6)")
    parser.add_argument("--wires", nargs="+", default=list(WIRES), help=f"wires to compare ({' '.join(WIRES)})")
    parser.add_argument(
        "--caps", type=float, nargs="+", default=[25], help="bucket_cap_mb to compare, which must include 25 (25)"
    )
    parser.add_argument("--seconds", type=float, default=60, help="time of each probe (60)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of measured steps (6)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in each turn (3)")
    parser.add_argument("--timeout", type=float, default=120, help="seconds until a stuck way is given up (120)")
    parser.add_argument("--quick", action="store_true", help="defaults of probes of 10 s, two rounds, mixes 0 and 1")
    parser.add_argument("--json", metavar="PATH", help="write rows there as soon as they are measured")
    if parser.parse_args().quick:
        parser.set_defaults(seconds=10, rounds=2, steps=2, mix=[0, 1])
    arguments = parser.parse_args()
    hosts.complete(parser, arguments, link=LINKS, subnet=None)
    if 25 not in arguments.caps:
        parser.error("--caps must include 25, DDP's own size: every choice is compared with it")
    arguments.optimizer, arguments.size, arguments.batch = "sgd", 1, 1
    return arguments


def settings_of(arguments: argparse.Namespace, link: str, mix: float) -> dict:
    """The ranks' settings: the arguments, the elements of the model, and the milliseconds that it computes."""
    bits_s = min((hosts.parse_link(link) if arguments.hosts else None) or FASTEST_BITS_S, FASTEST_BITS_S)
    params = arguments.params or min(max(STEP_S * bits_s / 8 / BYTES_PER_ELEMENT, MIN_PARAMS), MAX_PARAMS)
    compute_ms = 1e3 * mix * params * BYTES_PER_ELEMENT * 8 / bits_s if mix else None
    return {**vars(arguments), "params": params, "compute_ms": compute_ms}


def run_ranks(arguments: argparse.Namespace, link: str, settings: dict, results: Path) -> int:
    worker = [str(Path(__file__).with_name("_probe_check_rank.py")), str(results), json.dumps(settings)]
    return hosts.run_ranks(arguments, worker, link, arguments.subnet)


def measure(arguments: argparse.Namespace, link: str, mix: float, report: Report) -> None:
    case = f"{link}/mix {mix:g}"
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        status = run_ranks(arguments, link, settings_of(arguments, link, mix), results)
        found = json.loads(results.read_text()) if results.exists() else {"rows": [], "not_measured": []}
    rows = [Row(**{**row, "case": case}) for row in found["rows"]]
    report.not_measured += [{**entry, "case": case} for entry in found["not_measured"]]
    rows = with_ratios(rows, [f"{OFF} 25"])
    report.extra.setdefault("cases", {})[case] = {**found.get("case", {}), **verdict(rows, found)}
    report.add(rows)
    if status:
        report.missing(case, "all" if not rows else "the rest", f"the ranks ended with exit status {status}")


def verdict(rows: list[Row], found: dict) -> dict:
    """How good the predictions of one case are; empty if the recommended choice was not measured."""
    measured = {row.impl: row.median_s for row in rows}
    if found.get("recommended") not in measured:
        return {}
    errors, at_speed, unfitted = (
        [abs(row.figures[name] - 1) for row in rows] for name in ("ratio", "ratio_at_speed", "unfitted_ratio")
    )
    by_default = found["by_default"]
    return {
        "max_error": max(errors),
        "median_error": statistics.median(errors),
        "max_error_at_speed": max(at_speed),
        "median_error_at_speed": statistics.median(at_speed),
        "max_error_unfitted": max(unfitted),
        "median_error_unfitted": statistics.median(unfitted),
        **recommendation(measured, found["recommended"]),
        "by_default": recommendation(
            {name: measured[name] for name in by_default["among"] if name in measured}, by_default["recommended"]
        ),
    }


def recommendation(measured: dict[str, float], recommended: str) -> dict:
    """The recommended choice beside the best of `measured` (seconds by name). Regret is NaN if it was not measured."""
    best = min(measured, key=measured.get)
    regret = measured[recommended] / measured[best] - 1 if recommended in measured else math.nan
    return {"recommended": recommended, "best": best, "regret": regret}


def print_verdicts(report: Report) -> None:
    width = max((len(row.impl) for row in report.rows), default=4)
    case = None
    for row in report.rows:
        if row.case != case:
            case = row.case
            found = report.extra["cases"][case]
            print(
                f"\n{case}: {row.numel:,} parameters, compute {found.get('compute_s', 0) * 1e3:.1f} ms in the "
                f"probe, {found.get('compute_alone_s', 0) * 1e3:.1f} ms beside the steps"
            )
        predicted_ms, measured_ms = row.figures["predicted_s"] * 1e3, row.median_s * 1e3
        print(
            f"  {row.impl:<{width}} predicted {predicted_ms:9.1f} ms, measured {measured_ms:9.1f} ms: "
            f"{row.figures['ratio'] - 1:+.1%} ({row.figures['ratio_at_speed'] - 1:+.1%} at the machine's speed then)"
        )
    print()
    for case, found in report.extra.get("cases", {}).items():
        if "regret" in found:
            print(
                f"{case}: error at most {found['max_error']:.1%}, median {found['median_error']:.1%}; at the "
                f"machine's speed then {found['max_error_at_speed']:.1%}, {found['median_error_at_speed']:.1%}; "
                f"without the factors {found['max_error_unfitted']:.1%}, {found['median_error_unfitted']:.1%}; "
                f"recommended {found['recommended']}, best {found['best']}, regret {found['regret']:.1%}; of the wires "
                f"accepted by default {found['by_default']['recommended']}, best {found['by_default']['best']}, regret "
                f"{found['by_default']['regret']:.1%}"
            )


def main() -> None:
    arguments = parse()
    with hosts.measuring("probe_check.py", arguments) as (report, links):
        for link, mix in [(link, mix) for link in links for mix in arguments.mix]:
            measure(arguments, link, mix, report)
    print_table(report.rows)
    print_verdicts(report)
    report.finish()


if __name__ == "__main__":
    run_command(main)
