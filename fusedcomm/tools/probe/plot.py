"""The probe's picture: the predicted step by the rate of the link, for each wire, with the measured link marked."""

import itertools
from pathlib import Path

from fusedcomm.tools import output
from fusedcomm.tools.probe.choices import OFF, at_rate, link_bytes_s, predict_option
from fusedcomm.tools.probe.run import Findings

# Links on each line.
NUM_RATES = 25
DECADES = 2.0
"""Decades of link rates on each side of the measured link."""


def picture(findings: Findings, path: Path) -> None:
    """Draws the picture to the file `path`. Raises ImportError without matplotlib."""
    plt = output.pyplot()
    workload, cluster = findings.speed.of(findings.workload, findings.cluster)
    cap = findings.recommendation.option.cap_mb
    measured = link_bytes_s(cluster)
    rates = [measured * 10 ** (DECADES * (2 * index / (NUM_RATES - 1) - 1)) for index in range(NUM_RATES)]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colours = {OFF: output.BLACK, **dict(zip(findings.settings.wires, itertools.cycle(output.PALETTE)))}
    for option in findings.options:
        way = option.way
        if option.cap_mb != cap or way.sum != "auto":
            continue
        predicted = [predict_option(workload, at_rate(cluster, rate), way, cap) for rate in rates]
        steps_ms = [option.prediction.step_s * 1e3 for option in predicted]
        colour, style = colours[way.wire], "-" if way.hosts is None else "-."
        axes.plot(
            [8 * rate / 1e9 for rate in rates],
            steps_ms,
            color=colour,
            label=option.name,
            linewidth=2,
            linestyle=style,
        )
        crossover = findings.crossovers.get(option.name)
        if crossover and rates[0] < crossover < rates[-1]:
            axes.axvline(8 * crossover / 1e9, color=colour, linestyle=":", linewidth=1)
    axes.axvline(8 * measured / 1e9, color=output.GREY, linestyle="--", label="measured link")
    for check in findings.checks:
        if check.numel == findings.workload.numel and check.option.cap_mb == cap:
            axes.plot([8 * measured / 1e9], [check.measured_s * 1e3], "kx", markersize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("link, Gbit/s (dotted: the wire pays on slower links)")
    axes.set_ylabel("predicted step, ms (crosses: measured)")
    axes.set_title(f"{findings.workload.numel:,} parameters, buckets of {cap:g} MiB", loc="left")
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    axes.legend(frameon=False)
    output.save_picture(figure, path, dpi=130)
