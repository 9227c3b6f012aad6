"""The demo's picture: the training loss and the bytes that are sent, side by side."""

import itertools
from pathlib import Path

import matplotlib
import numpy as np

from fusedcomm.tools.demo.results import DEFAULT_NAME, RunResult, Summary
from fusedcomm.tools.output import BLACK, GREY, PALETTE, save_picture

matplotlib.use("Agg")  # draws files only, so no screen is needed
from matplotlib import pyplot as plt  # noqa: E402

_SMOOTHING_STEPS = 10  # window of the moving average of losses
_DASH = 4  # length of a dash, in line widths


def picture(results: list[RunResult], rows: list[Summary], path: Path) -> None:
    """Draws all runs and their summaries to the file `path`."""
    others = [row.name for row in rows if row.name != DEFAULT_NAME]
    colours = {DEFAULT_NAME: BLACK, **dict(zip(others, itertools.cycle(PALETTE), strict=False))}
    figure, (losses, nbytes) = plt.subplots(1, 2, figsize=(12.5, 4.8), width_ratios=(3, 2), layout="constrained")
    draw_losses(losses, results, colours)
    draw_nbytes(nbytes, rows, colours)
    save_picture(figure, path, dpi=130)


def draw_losses(axes: plt.Axes, results: list[RunResult], colours: dict[str, str]) -> None:
    """Draws the loss by step for each way of synchronizing, and the range of DDP's default over the seeds."""
    window = min(_SMOOTHING_STEPS, len(results[0].loss_curve))
    steps = np.arange(window, len(results[0].loss_curve) + 1)
    weights = np.full(window, 1 / window)
    curves: dict[str, list[np.ndarray]] = {name: [] for name in colours}
    for result in results:
        curves[result.spec.name].append(np.convolve(result.loss_curve, weights, mode="valid"))
    # Losses span decades, so their logarithms are averaged.
    means = {name: np.exp(np.log(of_seeds).mean(axis=0)) for name, of_seeds in curves.items()}

    default = np.stack(curves[DEFAULT_NAME])
    if len(default) > 1:
        band = f"{DEFAULT_NAME}, {len(default)} seeds"
        axes.fill_between(steps, default.min(axis=0), default.max(axis=0), color=GREY, alpha=0.3, lw=0, label=band)
    axes.plot(steps, means.pop(DEFAULT_NAME), color=BLACK, linewidth=4, alpha=0.4, label=DEFAULT_NAME)
    for index, (name, curve) in enumerate(means.items()):
        axes.plot(steps, curve, color=colours[name], linewidth=0.8, alpha=0.6)
        # The dashes of each line lie in the gaps of the others, so lines that coincide are all visible.
        dashes = (_DASH * index, (_DASH, _DASH * (len(means) - 1)))
        axes.plot(steps, curve, color=colours[name], linewidth=2, linestyle=dashes)
        axes.plot([], [], color=colours[name], linewidth=2, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(f"training loss, log scale\n(mean of {window} steps and of the seeds)")
    axes.set_title("What the model learns (where lines coincide, their colors alternate)", loc="left")
    axes.grid(alpha=0.25, which="both", lw=0.5)
    axes.legend(frameon=False)


def draw_nbytes(axes: plt.Axes, rows: list[Summary], colours: dict[str, str]) -> None:
    """Draws a bar for the bytes of each way of synchronizing, or a note if they were not measured."""
    axes.set_title("What it sends: each rank, each step, over TCP", loc="left")
    if any(row.bytes_ratio is None for row in rows):
        axes.text(0.5, 0.5, "not measured on this machine", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    nbytes = [row.wire_bytes_per_step / 1024 for row in rows]
    bars = axes.barh([row.name for row in rows], nbytes, color=[colours[row.name] for row in rows], alpha=0.8)
    axes.bar_label(bars, [f"{row.bytes_ratio:.3f}×" for row in rows], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, axes.get_xlim()[1] * 1.12)
    axes.set_xlabel("KiB a step, as the kernel counted")
    axes.spines[["top", "right"]].set_visible(False)
