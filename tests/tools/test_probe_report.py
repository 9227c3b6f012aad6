"""What the probe says about the steps that it saw."""

import json
import re

import pytest
from test_probe_choices import ACCEPTED, of, seen

from fusedcomm.tools.probe import report
from fusedcomm.tools.probe.choices import Seen, recommend
from fusedcomm.tools.probe.run import Findings, Settings

ENVIRONMENT = {"world_size": 2, "device": "cpu", "ranks_per_host": 1, "by_host": False, "uneven_hosts": ""}


def steps(seconds: float, spread: float = 0.01, number: int = 9) -> list[float]:
    return [seconds * (1 + spread * (2 * index / (number - 1) - 1)) for index in range(number)]


def findings(settings: Settings | None = None, alone_s: float = 0.2, **steps_s: list[float]) -> Findings:
    found = seen(**steps_s)
    return Findings(
        settings or Settings(wires=("bf16", "int8", "int4"), accept=ACCEPTED),
        ENVIRONMENT,
        1000,
        alone_s,
        found,
        [of("fp8")],
        recommend({choice: one for choice, one in found.items() if choice.wire != "int4"}, ACCEPTED, alone_s),
        {"start": 6.0, "all": 60.0},
    )


def rows(text: str) -> dict[str, str]:
    """The table's rows by the choice's name, in their order."""
    table = text[text.index("choice ") :].split("\n\n")[0].splitlines()[1:]
    return {re.split(r"\s{2,}", line)[0]: line for line in table}


def test_the_advice_comes_first_and_the_table_marks_it():
    text = report.text(findings(off=steps(0.6), bf16=steps(0.31), int8=steps(0.3), int4=steps(0.1)))
    first, second, third, confidence, *_ = text.splitlines()
    assert first.startswith("Recommended: ddp = DistributedDataParallel(model); comm = fusedcomm.attach(ddp, ")
    assert second.startswith("  300.0 ms a step, 50% less: of 600.0 ms")
    assert third.startswith("  int4 took 100.0 ms, but changes gradients more: ") and third.endswith("--accept int4")
    assert confidence == "Confidence: high. 9 real steps of each, in turns"
    table = rows(text)
    assert list(table) == ["int8", "int4", "bf16", "off", "no all-reduce"]
    assert table["int8"].endswith("<- recommended") and table["int4"].endswith("not accepted")
    assert "298.1 to 301.9" in table["int8"] and "200.0 ms" in table["no all-reduce"]
    assert "not tried, because there was no time: fp8 in buckets of 25 MiB; --seconds gives more" in text
    assert "took 60 s, 6 of them to start (--seconds 60)" in text


@pytest.mark.parametrize(
    ("steps_s", "words"),
    [
        ({"off": steps(0.6), "int8": steps(0.3, number=4)}, "low. 4 real steps of each, in turns: that is few; "),
        ({"off": steps(0.6), "int8": steps(0.595)}, "medium. 9 real steps of each, in turns, but those of off and"),
        ({"off": steps(0.6), "int8": steps(0.7)}, "high. 9 real steps"),
    ],
)
def test_confidence_has_its_reason(steps_s, words):
    assert f"Confidence: {words}" in report.text(findings(**steps_s))


def test_where_it_is_left_off_no_faster_row_is_without_a_word():
    text = report.text(findings(off=steps(0.6), bf16=steps(0.59), int8=steps(0.5, spread=0.6)))
    assert text.startswith("Leave it off: the steps do not show that anything is saved, because they overlap: ")
    table = rows(text)
    assert table["bf16"].endswith("too little is gained") and table["int8"].endswith("steps do not show it")


def test_where_the_lines_rate_is_known_each_choice_has_the_time_of_its_bytes():
    found = findings(Settings(nic_gbps=0.1, accept=ACCEPTED), off=steps(0.6), int8=steps(0.3))
    found.seen[of("int8")] = Seen(steps(0.3), [0.5], 10**6, 10**6)
    found.seen[of("off")] = Seen(steps(0.6), [1.0], 10**6, None)
    text = report.text(found)
    assert "line needs" in text and "80.0 ms  <- recommended" in rows(text)["int8"]
    assert rows(text)["off"].count("unknown") == 2
    by_name = {row["name"]: row for row in report.as_json(found)["choices"]}
    assert by_name["int8"]["line_s"] == pytest.approx(0.08) and by_name["off"]["line_s"] is None
    assert "line needs" not in report.text(findings(off=steps(0.6), int8=steps(0.3)))


def test_a_backward_pass_that_was_asked_for_and_not_reached_is_said():
    asked = Settings(backward_s=0.1, accept=ACCEPTED)
    said = "--backward-ms 100 was not reached: writing these gradients alone takes longer"
    assert said in report.text(findings(asked, alone_s=0.2, off=steps(0.6), int8=steps(0.3)))
    assert said not in report.text(findings(asked, alone_s=0.11, off=steps(0.6), int8=steps(0.3)))


def test_the_document_has_what_the_text_says(tmp_path):
    found = findings(off=steps(0.6), int8=steps(0.3), int4=steps(0.1))
    report.write_json(found, tmp_path / "probe.json")
    written = json.loads((tmp_path / "probe.json").read_text())
    assert written["recommendation"]["option"]["name"] == "int8" and written["recommendation"]["gain"] == 0.5
    assert written["recommendation"]["baseline"]["wire"] is None
    assert written["recommendation"]["faster_but_not_accepted"]["name"] == "int4"
    assert [row["step_s"] for row in written["choices"]] == pytest.approx([0.6, 0.3, 0.1])
    assert written["choices"][1]["steps_s"] == steps(0.3) and written["not_tried"] == ["fp8 in buckets of 25 MiB"]
