"""Draws a step of DDP and one of fusedcomm on the same axis of time: what the backward pass hides of communication.

    python bench/timeline.py --hosts 2 --link 500mbit      # trains, takes both traces, and draws; hosts need root
    python bench/timeline.py --traces ddp.json ours.json   # draws traces that were taken before

Of DDP it takes a trace of torch.profiler, of fusedcomm one of comm.trace, both of rank 0 and in one run. Drawn is the
step of median length among --steps, and the times in its title are those of its bars. Taking a trace takes time, of
torch.profiler more; medians of as many steps without a trace are printed beside.

A bucket's bar ends when its mean is there. Of fusedcomm it begins when DDP hands the bucket over; of DDP when the
backend begins the all-reduce, because torch.profiler does not show how long a bucket waits before that. Buckets that
are under way at the same time are in several rows.

Needs matplotlib, and 1 GiB of memory for each rank; root, ip, tc and taskset with --hosts. A minute.
"""

import argparse
import json
import re
from pathlib import Path
from typing import NamedTuple

import hosts
from lib.common import REPOSITORY, run_command
from lib.models import MODELS
from lib.namespaces import CONGESTION, NetworkError, problem

from fusedcomm.trace.document import ABOUT, lanes

OUT = REPOSITORY / "out"
COLORS = {
    "forward": "#4477aa",
    "backward": "#66ccee",
    "wait": "#ee6677",
    "optimizer": "#ccbb44",
    "bucket": "#228833",
    "codec": "#aa3377",
}
NAMES = {
    "wait": "wait for buckets",
    "bucket": "bucket under way",
    "codec": "pack, reduce, unpack (other threads)",
}
CODEC = ("pack", "local reduce", "reduce", "unpack")


class Bar(NamedTuple):
    kind: str
    """One of COLORS."""
    begin_ms: float
    end_ms: float


class Step(NamedTuple):
    name: str
    bars: list[Bar]
    """Times since the step began."""
    untraced_ms: float | None = None
    """The median step without a trace in the same run; None: the trace does not say."""

    @property
    def length_ms(self) -> float:
        return max(bar.end_ms for bar in self.bars)

    @property
    def title(self) -> str:
        """The way, and the times of the bars. Never empty."""
        waited_ms = sum(bar.end_ms - bar.begin_ms for bar in self.bars if bar.kind == "wait")
        return f"{self.name}: {self.length_ms:.0f} ms a step, of which it waits for buckets {waited_ms:.0f} ms"


# ---- reading traces


