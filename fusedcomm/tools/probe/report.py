"""The probe's report: a recommendation with its reason, how sure it is, a table, details, and findings in JSON."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from fusedcomm import files
from fusedcomm.autotune.turns import MARGIN
from fusedcomm.tools.probe.choices import DDP, OFF, Candidate, Seen, are_apart, code_of, ms, way_of
from fusedcomm.tools.probe.run import Findings

FORMAT_VERSION = 3
"""Version of the JSON document."""
MIN_STEPS_TO_TELL = 8
"""With fewer real steps of a choice, their quartiles say little."""
WARN_ERROR = 0.15
"""Share by which the synthetic backward pass may be longer than asked for without a word."""


def text(findings: Findings) -> str:
    """The report: what to do, how sure that is, a line for each choice, and the details. Never empty."""
    details = [f"  {line}" for line in _details(findings)]
    return "\n".join([*_recommended(findings), _confidence(findings), "", *_table(findings), "", "Details", *details])


def _recommended(findings: Findings) -> list[str]:
    found = findings.recommendation
    code = code_of(found.choice, findings.environment["by_host"], findings.front_end)
    if found.leave_off:
        lines = [f"Leave it off: {found.reason}."]
        if found.choice != found.baseline:
            lines.append(f"But DDP itself is faster with another bucket size: {code}")
    else:
        lines = [
            f"Recommended: {code}",
            f"  {ms(found.step_s)} a step, {found.gain:.0%} less: {found.reason}",
        ]
    faster = _faster(findings)
    if faster is not None:
        lines.append(
            f"  {way_of(faster)} took {ms(findings.seen[faster].step_s)}, but changes gradients more: try it on your "
            f"own with fusedcomm.simulate, then --accept {faster.wire}"
        )
    return lines


def _faster(findings: Findings) -> Candidate | None:
    """The fastest choice whose wire was not accepted, if steps show it to be worth the change; else None."""
    chosen = findings.seen[findings.recommendation.choice]
    others = [c for c in findings.seen if c.wire not in (OFF.wire, *findings.settings.accept)]
    best = min(others, key=lambda choice: findings.seen[choice].step_s, default=None)
    if best is None or findings.seen[best].step_s > (1 - MARGIN) * chosen.step_s:
        return None
    return best if are_apart(findings.seen[best].steps_s, chosen.steps_s) else None


def _confidence(findings: Findings) -> str:
    """How sure the recommendation is, and why."""
    found = findings.recommendation
    chosen = findings.seen[found.choice]
    offs, ours = (
        [c for c in findings.seen if c.wire in wires and len(findings.seen[c].steps_s) >= len(chosen.steps_s)]
        for wires in ((OFF.wire,), findings.settings.accept)
    )
    rivals = ours if found.leave_off else offs
    num_steps = min(len(findings.seen[choice].steps_s) for choice in (found.choice, found.baseline))
    told = f"{num_steps} real steps of each, in turns"
    if num_steps < MIN_STEPS_TO_TELL:
        return f"Confidence: low. {told}: that is few; --seconds gives more time"
    if rivals:
        rival = min(rivals, key=lambda choice: findings.seen[choice].step_s)
        if not are_apart(chosen.steps_s, findings.seen[rival].steps_s):
            return f"Confidence: medium. {told}, but those of {way_of(found.choice)} and of {way_of(rival)} overlap"
    return f"Confidence: high. {told}"


def _table(findings: Findings) -> list[str]:
    """A line for each choice, the recommended one first, then the fastest."""
    found = findings.recommendation
    sender = "rank" if findings.environment["ranks_per_host"] == 1 else "host"
    sent = f"sent by a {sender}"
    width = max(16, *(len(way_of(choice)) + 1 for choice in findings.seen))
    ratio = f"  / {findings.front_end.name}"
    head = f"{'choice':<{width}}{'bucket':>9}{'step':>11}{'half of steps':>20}{ratio}{'half of turns':>16}{sent:>17}"
    lines = [head]
    order = sorted(findings.seen, key=lambda choice: (choice != found.choice, findings.seen[choice].step_s))
    for choice in order:
        seen = findings.seen[choice]
        nbytes = "unknown" if seen.line_nbytes is None else f"{seen.line_nbytes / 1e6:.2f} MB"
        bucket = "" if choice.bucket_mib is None else f"{choice.bucket_mib:g} MiB"
        line = (
            f"{way_of(choice):<{width}}{bucket:>9}{ms(seen.step_s):>11}{_half(seen.steps_s, 1e3, 1):>20}"
            f"{statistics.median(seen.ratios):>{len(ratio)}.2f}{_half(seen.ratios, 1, 2):>16}{nbytes:>17}"
        )
        lines.append(f"{line}  {_note(choice, seen, findings)}".rstrip())
    lines.append(f"{findings.front_end.alone:<{width}}{'':>9}{ms(findings.alone_s):>11}")
    return lines


def _half(values: Sequence[float], factor: float, places: int) -> str:
    """The first and the third quartile; with fewer than two values empty."""
    if len(values) < 2:
        return ""
    low, _, high = statistics.quantiles(values)
    return f"{max(low, 0) * factor:.{places}f} to {high * factor:.{places}f}"


def _note(choice: Candidate, seen: Seen, findings: Findings) -> str:
    """A note on a row that the recommendation mentions; empty for other rows."""
    found = findings.recommendation
    if choice == found.choice:
        return "<- recommended"
    if choice.wire not in (OFF.wire, *findings.settings.accept):
        return "not accepted"
    if seen.step_s >= found.step_s:
        return ""
    if seen.step_s < (1 - MARGIN) * found.step_s:
        return "steps do not show it"
    return "too little is gained" if found.leave_off or choice.wire == OFF.wire else "hardly faster"


def _details(findings: Findings) -> list[str]:
    settings, environment = findings.settings, findings.environment
    lines = [f"{environment['world_size']} ranks on {environment['device']}"]
    if environment["uneven_hosts"]:
        lines.append(environment["uneven_hosts"])
    model = f"step: {findings.numel:,} parameters, {ms(findings.alone_s)} without synchronization"
    if settings.script is None:
        model += " (synthetic: --script measures your model, --params and --backward-ms another synthetic one)"
    lines.append(model)
    if findings.alone_s > (1 + WARN_ERROR) * settings.backward_s > 0:
        lines.append(
            f"--backward-ms {1e3 * settings.backward_s:g} was not reached: writing these gradients alone takes longer, "
            "or other programs use the cores; ask for more, or use fewer --params"
        )
    if findings.front_end == DDP:
        lines.append("gradients were equal on all ranks, bit for bit, with each choice")
    if findings.not_tried:
        names = ", ".join(map(str, findings.not_tried))
        lines.append(f"not tried, because there was no time: {names}; --seconds gives more")
    took = f"took {findings.seconds['all']:.0f} s, {findings.seconds['start']:.0f} of them to start"
    lines.append(f"{took} (--seconds {settings.seconds:g})")
    return lines


def as_json(findings: Findings) -> dict:
    """All findings, in seconds, bytes and elements unless a name says otherwise."""
    found = findings.recommendation

    def of(choice: Candidate) -> dict:
        seen = findings.seen[choice]
        return {
            "name": way_of(choice),
            "wire": None if choice.wire == OFF.wire else choice.wire,
            "sum": choice.sum,
            "by_host": choice.by_host,
            "bucket_cap_mb": choice.bucket_mib,
            "params": choice.params,
            "code": code_of(choice, findings.environment["by_host"], findings.front_end),
            "step_s": seen.step_s,
            "ratio": statistics.median(seen.ratios),
            **dataclasses.asdict(seen),
        }

    faster = _faster(findings)
    return {
        "format": FORMAT_VERSION,
        "settings": dataclasses.asdict(findings.settings),
        "environment": findings.environment,
        "front_end": findings.front_end.name,
        "numel": findings.numel,
        "alone_s": findings.alone_s,
        "choices": [of(choice) for choice in findings.seen],
        "not_tried": [str(choice) for choice in findings.not_tried],
        "recommendation": {
            "leave_off": found.leave_off,
            "option": of(found.choice),
            "baseline": of(found.baseline),
            "gain": found.gain,
            "reason": found.reason,
            "faster_but_not_accepted": faster and of(faster),
        },
        "seconds": findings.seconds,
    }


def write_json(findings: Findings, path: Path) -> None:
    """Writes :func:`as_json` to the file `path`. Raises OSError if that fails."""
    files.write_text(path, json.dumps(as_json(findings), indent=1) + "\n")
