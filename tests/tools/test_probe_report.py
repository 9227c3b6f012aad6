"""What the probe says, and the tables of bench/results/probe.md against the results that they are made from."""

import dataclasses
import statistics
import sys
import types
from pathlib import Path

import pytest
from test_probe_choices import cluster, workload

from fusedcomm.tools import output
from fusedcomm.tools.probe import plot, report
from fusedcomm.tools.probe.check import Check, borne_out
from fusedcomm.tools.probe.choices import options, recommend
from fusedcomm.tools.probe.run import Findings, Settings
from fusedcomm.tools.probe.speed import Speed

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import _probe_report  # noqa: E402
from _steps_report import blocks_of  # noqa: E402


def test_the_document_has_what_the_results_say():
    blocks = blocks_of(_probe_report.DOCUMENT.read_text())
    assert set(blocks) == {path.stem for path in _probe_report.RESULTS.glob("probe-check*.json")}
    assert blocks == {name: _probe_report.table(name) for name in blocks}


@pytest.mark.parametrize(
    ("recommended", "best", "said"),
    [
        ("int8 25", "int8 25", "int8: the fastest"),
        ("off 25", "bf16 by host 25", "leave it off: 2.5% slower than bf16 by host"),
        ("bf16 direct 25", "off 25", "bf16 direct: 2.5% slower than off"),
        ("off 25", "off 25", "leave it off: the fastest"),
    ],
)
def test_a_recommendation_is_said_beside_the_fastest(recommended, best, said):
    assert _probe_report._choice({"recommended": recommended, "best": best, "regret": 0.025}) == said


# ---- what the probe says


ACCEPTED = ("bf16", "int8")


def findings(bytes_s: float, backward_s: float, measured: dict[str, list[float]] | None, **changes) -> Findings:
    """A probe's findings on a link of `bytes_s`.

    Args:
        measured: seconds of real steps by the name of a choice; None: a smaller model took real steps.
    """
    ranks, step = cluster(bytes_s), workload(backward_s)
    found = options(step, ranks, ("bf16", "int8", "int4"), (25.0,))
    by_name = {option.name: option for option in found}
    if measured is None:
        off = by_name["off"]
        checks, decides = [Check(off, 100, off.prediction.step_s, [off.prediction.step_s] * 9)], None
    else:
        checks = [Check(by_name[name], step.numel, statistics.median(taken), taken) for name, taken in measured.items()]
        decides = {check.option: check.steps_s for check in checks}
    values = {
        "settings": Settings(wires=("bf16", "int8", "int4"), accept=ACCEPTED, caps_mb=(25.0,)),
        "environment": {"cores_of_a_rank": 8.0},
        "cluster": ranks,
        "workload": step,
        "options": found,
        "recommendation": recommend(found, ACCEPTED, decides),
        "crossovers": {"bf16": 1e8, "int8": 1e11, "int4": None},
        "checks": checks,
        "speed": Speed(),
        "seconds": {"start": 6.0, "all": 60.0},
    }
    return types.SimpleNamespace(**{**values, **changes})


def steps(seconds: float, spread: float = 0.01) -> list[float]:
    return [seconds * (1 + spread * (index - 4) / 4) for index in range(9)]


def as_predicted(**changes: float) -> dict[str, list[float]]:
    """Real steps on a link of 1e8 bytes per second with nothing to compute, which take as long as is predicted, or as
    `changes` says."""
    predicted = {
        option.name: option.prediction.step_s
        for option in options(workload(0.0), cluster(1e8), ("bf16", "int8"), (25.0,))
    }
    return {name: steps(changes.get(name, predicted[name])) for name in ("off", "bf16", "int8")}


def notes(found: Findings) -> dict[str, tuple[str, str]]:
    """(how the step is known, note) by the choice's name, in the table's order."""
    rows = report._rows(found)
    assert all(report._note(row, found) in line for row, line in zip(rows, report._table(found)[1:], strict=True))
    return {row.option.name: ("measured" if row.measured else "predicted", report._note(row, found)) for row in rows}


def test_the_table_marks_what_is_recommended_and_why_faster_choices_are_not():
    found = findings(1e8, 0.0, as_predicted())
    assert found.recommendation.option.name == "int8"
    said = notes(found)
    assert said["int8"] == ("measured", "<- recommended") and said["int4"] == ("predicted", "not accepted")
    assert list(said)[:2] == ["int4", "int8"] and said["off"][0] == "measured"