def read_step(path: Path) -> Step:
    """The step of median length in a trace of comm.trace or of torch.profiler."""
    document = json.loads(path.read_text())
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    is_ours = ABOUT in document.get("otherData", {})
    bars = ours(events) if is_ours else profiled(events)
    steps = split(bars)
    if not steps:
        raise SystemExit(f"timeline.py: {path} has no whole step: a forward pass, a bucket and an optimizer's step")
    steps.sort(key=lambda step: max(bar.end_ms for bar in step))
    name = document.get("name", "fusedcomm" if is_ours else "DDP")
    return Step(name, steps[len(steps) // 2], document.get("untraced_ms"))


def bar_of(kind: str, event: dict) -> Bar:
    return Bar(kind, event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)


def ours(events: list[dict]) -> list[Bar]:
    kinds = {**dict.fromkeys(CODEC, "codec"), **{kind: kind for kind in COLORS if kind != "codec"}}
    return [bar_of(kinds[e["args"]["stage"]], e) for e in events if e["args"]["stage"] in kinds]


def profiled(events: list[dict]) -> list[Bar]:
    """Of a trace of DDP without a hook. Its backward pass lasts as long as autograd evaluates functions, and the step
    then waits for the last bucket."""
    bars = [bar_of("forward", e) for e in events if e["name"] == "DistributedDataParallel.forward"]
    bars += [bar_of("optimizer", e) for e in events if e["name"].startswith("Optimizer.step#")]
    bars += [bar_of("bucket", e) for e in events if e["name"].endswith(":all_reduce")]
    evaluated = [bar_of("backward", e) for e in events if e["name"].startswith("autograd::engine::evaluate_function")]
    forwards = sorted(bar.end_ms for bar in bars if bar.kind == "forward")
    for begin, end in zip(forwards, [*forwards[1:], float("inf")], strict=True):
        backward = [bar for bar in evaluated if begin <= bar.begin_ms < end]
        buckets = [bar for bar in bars if bar.kind == "bucket" and begin <= bar.begin_ms < end]
        if backward and buckets:
            computed = max(bar.end_ms for bar in backward)
            bars.append(Bar("backward", min(bar.begin_ms for bar in backward), computed))
            bars.append(Bar("wait", computed, max(computed, *(bar.end_ms for bar in buckets))))
    return bars


def split(bars: list[Bar]) -> list[list[Bar]]:
    """The bars of each whole step, which begins with a forward pass and ends with the optimizer."""
    begins = sorted(bar.begin_ms for bar in bars if bar.kind == "forward")
    steps = []
    for begin, end in zip(begins, [*begins[1:], float("inf")], strict=True):
        step = [bar for bar in bars if begin <= bar.begin_ms < end]
        if {"forward", "backward", "bucket", "optimizer"} <= {bar.kind for bar in step}:
            steps.append([Bar(bar.kind, bar.begin_ms - begin, bar.end_ms - begin) for bar in step])
    return steps


# ---- drawing


def rows_of(step: Step) -> list[tuple[str, list[Bar]]]:
    """(label, bars) of each row, from top to bottom. The label is empty in further rows of one kind."""
    model = [bar for bar in step.bars if bar.kind not in ("bucket", "codec")]
    buckets = [{"ts": b.begin_ms, "dur": b.end_ms - b.begin_ms, "bar": b} for b in step.bars if b.kind == "bucket"]
    rows = [("model", model)]
    rows += [("" if index else "buckets", [e["bar"] for e in lane]) for index, lane in enumerate(lanes(buckets))]
    codec = [bar for bar in step.bars if bar.kind == "codec"]
    return rows + ([("codec", codec)] if codec else [])


def plot(steps: list[Step], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = [rows_of(step) for step in steps]
    heights = [len(of_step) for of_step in rows]
    figure, axes = pyplot.subplots(
        len(steps),
        1,
        sharex=True,
        figsize=(8, 2.2 + 0.28 * sum(heights)),  # inches: its text can be read where it is 800 pixels wide
        height_ratios=heights,
        layout="constrained",
    )
    for axis, step, of_step in zip(axes, steps, rows, strict=True):
        for index, (_, bars) in enumerate(of_step):
            for bar in bars:
                length = bar.end_ms - bar.begin_ms
                edge = 0.0 if bar.kind == "codec" else 0.8  # would hide the short bars of the codec
                axis.barh(index, length, 0.8, bar.begin_ms, color=COLORS[bar.kind], edgecolor="white", linewidth=edge)
        axis.set_yticks(range(len(of_step)), [label for label, _ in of_step])
        axis.tick_params(axis="y", length=0)
        axis.set_ylim(len(of_step) - 0.4, -0.6)
        axis.set_title(step.title, loc="left", fontsize=11)
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[-1].set_xlim(0, 1.01 * max(step.length_ms for step in steps))
    axes[-1].set_xlabel("ms since the step began")
    patches = [Patch(color=color, label=NAMES.get(kind, kind)) for kind, color in COLORS.items()]
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# ---- the command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", nargs=2, type=Path, metavar=("DDP", "OURS"), help="draw these, and train nothing")
    parser.add_argument("--hosts", type=int, default=0, help="hosts to make, which needs root; 0: loopback (0)")
    parser.add_argument("--ranks-per-host", type=int, help="ranks on each host (1; with --hosts 0: 2)")
    parser.add_argument("--link", help="speed of a host's link, each way (500mbit)")
    parser.add_argument("--model", choices=MODELS, default="transformer")
    parser.add_argument("--params", type=float, default=8e6, help="elements of the model (8e6)")
    parser.add_argument("--size", type=int, default=32, help="sequence length, or side of an image (32)")
    parser.add_argument("--batch", type=int, default=1, help="samples of each rank (1)")
    parser.add_argument("--bucket-cap-mb", type=float, default=4, help="most MiB of a bucket (4)")
    parser.add_argument("--wire", default="int8", help="fusedcomm's wire (int8)")
    parser.add_argument("--steps", type=int, default=11, help="steps in each trace (11)")
    parser.add_argument("--quick", action="store_true", help="defaults of 1e6 parameters and three steps")
    parser.add_argument("--plot", type=Path, default=OUT / "timeline.png", help="(out/timeline.png)")
    if parser.parse_args().quick:
        parser.set_defaults(params=1e6, steps=3)
    arguments = parser.parse_args()
    if arguments.traces:
        given = {name for name, value in vars(arguments).items() if value != parser.get_default(name)}
        for name in sorted(given - {"traces", "plot"}):
            parser.error(f"--{name.replace('_', '-')} is for training, and --traces draws what was recorded before")
    hosts.complete(parser, arguments, link="500mbit")
    return arguments


def record(arguments: argparse.Namespace) -> tuple[Path, Path]:
    """Trains and returns the files with the two traces, which lie beside the plot."""
    reason = problem() if arguments.hosts else None
    if reason:
        raise SystemExit(f"timeline.py: {reason}; --hosts 0 uses loopback, as any user")
    of_ddp, of_fusedcomm = (arguments.plot.resolve().parent / f"timeline-{name}.json" for name in ("ddp", "fusedcomm"))
    of_ddp.parent.mkdir(parents=True, exist_ok=True)
    options = {**vars(arguments), "of_ddp": str(of_ddp), "of_fusedcomm": str(of_fusedcomm)}
    worker = [str(Path(__file__).with_name("_timeline_rank.py")), json.dumps(options, default=str)]
    try:
        status = hosts.run_ranks(arguments, worker, arguments.link, None, CONGESTION)
    except NetworkError as error:
        raise SystemExit(f"timeline.py: {error}") from None
    if status:
        raise SystemExit(f"timeline.py: the ranks ended with exit status {status}")
    return of_ddp, of_fusedcomm


def title_of(arguments: argparse.Namespace) -> str:
    ranks = max(arguments.hosts, 1) * arguments.ranks_per_host
    speed = re.sub(r"^([\d.]+)(.)bit$", lambda found: f"{found[1]} {found[2].upper()}bit/s", arguments.link or "")
    where = f"{arguments.hosts} hosts, {speed} each" if arguments.hosts else "loopback"
    return f"{arguments.model} of {arguments.params / 1e6:g} M parameters, {ranks} ranks, {where}"


def main() -> None:
    arguments = parse()
    steps = [read_step(path) for path in arguments.traces or record(arguments)]
    plot(steps, "rank 0" if arguments.traces else title_of(arguments), arguments.plot)
    for step in steps:
        print(step.title + ("" if step.untraced_ms is None else f" ({step.untraced_ms:.0f} ms without a trace)"))
    print(f"drawn in {arguments.plot}")


if __name__ == "__main__":
    run_command(main)
