"""What the probe says about the steps that it saw: whole texts, in probe_reports.txt."""

import json
import re
from pathlib import Path

import pytest
from test_probe_choices import ACCEPTED, of, seen

from fusedcomm.tools.probe import report
from fusedcomm.tools.probe.choices import Seen, recommend
from fusedcomm.tools.probe.run import Findings, Settings

ENVIRONMENT = {"world_size": 2, "device": "cpu", "ranks_per_host": 1, "by_host": False, "uneven_hosts": ""}
USUAL = Settings(wires=("bf16", "int8", "int4"), accept=ACCEPTED)


def steps(seconds: float, spread: float = 0.01, number: int = 9) -> list[float]:
    return [seconds * (1 + spread * (2 * index / (number - 1) - 1)) for index in range(number)]


def findings(settings: Settings = USUAL, alone_s: float = 0.2, **steps_s: list[float]) -> Findings:
    found = seen(**steps_s)
    accepted = {choice: one for choice, one in found.items() if choice.wire != "int4"}
    recommended = recommend(accepted, ACCEPTED, alone_s)
    return Findings(settings, ENVIRONMENT, 1000, alone_s, found, [of("fp8")], recommended, {"start": 6.0, "all": 60.0})


def with_nbytes() -> Findings:
    """The bytes of one choice are known, and those of the other are not."""
    found = findings(off=steps(0.6), int8=steps(0.3))
    found.seen[of("int8")] = Seen(steps(0.3), [0.5], 10**6, 10**6)
    found.seen[of("off")] = Seen(steps(0.6), [1.0], 10**6, None)
    return found


ASKED = Settings(backward_s=0.1, accept=ACCEPTED)
SCENES = {
    "one is faster and accepted": findings(off=steps(0.6), bf16=steps(0.31), int8=steps(0.3), int4=steps(0.1)),
    "few steps": findings(off=steps(0.6), int8=steps(0.3, number=4)),
    "steps that overlap": findings(off=steps(0.6), int8=steps(0.595)),
    "none is faster": findings(off=steps(0.6), int8=steps(0.7)),
    "noise": findings(off=steps(0.6), bf16=steps(0.59), int8=steps(0.5, spread=0.6)),
    "bytes": with_nbytes(),
    "a backward pass that was asked for and not reached": findings(ASKED, off=steps(0.6), int8=steps(0.3)),
    "a backward pass that was reached": findings(ASKED, alone_s=0.11, off=steps(0.6), int8=steps(0.3)),
}


def texts() -> dict[str, str]:
    """By scene: its report, below a line [scene]."""
    parts = re.split(r"^\[(.*)\]\n", Path(__file__).with_name("probe_reports.txt").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("scene", SCENES)
def test_the_report_says_what_was_seen(scene):
    assert report.text(SCENES[scene]) + "\n" == texts()[scene]
    assert texts().keys() == SCENES.keys()


def test_the_document_has_what_the_text_says(tmp_path):
    report.write_json(SCENES["one is faster and accepted"], tmp_path / "probe.json")
    written = json.loads((tmp_path / "probe.json").read_text())
    assert written["recommendation"]["option"]["name"] == "int8" and written["recommendation"]["gain"] == 0.5
    assert written["recommendation"]["baseline"]["wire"] is None
    assert written["recommendation"]["faster_but_not_accepted"]["name"] == "int4"
    assert [row["step_s"] for row in written["choices"]] == pytest.approx([0.6, 0.31, 0.3, 0.1])
    assert written["choices"][2]["steps_s"] == steps(0.3) and written["not_tried"] == ["fp8 in buckets of 25 MiB"]
