"""What the probe writes: a table, a recommendation with its reason, and all findings in JSON."""

import dataclasses
import json
from pathlib import Path

from fusedcomm.config import Config
from fusedcomm.tools.cluster import Cluster, Cost
from fusedcomm.tools.cost_model import DEFAULT_CAP_NBYTES
from fusedcomm.tools.probe.check import WARN_ERROR
from fusedcomm.tools.probe.choices import FASTEST_BYTES_S, OFF, Option, ms
from fusedcomm.tools.probe.network import BETWEEN, WITHIN
from fusedcomm.tools.probe.run import Findings

# Version of the JSON document.
FORMAT_VERSION = 2
# Names of the kinds of collective in the report.
NAMES = {"all_reduce": "all-reduce (DDP)", "exchange": "all-to-all", "direct": "16-bit all-reduce"}


def text(findings: Findings) -> str:
    """The report. Never empty."""
    return "\n".join(
        [*_measured(findings), "", *_table(findings), "", *_recommended(findings), "", *_checked(findings)]
    )


def _measured(findings: Findings) -> list[str]:
    workload, environment = findings.workload, findings.environment
    cores = environment["cores_of_a_rank"]
    of_each = "" if cores is None else f", {cores:g} core(s) each"
    lines = [f"{environment['world_size']} ranks on {environment['device']}{of_each}; codec {environment['codec']}"]
    if cores is not None and cores < 1:
        lines.append(
            "  fewer cores than ranks: threads wait for each other, which the model does not predict; steps have been "
            "seen to take up to 1.7 times as long: trust the measured ones"
        )
    if environment["uneven_hosts"]:
        lines.append(f"  {environment['uneven_hosts']}")
    for kind, name, cost, sender in _collectives(findings.cluster):
        rate = f"{findings.network.carried_bytes_s(kind) / 1e6:,.0f} MB/s"
        lines.append(f"  {name:<24} {rate:>14} a {sender}, latency {cost.fixed_s * 1e6:.0f} µs")
    numel = DEFAULT_CAP_NBYTES // 4
    for wire, codec in findings.cluster.codecs.items():
        whole_s = codec.whole_s(Config(wire=wire).plan_of_large_buckets(findings.cluster.world_size), numel)
        lines.append(f"  codec {wire:<12} {4 * numel / whole_s / 1e9:>9.2f} GB/s of gradients, pack to unpack")
    lines.append(
        f"step: {workload.numel:,} parameters; forward {ms(workload.forward_s)}, backward {ms(workload.backward_s)}, "
        f"optimizer {ms(workload.optimizer_s)} without synchronization"
    )
    if findings.settings.script is None:
        lines.append("  (synthetic: --script measures your model, --params and --backward-ms another synthetic one)")
    return lines


def _collectives(cluster: Cluster) -> list[tuple[str, str, Cost, str]]:
    """(kind, name, cost, "host" or "rank": whose bytes the cost counts)"""
    sender = _sender(cluster)
    found = [(kind, name, getattr(cluster.network, kind), sender) for kind, name in NAMES.items()]
    if cluster.two_levels is not None:
        found.append((BETWEEN, "all-to-all between hosts", cluster.two_levels.network.exchange, sender))
        found.append((WITHIN, "all-to-all within a host", cluster.two_levels.local.exchange, "rank"))
    return found


def _sender(cluster: Cluster) -> str:
    """Whose bytes the costs of the network count: "host" or "rank"."""
    return "host" if cluster.ranks_per_host > 1 else "rank"


def _table(findings: Findings) -> list[str]:
    caps = sorted({option.cap_mb for option in findings.options})
    names = list(dict.fromkeys(option.name for option in findings.options))
    by_key = {(option.name, option.cap_mb): option for option in findings.options}
    baseline_s = findings.recommendation.baseline.prediction.step_s
    sent = f"sent by a {_sender(findings.cluster)}"
    lines = [
        f"predicted step, ms, by bucket size; at the best: × DDP's default, MB {sent}, bound, link up to which it pays"
    ]
    lines.append(f"{'':<16}" + "".join(f"{cap:>7g} MiB" for cap in caps) + f"{'×':>8}{'MB sent':>10}  {'bound':<9}")
    for name in names:
        row = [by_key[name, cap] for cap in caps]
        best = min(row, key=lambda option: option.prediction.step_s).prediction
        crossover = findings.crossovers.get(name)
        until = _bits(crossover) if name in findings.crossovers else ""
        lines.append(
            f"{name:<16}"
            + "".join(f"{option.prediction.step_s * 1e3:>11.1f}" for option in row)
            + f"{baseline_s / best.step_s:>8.2f}{best.sent_nbytes / 1e6:>10.2f}  {best.bound:<9}{until:>12}".rstrip()
        )
    return lines


