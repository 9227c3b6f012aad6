"""Draws the charts in docs/pictures/ from the JSON in bench/results/. The diagrams there are drawn by hand.

python bench/_pictures.py
"""

import json
from collections.abc import Sequence
from pathlib import Path

import _steps_report
import matplotlib
from _steps_report import DEFAULT, TUNED, Result
from lib.common import REPOSITORY

matplotlib.use("Agg")  # draws files only, so no screen is needed
from matplotlib import pyplot as plt  # noqa: E402

FOLDER = REPOSITORY / "docs" / "pictures"
RESULTS = REPOSITORY / "bench" / "results"
# Okabe and Ito's colors, which color-blind readers can tell apart.
GREY, ORANGE, SKY, GREEN, BLUE, RED, PURPLE = (
    *("#8a8a8a", "#e69f00", "#56b4e9", "#009e73"),
    *("#0072b2", "#d55e00", "#cc79a7"),
)
STOCK = "torch's best 16-bit hook"
SERIES = {
    STOCK: ("", GREY),
    "fusedcomm bf16": ("fusedcomm bf16", BLUE),
    "fusedcomm int8": ("fusedcomm int8", GREEN),
    "fusedcomm int4": ("fusedcomm int4", ORANGE),
    "fusedcomm auto": ('fusedcomm "auto"', PURPLE),
}
"""The ways of the chart of speed-ups: label and color. The best hook is another way in each case."""
SPEED_UP_CASES = {
    ("2-hosts-100mbit", "transformer/100mbit"): "bytes only\n2 hosts\n100 Mbit/s",
    ("2-hosts-1gbit", "transformer/1gbit"): "bytes only\n2 hosts\n1 Gbit/s",
    ("4-hosts-1gbit", "transformer/1gbit"): "bytes only\n4 hosts\n1 Gbit/s",
    ("2-hosts-fast", "transformer/10gbit"): "bytes only\n2 hosts\n10 Gbit/s",
    ("2-hosts-resnet", "resnet/1gbit"): "residual network\n2 hosts\n1 Gbit/s",
    ("2-hosts-compute", "transformer/1gbit"): "computing\n2 hosts\n1 Gbit/s",
    ("2-hosts-waiting", "waiting/1gbit"): "accelerator\n2 hosts\n1 Gbit/s",
    ("2-hosts-hidden", "waiting/10gbit"): "hidden\n2 hosts\n10 Gbit/s",
}


def step(result: Result, path: Path) -> None:
    """Steps of one case as bars: computing alone, and what a step takes beyond it."""
    hook = _steps_report.best_hook(result)
    default = DEFAULT if DEFAULT in result.rows else TUNED
    ways = {default: "DDP", hook: f"torch's {hook.split(maxsplit=1)[1]}"}
    ways.update({f"fusedcomm {wire}": f"fusedcomm {wire}" for wire in ("bf16", "int8", "int4")})
    ways = {way: label for way, label in ways.items() if way in result.rows}
    compute_ms = result.compute_s * 1e3
    steps_ms = [result.rows[way]["median_s"] * 1e3 for way in ways]
    figure, axes = plt.subplots(figsize=(8, 0.45 * len(ways) + 1.5), layout="constrained")
    places = range(len(ways))
    axes.barh(places, [compute_ms] * len(ways), color=GREY, label="computing")
    exposed_ms = [ms - compute_ms for ms in steps_ms]
    axes.barh(places, exposed_ms, left=compute_ms, color=ORANGE, label="waiting for communication")
    for place, ms in zip(places, steps_ms, strict=True):
        axes.text(ms + max(steps_ms) * 0.01, place, f"{ms:.0f} ms", va="center")
    axes.set_yticks(places, ways.values())
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds of a training step (median)", xlim=(0, 1.12 * max(steps_ms)))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    _save(figure, path)


def speed_ups(results: Sequence[Result], labels: Sequence[str], path: Path) -> None:
    """A group of bars for each result: how many times as fast as DDP its ways are."""
    figure, axes = plt.subplots(figsize=(11, 4.6), layout="constrained")
    width = 0.84 / len(SERIES)
    for index, (way, (label, color)) in enumerate(SERIES.items()):
        found = [result.speed_up(way if label else _steps_report.best_hook(result)) for result in results]
        drawn = [(place + (index - 2) * width, value) for place, value in enumerate(found) if value is not None]
        bars = axes.bar([x for x, _ in drawn], [y for _, y in drawn], width, color=color, label=label or way)
        axes.bar_label(bars, fmt="{:.1f}", fontsize=7, padding=1)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(results)), labels, fontsize=9)
    axes.set_ylabel("times as fast as DDP, default or tuned")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(SERIES), frameon=False)
    _save(figure, path)


