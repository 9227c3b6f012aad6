"""The demo's picture: the training loss, where it ends, and the bytes that are sent, side by side."""

import itertools
from pathlib import Path

import matplotlib
import numpy as np

from fusedcomm.config import Config
from fusedcomm.tools.demo.results import DEFAULT_NAME, RunResult, Summary
from fusedcomm.tools.output import BLACK, GREY, PALETTE, save_picture

matplotlib.use("Agg")  # draws files only, so no screen is needed
from matplotlib import pyplot as plt  # noqa: E402

USUAL_NAME = f"fusedcomm {Config().wire}"
_SMOOTHING_STEPS = 10  # window of the moving average of losses


def picture(results: list[RunResult], rows: list[Summary], path: Path) -> None:
    """Draws all runs and their summaries to the file `path`. A way has the same color in all three parts."""
    others = [row.name for row in rows if row.name != DEFAULT_NAME]
    colours = {DEFAULT_NAME: BLACK, **dict(zip(others, itertools.cycle(PALETTE), strict=False))}
    figure, (losses, finals, nbytes) = plt.subplots(
        1, 3, figsize=(12.5, 0.9 + 0.36 * max(len(rows), 6)), width_ratios=(4, 3, 4), layout="constrained"
    )
    draw_losses(losses, results, colours)
    draw_finals(finals, rows, colours)
    draw_nbytes(nbytes, rows, colours)
    nbytes.sharey(finals)
    nbytes.tick_params(labelleft=False)
    save_picture(figure, path, dpi=130)


def draw_losses(axes: plt.Axes, results: list[RunResult], colours: dict[str, str]) -> None:
    """Draws the loss by step for each way of synchronizing: DDP's default as a wide line below the others, fusedcomm's
    default wire on top of them."""
    window = min(_SMOOTHING_STEPS, len(results[0].loss_curve))
    steps = np.arange(window, len(results[0].loss_curve) + 1)
    weights = np.full(window, 1 / window)
    curves: dict[str, list[np.ndarray]] = {name: [] for name in colours}
    for result in results:
        curves[result.spec.name].append(np.convolve(result.loss_curve, weights, mode="valid"))
    for name, of_seeds in sorted(curves.items(), key=lambda curve: curve[0] == USUAL_NAME):
        width, alpha = (6, 0.3) if name == DEFAULT_NAME else (1.2, 1)
        axes.plot(steps, np.mean(of_seeds, axis=0), color=colours[name], linewidth=width, alpha=alpha, label=name)
    axes.set(xlabel="step", ylim=(0, None))
    axes.set_title(f"Training loss (mean of {window} steps)", loc="left")
    axes.grid(alpha=0.25, lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def draw_finals(axes: plt.Axes, rows: list[Summary], colours: dict[str, str]) -> None:
    """Draws each way's loss after the last step, a mean with the range of the seeds, beside the range of DDP's default:
    curves that coincide are told apart here."""
    default = next(row.final_loss for row in rows if row.name == DEFAULT_NAME)
    axes.axvspan(default.low, default.high, color=GREY, alpha=0.3, lw=0)
    for place, row in enumerate(rows):
        loss = row.final_loss
        axes.plot([loss.low, loss.high], [place, place], color=colours[row.name], linewidth=2)
        axes.plot([loss.mean], [place], "o", color=colours[row.name])
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.locator_params(axis="x", nbins=4)
    axes.set_xlabel("of the seeds; grey: DDP default")
    axes.set_title("Loss at the end (range)", loc="left")
    axes.grid(alpha=0.25, lw=0.5, axis="x")
    axes.spines[["top", "right"]].set_visible(False)


def draw_nbytes(axes: plt.Axes, rows: list[Summary], colours: dict[str, str]) -> None:
    """Draws a bar for the bytes of each way of synchronizing, or a note if they were not measured."""
    axes.set_title("Sent by each rank, each step", loc="left")
    if any(row.bytes_ratio is None for row in rows):
        axes.text(0.5, 0.5, "not measured on this machine", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    nbytes = [row.wire_bytes_per_step / 1024 for row in rows]
    bars = axes.barh(range(len(rows)), nbytes, color=[colours[row.name] for row in rows], alpha=0.8)
    axes.bar_label(bars, [f"{row.bytes_ratio:.3f}×" for row in rows], padding=4)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.15)
    axes.set_xlabel("KiB over TCP, as the kernel counted")
    axes.spines[["top", "right"]].set_visible(False)
