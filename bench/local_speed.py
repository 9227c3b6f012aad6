"""How fast are local steps, beside the same training without any communication?

    python bench/local_speed.py --hosts 2 --link 20mbit 100mbit       # hosts with limited links, needs root
    python bench/local_speed.py                                       # two ranks over loopback
    python bench/local_speed.py --ranks-per-host 3 --window 3s --device-ms 100       # ranks of unequal speed

The ranks train a character transformer by turns without communication and with LocalSteps, some steps each, so that
what else the machine does meets both. LocalSteps' steps are whole windows of H: the messages that begin in them also
end in them, their waits included. The delay is the least that hides a message, by the plan, if that is below H.

With --device-ms the passes are waits of that length, as if an accelerator computed them: then neither cores that hosts
share nor other programs change them much. The optimizer's steps and the merges are on the CPU as before.

    H, wire    steps from merge to merge, and what a merge sends
    delay      steps that a message may travel
    line       time of a window's bytes on the line, as a part of the time of its H steps without communication
    bound      the most that can be: 1 if the line carries a message within its delay, else what waiting for it leaves
    speed      steps a second, as a part of those without communication: median of the rounds, least and greatest
    ms         of a step without communication: median
    waited     ms of a step, that it waited for messages: mean

With --window the last rank sleeps --slow times as long in each step. Each rank's speed in windows of time is compared
with its own without communication, and the loss with that of equal windows: in the same time, which the slowest rank
sets, and after as many steps of all ranks together.

Each rank's time counts, and the slowest rank's is taken. Needs scikit-learn, half a GiB of memory for each rank; root,
ip, tc and taskset with --hosts. Ten minutes for each link on an idle machine; one minute with --quick.
"""

import argparse
import statistics

import _hosts as hosts
from lib.common import env, run_command, write_document


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hosts.add_options(parser, "20mbit 100mbit")
    parser.add_argument("--every", nargs="+", type=int, default=[5, 10, 30, 100], help="(5 10 30 100)")
    parser.add_argument("--wires", nargs="+", default=["int4", "fp32"], help="(int4 fp32)")
    parser.add_argument("--steps", type=int, default=30, help="least steps of a turn (30)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (5)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank (8)")
    parser.add_argument("--width", type=int, default=128, help="of the transformer (128)")
    parser.add_argument("--depth", type=int, default=4, help="its blocks (4)")
    parser.add_argument("--device-ms", type=float, default=0, help="of both passes, waited for; 0: computed (0)")
    parser.add_argument("--window", metavar="TIME", help="measure windows of this time instead, as 3s")
    parser.add_argument("--slow", type=float, default=3, help="how many times as long the last rank sleeps then (3)")
    parser.add_argument("--turn-s", type=float, default=20, help="seconds of a turn then (20)")
    parser.add_argument("--quick", action="store_true", help="H = 5, two rounds of ten steps")
    parser.add_argument("--json", metavar="PATH", help="write the times there")
    arguments = parser.parse_args()
    hosts.complete(parser, arguments, link=["20mbit", "100mbit"], subnet=None)
    if arguments.window and not arguments.device_ms:
        parser.error("--window needs --device-ms, which ranks sleep in a step")
    if arguments.quick:
        arguments.every, arguments.steps, arguments.rounds = [5], 10, 2
    return arguments


def measure(arguments: argparse.Namespace, link: str) -> list[dict]:
    bits_s = hosts.parse_link(link) if arguments.hosts else None
    return hosts.rows_of_ranks(arguments, "_local_speed_rank.py", link, {**vars(arguments), "bits_s": bits_s})


def summary(row: dict) -> dict:
    """What the table has of one way. Times are in seconds."""
    ratios = [alone / ours for alone, ours in zip(row["alone_s"], row["local_s"], strict=True)]
    step_s = statistics.median(row["alone_s"]) / row["steps"]
    line = row["line_s"] / (row["every"] * step_s)
    return {
        "line": line,
        "bound": 1 / (1 + max(0.0, line - row["delay"] / row["every"])),
        "speed": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "step_s": step_s,
        "waited_s": row["waited_s"] / (row["steps"] * len(ratios)),
    }


def print_rows(link: str, rows: list[dict]) -> None:
    columns = ("H", "wire", "delay", "line", "bound", "speed", "least", "most", "ms", "waited")
    print(f"\n{link}\n" + " ".join(f"{name:>7}" for name in columns))
    for row in rows:
        found = summary(row)
        shares = " ".join(f"{found[name]:7.3f}" for name in ("line", "bound", "speed", "least", "most"))
        times = f"{1e3 * found['step_s']:7.1f} {1e3 * found['waited_s']:7.2f}"
        print(f"{row['every']:7} {row['wire']:>7} {row['delay']:7} {shares} {times}")


def print_windows(row: dict) -> None:
    for rank, (speed, steps, waited) in enumerate(zip(row["speed"], row["steps"], row["waited_s"], strict=True)):
        print(f"rank {rank}: {speed:.3f} of its speed alone, {steps} steps, waited {waited:.2f} s")
    print(
        f"{row['merges']} merges; loss {row['loss']:.4f}; equal windows of {row['every']} steps: "
        f"{row['equal_loss_in_time']:.4f} in the same time, {row['equal_loss_in_steps']:.4f} after as many steps"
    )


def main() -> None:
    arguments = parse()
    found = {}
    with hosts.measuring("local_speed.py", arguments) as (_, links):
        for link in links:
            found[link] = measure(arguments, link)
            if arguments.json:
                settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "link")}
                write_document(arguments.json, {"env": env(), "settings": settings, "runs": found})
            if arguments.window:
                for row in found[link]:
                    print_windows(row)
            else:
                print_rows(link, found[link])


if __name__ == "__main__":
    run_command(main)