def _recommended(findings: Findings) -> list[str]:
    found = findings.recommendation
    if found.leave_off:
        lines = [f"Leave it off: {found.reason}."]
        if found.option is not found.baseline:
            lines.append(f"But DDP itself is faster with another bucket size: {found.option.code}")
    else:
        how = "measured" if found.measured else "predicted"
        lines = [
            f"Recommended: {found.option.code}",
            f"  {ms(found.step_s)} a step ({how}), {found.gain:.0%} less: {found.reason}",
        ]
    if found.faster is not None:
        lines.append(
            f"  {found.faster.name} is predicted to take {ms(found.faster.prediction.step_s)}, but changes gradients "
            f"more: try it on your own with fusedcomm.simulate, then --accept {found.faster.wire}"
        )
    return lines


def _checked(findings: Findings) -> list[str]:
    lines = ["checked against real steps:"]
    for check in findings.checks:
        predicted = check.option.prediction.step_s
        smaller = "" if check.numel == findings.workload.numel else f" (with {check.numel:,} parameters, to save time)"
        lines.append(
            f"  {check.option.name:<16} bucket {check.option.cap_mb:g} MiB: predicted {ms(predicted)}, measured "
            f"{ms(check.measured_s)}: {check.ratio - 1:+.0%}{smaller}"
        )
    speed = findings.speed
    if {speed.cores, *speed.collectives.values()} != {1.0}:
        factors = {"all": speed.cores} | {NAMES[kind]: factor for kind, factor in speed.collectives.items()}
        changed = [f"{what} {factor:.2f}" for what, factor in factors.items() if factor != 1]
        lines.append(
            f"  Core time in these steps, × that measured outside a step: {', '.join(changed)}; the table includes it."
        )
    worst = max(abs(check.ratio - 1) for check in findings.checks)
    if worst > WARN_ERROR:
        lines.append(
            f"  The model is {worst:.0%} off here: trust the measured steps. Other programs may have used these hosts "
            "or links; --seconds gives more time."
        )
    lines.append(f"took {findings.seconds['all']:.0f} s")
    return lines


def as_json(findings: Findings) -> dict:
    """All findings, in seconds, bytes and elements unless a name says otherwise."""
    found = findings.recommendation
    return {
        "format": FORMAT_VERSION,
        "settings": dataclasses.asdict(findings.settings),
        "environment": findings.environment,
        "network": {
            **dataclasses.asdict(findings.cluster.network),
            "link_bytes_s": findings.cluster.link_bytes_s,
            "two_levels": findings.cluster.two_levels and dataclasses.asdict(findings.cluster.two_levels),
            "samples": [dataclasses.asdict(sample) for sample in findings.network.samples],
        },
        "local": {
            "codecs": {wire: dataclasses.asdict(codec) for wire, codec in findings.cluster.codecs.items()},
            "points": findings.local.points,
            "copy_s_per_byte": findings.cluster.copy_s_per_byte,
            "cores": findings.cluster.cores,
        },
        "workload": {**dataclasses.asdict(findings.workload), "numel": findings.workload.numel},
        "speed": dataclasses.asdict(findings.speed),
        "predictions": [option_as_json(option) for option in findings.options],
        "crossover_bytes_s": findings.crossovers,
        "recommendation": {
            "leave_off": found.leave_off,
            "option": option_as_json(found.option),
            "baseline": option_as_json(found.baseline),
            "gain": found.gain,
            "step_s": found.step_s,
            "baseline_s": found.baseline_s,
            "measured": found.measured,
            "reason": found.reason,
            "faster_but_not_accepted": found.faster and option_as_json(found.faster),
        },
        "check": [
            {
                **option_as_json(check.option),
                "numel": check.numel,
                "measured_s": check.measured_s,
                "steps_s": check.steps_s,
                "ratio": check.ratio,
            }
            for check in findings.checks
        ],
        "seconds": findings.seconds,
    }


def option_as_json(option: Option) -> dict:
    return {
        "name": option.name,
        "wire": None if option.wire == OFF else option.wire,
        "sum": option.way.sum,
        "hosts": option.way.hosts,
        "bucket_cap_mb": option.cap_mb,
        "code": option.code,
        **dataclasses.asdict(option.prediction),
        "exposed_s": option.prediction.exposed_s,
    }


def write_json(findings: Findings, path: Path) -> None:
    path.write_text(json.dumps(as_json(findings), indent=1) + "\n")


def _bits(bytes_s: float | None) -> str:
    """A link in bits per second; "any link" from FASTEST_BYTES_S on, "never" for None. Never empty."""
    if bytes_s is None or bytes_s >= FASTEST_BYTES_S:
        return "never" if bytes_s is None else "any link"
    bits_s = 8 * bytes_s
    return f"{bits_s / 1e9:.1f} Gbit/s" if bits_s >= 1e9 else f"{bits_s / 1e6:.0f} Mbit/s"
