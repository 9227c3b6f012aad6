"""What the probe writes: a recommendation with its reason, how sure it is, a table, details, and findings in JSON."""

import dataclasses
import json
from pathlib import Path

from fusedcomm import files
from fusedcomm.config import Config
from fusedcomm.tools.cluster import Cluster, Cost
from fusedcomm.tools.cost_model import DEFAULT_CAP_NBYTES, WORTHWHILE
from fusedcomm.tools.probe.check import WARN_ERROR, Check
from fusedcomm.tools.probe.choices import FASTEST_BYTES_S, OFF, Option, are_apart, link_bytes_s, ms
from fusedcomm.tools.probe.network import BETWEEN, WITHIN
from fusedcomm.tools.probe.run import Findings

# Version of the JSON document.
FORMAT_VERSION = 2
MIN_STEPS_TO_TELL = 8
"""With fewer real steps of a choice, their quartiles say little."""
# Names of the kinds of collective in the report.
NAMES = {"all_reduce": "all-reduce (DDP)", "exchange": "all-to-all", "direct": "16-bit all-reduce"}


def text(findings: Findings) -> str:
    """The report: what to do, how sure that is, a line for each choice, and the details. Never empty."""
    return "\n".join(
        [*_recommended(findings), _confidence(findings), "", *_table(findings), "", "Details", *_details(findings)]
    )


def _details(findings: Findings) -> list[str]:
    return [f"  {line}" for line in (*_measured(findings), *_crossovers(findings), *_checked(findings))]


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
    lines += _not_reached(findings)
    return lines


def _not_reached(findings: Findings) -> list[str]:
    """A line if the backward pass takes longer than --backward-ms asked for; else empty."""
    asked_s, taken_s = findings.settings.backward_s, findings.workload.backward_s
    if not taken_s > (1 + WARN_ERROR) * asked_s > 0:
        return []
    return [
        f"  --backward-ms {1e3 * asked_s:g} was not reached: writing these gradients alone takes longer, or other "
        "programs use the cores; ask for more, or use fewer --params"
    ]


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


@dataclasses.dataclass(frozen=True)
class _Row:
    """The best bucket size of one way, and its step."""

    option: Option
    step_s: float
    measured: bool


def _rows(findings: Findings) -> list[_Row]:
    """A row for each way, the fastest first. A way that took real steps has its measured step."""
    found = findings.recommendation
    measured_s: dict[tuple, float] = {}
    if found.measured:
        measured_s = {(check.option.way, check.option.cap_mb): check.measured_s for check in findings.checks}

    def preference(row: _Row) -> tuple:
        """The recommended option comes first, then measured ones, then the fastest."""
        return row.option != found.option, not row.measured, row.step_s

    rows: dict[str, _Row] = {}
    for option in findings.options:
        taken_s = measured_s.get((option.way, option.cap_mb))
        row = _Row(option, option.prediction.step_s if taken_s is None else taken_s, taken_s is not None)
        rows[option.name] = min(rows.get(option.name, row), row, key=preference)
    return sorted(rows.values(), key=lambda row: row.step_s)


def _table(findings: Findings) -> list[str]:
    found, sender = findings.recommendation, _sender(findings.cluster)
    lines = [f"{'choice':<16}{'bucket':>9}{'step':>11}  {'':<10}{'x DDP':>6}{'sent by a ' + sender:>16}  made of"]
    for row in _rows(findings):
        how = "measured" if row.measured else "predicted"
        prediction = row.option.prediction
        lines.append(
            f"{row.option.name:<16}{row.option.cap_mb:>5g} MiB{ms(row.step_s):>11}  {how:<10}"
            f"{found.baseline_s / row.step_s:>6.2f}{prediction.sent_nbytes / 1e6:>13.2f} MB  {prediction.bound:<8}  "
            f"{_note(row, findings)}".rstrip()
        )
    return lines


