"""The probe's picture: the predicted step by the rate of the link, for each way, with the measured link marked."""

import itertools
from pathlib import Path

from fusedcomm.tools import output
from fusedcomm.tools.probe.choices import OFF, Option, at_rate, link_bytes_s, predict_option
from fusedcomm.tools.probe.run import Findings

# Links on each line.
NUM_RATES = 25
DECADES = 2.0
"""Decades of link rates on each side of the measured link."""
_BITS = 8e-9
"""Gbit/s of a byte a second."""


def drawn(findings: Findings) -> list[Option]:
    """The options that have a line: the recommended one last, so that it is on top, and each wire with its own sum, all
    with the same buckets."""
    chosen = findings.recommendation.option
    others = [o for o in findings.options if o.cap_mb == chosen.cap_mb and o.way.sum == "auto" and o.way != chosen.way]
    return [*others, chosen]


def picture(findings: Findings, path: Path) -> None:
    """Draws the picture to the file `path`. Raises ImportError without matplotlib."""
    plt = output.pyplot()
    workload, cluster = findings.speed.of(findings.workload, findings.cluster)
    chosen = findings.recommendation.option
    cap = chosen.cap_mb
    measured = link_bytes_s(cluster)
    rates = [measured * 10 ** (DECADES * (2 * index / (NUM_RATES - 1) - 1)) for index in range(NUM_RATES)]
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    colours = {OFF: output.BLACK, **dict(zip(findings.settings.wires, itertools.cycle(output.PALETTE)))}
    for option in drawn(findings):
        predicted = [predict_option(workload, at_rate(cluster, rate), option.way, cap) for rate in rates]
        is_chosen = option.way == chosen.way
        axes.plot(
            [_BITS * rate for rate in rates],
            [1e3 * option.prediction.step_s for option in predicted],
            color=colours[option.wire],
            label=f"{option.name} (recommended)" if is_chosen else option.name,
            linewidth=3 if is_chosen else 1.5,
            linestyle="-" if option.way.hosts is None else "-.",
        )
    crossover = findings.crossovers.get(chosen.name)
    if crossover and rates[0] < crossover < rates[-1]:
        label = f"{chosen.name} pays up to {_BITS * crossover:.2g} Gbit/s"
        axes.axvline(_BITS * crossover, color=colours[chosen.wire], linestyle=":", label=label)
    axes.axvline(
        _BITS * measured, color=output.GREY, linestyle="--", label=f"measured link, {_BITS * measured:.2g} Gbit/s"
    )
    for check in findings.checks:
        if check.numel == findings.workload.numel and check.option.cap_mb == cap:
            label = f"{check.option.name} measured, {1e3 * check.measured_s:.1f} ms"
            place = [_BITS * measured], [1e3 * check.measured_s]
            axes.plot(*place, "x", color=colours[check.option.wire], markersize=9, markeredgewidth=2, label=label)
    axes.set(xscale="log", yscale="log", xlabel="link, Gbit/s", ylabel="predicted step, ms")
    axes.xaxis.set_major_formatter("{x:g}")
    for which in ("major", "minor"):
        getattr(axes.yaxis, f"set_{which}_formatter")(_plain)
    axes.set_title(f"{findings.workload.numel:,} parameters, buckets of {cap:g} MiB", loc="left")
    axes.grid(alpha=0.25, which="both", linewidth=0.5)
    figure.legend(loc="outside right upper", frameon=False)
    output.save_picture(figure, path, dpi=130)


def _plain(value: float, place: int) -> str:
    """The label of a tick: of 1, 2 and 5 and their tenfold; else empty."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""