def test_no_row_contradicts_the_measured_advice():
    """int8 was predicted to be the fastest, and measured as the slowest: the table has the measured step."""
    found = findings(1e8, 0.0, as_predicted(int8=2.0))
    assert found.recommendation.option.name == "bf16"
    rows = report._rows(found)
    place = [row.option.name for row in rows].index("bf16")
    for row in rows[:place]:
        assert report._note(row, found), f"{row.option.name} seems faster, and nothing says why it is not recommended"
    assert next(row for row in rows if row.option.name == "int8").step_s == 2.0
    assert "int8" not in [row.option.name for row in rows[:place]]


def test_where_it_is_left_off_no_faster_row_is_without_a_word():
    measured = as_predicted(bf16=0.81, int8=0.795)
    measured["off"] = steps(0.8)
    found = findings(1e8, 0.0, measured)
    assert found.recommendation.leave_off
    assert notes(found)["int8"] == ("measured", "too little is gained")
    assert notes(found)["int4"][1] == "not accepted" and notes(found)["off"][1] == "<- recommended"
    # The model says that int8 pays on this link. The steps say that it does not, so the model is not quoted.
    assert "int8" not in report._crossovers(found)[0] and "int4 never" in report._crossovers(found)[0]


def test_where_a_smaller_model_speaks_against_it_rows_say_what_was_not_borne_out():
    found = findings(1e8, 0.0, None)
    off, int8 = (next(o for o in found.options if o.name == name) for name in ("off", "int8"))
    checks = [Check(option, 100, seconds, [seconds] * 9) for option, seconds in ((off, 0.01), (int8, 0.012))]
    found.checks, found.recommendation = checks, borne_out(found.recommendation, checks)
    assert report._recommended(found)[0].startswith(
        "Leave it off: int8 was predicted to be faster, but real steps took"
    )
    said = notes(found)
    assert said["off"][1] == "<- recommended" and said["int8"] == ("predicted", "real steps do not show it")
    assert said["bf16"] == ("predicted", "not measured: may be faster") and said["int4"][1] == "not accepted"
    assert "and the table is predicted" in report._confidence(found)


@pytest.mark.parametrize(
    ("measured", "changes", "words"),
    [
        (as_predicted(), {}, ("high", "9 real steps of each measured choice decide, and predictions were within 1%")),
        (None, {}, ("low", "60 s were too few for real steps of this model", "--seconds gives more time")),
        (as_predicted(off=1.5), {}, ("medium", "predictions were up to 73% off")),
        (as_predicted(), {"environment": {"cores_of_a_rank": 0.5}}, ("medium", "there are fewer cores than ranks")),
        (as_predicted(off=1.5), {"environment": {"cores_of_a_rank": 0.5}}, ("low", "fewer cores than ranks", "off")),
        (
            {**as_predicted(), "int8": as_predicted()["int8"][3:6]},
            {},
            ("medium", "that is few: --seconds gives more time"),
        ),
        (
            {"off": [0.05] * 3 + as_predicted()["off"], "int8": as_predicted()["int8"] + [0.9] * 3},
            {},
            ("medium", "those of off and of int8 overlap"),
        ),
    ],
    ids=["high", "smaller model", "off", "cores", "both", "few", "overlap"],
)
def test_confidence_has_its_reason(measured, changes, words):
    text = report._confidence(findings(1e8, 0.0, measured, **changes))
    assert text.startswith(f"Confidence: {words[0]}.") and all(word in text for word in words), text


def test_a_backward_pass_that_was_asked_for_and_not_reached_is_said():
    found = findings(1e8, 0.4, None)
    for asked_s, is_said in ((0.0, False), (0.4, False), (0.39, False), (0.1, True)):
        found.settings = dataclasses.replace(found.settings, backward_s=asked_s)
        assert bool(report._not_reached(found)) == is_said
    assert "--backward-ms 100 was not reached" in report._not_reached(found)[0]


def test_the_picture_has_the_recommended_way_on_top_and_names_every_line(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    pyplot = output.pyplot()
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    found = findings(1e8, 0.0, {"off": steps(0.8), "bf16 direct": steps(0.3), "int8": steps(0.7)})
    assert found.recommendation.option.name == "bf16 direct"
    plot.picture(found, tmp_path / "probe.png")
    (axes,) = figures[0].axes
    monkeypatch.undo()
    pyplot.close(figures[0])
    named = {line.get_label(): line for line in axes.lines}
    assert len(named) == len(axes.lines) and not any(name.startswith("_") for name in named)
    ways = {"off", "bf16", "int8", "int4", "bf16 direct (recommended)"}
    measured = {"off measured, 800.0 ms", "int8 measured, 700.0 ms", "bf16 direct measured, 300.0 ms"}
    assert set(named) == ways | measured | {"measured link, 0.8 Gbit/s"}
    assert max(ways, key=lambda name: named[name].get_linewidth()) == "bf16 direct (recommended)"
    assert [line for line in axes.lines if line.get_label() in ways][-1] is named["bf16 direct (recommended)"]