def _note(row: _Row, findings: Findings) -> str:
    """What a row has to do with the recommendation; empty if nothing."""
    found = findings.recommendation
    if row.option == found.option:
        return "<- recommended"
    if row.option.wire not in (OFF, *findings.settings.accept):
        return "not accepted"
    if row.step_s >= found.step_s:
        return ""
    is_checked = any(check.option.way == row.option.way for check in findings.checks)
    is_worthwhile = row.step_s < (1 - WORTHWHILE) * found.step_s
    if not row.measured and (found.measured or is_worthwhile and not is_checked):
        return "not measured: may be faster"
    if is_worthwhile and is_checked:
        return "real steps do not show it"
    return "too little is gained" if found.leave_off or row.option.wire == OFF else "hardly faster"


def _confidence(findings: Findings) -> str:
    """How sure the recommendation is, and why."""
    found = findings.recommendation
    if not found.measured:
        return (
            f"Confidence: low. {findings.settings.seconds:g} s were too few for real steps of this model, so a smaller "
            "model took them, and the table is predicted: --seconds gives more time"
        )
    worst = max(abs(check.ratio - 1) for check in findings.checks)
    doubts = []
    cores = findings.environment["cores_of_a_rank"]
    if cores is not None and cores < 1:
        doubts.append("there are fewer cores than ranks")
    if worst > WARN_ERROR:
        doubts.append(f"predictions were up to {worst:.0%} off, so other programs may have used these hosts or links")
    if overlap := _overlap(findings):
        doubts.append(overlap)
    num_steps = min(len(check.steps_s) for check in findings.checks)
    measured = f"{num_steps} real steps of each measured choice decide"
    if not doubts:
        return f"Confidence: high. {measured}, and predictions were within {max(worst, 0.01):.0%} of them"
    return f"Confidence: {'medium' if len(doubts) == 1 else 'low'}. {measured}, but {'; '.join(doubts)}"


def _overlap(findings: Findings) -> str:
    """A text if the measured steps do not tell apart DDP and the best of the other choices. Else empty."""
    leave_off = findings.recommendation.leave_off
    off, ours = (
        min((check for check in findings.checks if (check.option.wire == OFF) == is_off), key=_step_of, default=None)
        for is_off in (True, False)
    )
    if ours is None:
        return ""
    faster, slower = (off, ours) if leave_off else (ours, off)
    if min(len(faster.steps_s), len(slower.steps_s)) < MIN_STEPS_TO_TELL:
        return "that is few: --seconds gives more time"
    if are_apart(faster.steps_s, slower.steps_s):
        return ""
    return f"those of {faster.option.name} and of {slower.option.name} overlap"


def _step_of(check: Check) -> float:
    return check.measured_s


def _crossovers(findings: Findings) -> list[str]:
    """A line with the links up to which wires pay by the model; empty if there is no wire to name. Wires are left out
    of which the measured steps say something else."""
    found, link = findings.recommendation, link_bytes_s(findings.cluster)
    told = []
    for name, bytes_s in findings.crossovers.items():
        pays = bytes_s is not None and bytes_s >= link
        accepted = name.split()[0] in findings.settings.accept
        if pays != (name == found.option.name) and (name == found.option.name or found.leave_off and accepted):
            continue
        told.append(f"{name} {_bits(bytes_s)}")
    return [f"links up to which a wire pays, by the model: {', '.join(told)}"] if told else []


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
            f"  Core time in these steps, x that measured outside a step: {', '.join(changed)}; the table includes it"
        )
    took = f"took {findings.seconds['all']:.0f} s, {findings.seconds['start']:.0f} of them to start"
    lines.append(f"{took} (--seconds {findings.settings.seconds:g})")
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
    files.write_text(path, json.dumps(as_json(findings), indent=1) + "\n")


def _bits(bytes_s: float | None) -> str:
    """A link in bits per second; "any link" from FASTEST_BYTES_S on, "never" for None. Never empty."""
    if bytes_s is None or bytes_s >= FASTEST_BYTES_S:
        return "never" if bytes_s is None else "any link"
    bits_s = 8 * bytes_s
    return f"{bits_s / 1e9:.1f} Gbit/s" if bits_s >= 1e9 else f"{bits_s / 1e6:.0f} Mbit/s"