def codec(document: dict, path: Path) -> None:
    """Rates of the codec's stages beside a memcpy's, for the largest bucket that was measured."""
    rows = sorted((row for row in document["rows"] if "memcpy" in row["ratios"]), key=lambda row: row["numel"])
    rates = {(row["case"], row["impl"]): row["ratios"]["memcpy"] for row in rows}  # of several sizes the largest
    cases = [f"{stage}/{wire}" for stage in ("pack", "reduce", "unpack") for wire in ("bf16", "int8", "int4")]
    impls = {
        "fusedcomm": ("fusedcomm", GREEN),
        "torch.compile": ("torch.compile", SKY),
        "torch": ("torch, eager", GREY),
    }
    figure, axes = plt.subplots(figsize=(9, 3.8), layout="constrained")
    for index, (impl, (label, color)) in enumerate(impls.items()):
        drawn = [(place, rates[case, impl]) for place, case in enumerate(cases) if (case, impl) in rates]
        axes.bar([x + (index - 1) * 0.27 for x, _ in drawn], [y for _, y in drawn], 0.27, color=color, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), [case.replace("/", "\n") for case in cases])
    axes.set_ylabel("of a memcpy's rate")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    _save(figure, path)


def errors(rows: Sequence[dict], path: Path) -> None:
    """The error by the number of ranks, for three kinds of gradients."""
    kinds = {
        "recorded": "recorded",
        "gaussian, common part": "random, with a common part",
        "student t, 2 degrees": "random, heavy tails",
    }
    ways = {
        "bf16 ring": ("bf16, added in a ring", GREY),
        "bf16": ("bf16", BLUE),
        "int8": ("int8", GREEN),
        "fp8": ("fp8", RED),
        "int4": ("int4", ORANGE),
    }
    figure, all_axes = plt.subplots(1, len(kinds), figsize=(10, 4.2), sharey=True, layout="constrained")
    for axes, (kind, title) in zip(all_axes, kinds.items(), strict=True):
        own = [row for row in rows if row["gradients"] == kind]
        for way, (label, color) in ways.items():
            points = [(row["ranks"], row["vnmse"] ** 0.5) for row in own if row["way"] == way]
            style = "--" if way.endswith("ring") else "-"
            axes.plot(*zip(*points, strict=True), style, color=color, marker=".", label=label)
        axes.set(yscale="log", xlabel="ranks", title=title)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter(lambda error, place: f"{100 * error:g}%")
        axes.grid(alpha=0.25, lw=0.5)
    all_axes[0].set_ylabel("relative error of the mean")
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    _save(figure, path)


def training(summary: Sequence[dict], path: Path) -> None:
    """How much higher each seed's final loss is than the exact run's of the same seed."""
    ways = ["fp32, ranks added in reverse", "bf16", "int8", "fp8", "int4", "int4, feedback"]
    models = {"digits": "digits (SGD)", "characters": "transformer on characters (AdamW)"}
    figure, all_axes = plt.subplots(1, len(models), figsize=(10, 3.2), sharey=True, layout="constrained")
    for axes, (model, title) in zip(all_axes, models.items(), strict=True):
        rows = {row["way"]: row for row in summary if row["model"] == model}
        exact = rows["fp32"]["loss"]
        spread = max(exact) - min(exact)
        axes.axvspan(-spread, spread, color=GREY, alpha=0.15, lw=0, label="how far fp32's own seeds are apart")
        for place, way in enumerate(ways):
            differences = rows[way]["loss_difference"]
            label = "a seed: final loss less fp32's" if place == 0 else None
            axes.plot(differences, [place] * len(differences), "o", color=BLUE, alpha=0.7, label=label)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(ways)), ["fp32, other order", *ways[1:]])
        axes.set(xlabel="final loss less fp32's", title=title, ylim=(-0.5, len(ways) - 0.5))
        axes.locator_params(axis="x", nbins=5)
        axes.grid(alpha=0.25, lw=0.5, axis="x")
    all_axes[0].invert_yaxis()
    figure.legend(*all_axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    _save(figure, path)


def _save(figure, path: Path) -> None:
    figure.savefig(path, dpi=100, bbox_inches="tight", pad_inches=0.1)
    plt.close(figure)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    results = _steps_report.load(list(RESULTS.glob(f"{_steps_report.PREFIX}*.json")))
    by_key = {(result.name, result.case): result for result in results}
    step(by_key[_steps_report.TYPICAL], FOLDER / "step.png")
    speed_ups([by_key[key] for key in SPEED_UP_CASES], list(SPEED_UP_CASES.values()), FOLDER / "speed-ups.png")
    codec(json.loads((RESULTS / "cpu-codec.json").read_text()), FOLDER / "codec.png")
    accuracy = json.loads((RESULTS / "accuracy.json").read_text())
    errors(accuracy["error_by_ranks"], FOLDER / "error-by-ranks.png")
    training(accuracy["training_summary"], FOLDER / "training.png")


if __name__ == "__main__":
    main()
