"""bench/_*_report.py, _pictures.py: the tables in bench/results/ and README.md are those of the committed
JSON, and the pictures can be drawn."""

import json
import shlex
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import _report  # noqa: E402
import _steps_report  # noqa: E402

BEST = {"ddp tuned": 5.0, "fusedcomm int8": None}
SETTINGS = {
    **{"hosts": 2, "ranks_per_host": 3, "model": ["resnet"], "params": 2e6, "size": 16, "compute_ms": None},
    **{"caps": [5], "rounds": 4, "steps": 3, "ways": ["ddp default", "c++ fp16 hook", "fusedcomm int8"]},
}
ROW = {"case": "resnet/1gbit", "numel": 2_000_000, "percentiles_s": {}, "figures": {}}


def row(impl: str, milliseconds: float, **figures: float) -> dict:
    seconds = milliseconds / 1e3
    percentiles = {name: seconds * (1 + index / 10) for index, name in enumerate(("p50", "p75", "p90", "p95"))}
    return {**ROW, "impl": impl, "median_s": seconds, "percentiles_s": percentiles, "figures": figures}


@pytest.fixture
def results(tmp_path) -> list:
    document = {
        "env": {"cpu": "A(R) Xeon(R) Processor", "torch": "2.13.0", "commit": "abc"},
        "settings": SETTINGS,
        "cases": {"resnet/1gbit": {"batch": 4, "bucket_cap_mb": BEST}},
        "not_measured": [{"case": "resnet/1gbit", "impl": "some hook", "reason": "it hangs", "failed": False}],
        "rows": [
            row("compute alone", 10),
            row("ddp default", 250, wire_nbytes=8e6, sync_s=0.21, exposed_s=0.24, overlap=0.1, error=0.0),
            row("ddp tuned", 200, wire_nbytes=8e6, sync_s=0.18),
            row("fusedcomm int8", 50, wire_nbytes=2e6, bytes_ratio=4.0, of_ideal=0.9, cores_busy=0.914, sync_s=0.04),
            row("c++ fp16 hook", 125, bytes_ratio=2.0),
        ],
    }
    path = tmp_path / "ddp-step-two.json"
    path.write_text(json.dumps(document))
    return _steps_report.load([path])


def test_speed_ups_and_shares_are_of_the_faster_ddp(results):
    lines = _steps_report.speed_up_table(results).splitlines()
    assert lines[0] == (
        '| | computing, ms | communication | DDP, ms | torch\'s best 16-bit hook | bf16 | int8 | int4 | "auto" |'
    )
    title = "2 hosts × 3 ranks, 1gbit/s, resnet of 2 M"
    assert lines[2:] == [f"| {title} | 10 | 95% | 200 | 1.60 | – | 4.00 | – | – |"]


def test_a_case_has_every_way_and_what_is_missing(results):
    results[0].found["chosen"] = {"fusedcomm auto": "bf16 chosen, of these:\n  off 10 ms\n  bf16 9 ms"}
    table = _steps_report.case_table(results[0])
    title = "2 hosts × 3 ranks, 1gbit/s, resnet of 2 M: 2,000,000 parameters, batch 4, 12 steps of each way"
    title += ". A Xeon, torch 2.13.0, commit abc"
    assert table.splitlines()[0] == title
    # The interface has counted 2 MB of payload. 1,448 of a packet's 1,514 bytes are payload, so sending takes 16.7 ms.
    # Computing takes 10 ms.
    assert (
        "| fusedcomm int8 |  | 50.0 | 55.0 | 60.0 | 65.0 | 4.00 | 4.50 | 4.00 | 0.33 | 91% |  |  | 2.00 |  |" in table
    )
    assert (
        "| ddp default |  | 250.0 | 275.0 | 300.0 | 325.0 | 0.80 | 0.86 |  | 0.27 |  | 240.0 | 10% | 8.00 | 0e+00 |"
        in table
    )
    assert "| ddp tuned | 5 | 200.0 |" in table
    assert "\n\nfusedcomm auto: bf16 chosen, of these:; off 10 ms; bf16 9 ms\n" in table
    assert table.endswith("\n\nsome hook: not measured: it hangs")


def test_of_several_runs_the_least_and_the_greatest_gain_are_said(results):
    for impl, milliseconds in (("ddp default", [240, 260]), ("ddp tuned", [200, 200]), ("fusedcomm int8", [40, 62.5])):
        results[0].rows[impl]["figures"]["medians_s"] = [value / 1e3 for value in milliseconds]
    results[0].settings = {**SETTINGS, "repeat": 2}
    results[0].found["runs"] = [
        {"bucket_cap_mb": BEST},
        {"bucket_cap_mb": {"ddp tuned": None}, "chosen": {"x": "a\nb"}},
    ]
    table = _steps_report.case_table(results[0])
    assert "12 steps of each way in each of 2 runs, of which medians" in table and "\n\nx: a; b\n" in table
    assert "| fusedcomm int8 |  | 50.0 | 55.0 | 60.0 | 65.0 | 4.00 (3.20–5.00) |" in table
    assert "| ddp tuned | 5/own | 200.0 |" in table and "| 1.60 |" in table
    assert "--steps 3 --repeat 2 --ways" in _steps_report.command(results).replace(" \\\n   ", "")


def test_a_command_is_what_its_cases_were_measured_with(results):
    text = _steps_report.command(results)
    assert shlex.split(text.strip("`").replace("\\\n", " ")) == [
        *["sudo", ".venv/bin/python", "bench/ddp_step.py", "--hosts", "2", "--ranks-per-host", "3", "--link", "1gbit"],
        *["--model", "resnet", "--params", "2e+06", "--size", "16", "--caps", "5", "--rounds", "4", "--steps", "3"],
        *["--ways", "ddp default", "c++ fp16 hook", "fusedcomm int8", "--json", "bench/results/ddp-step-two.json"],
    ]
    assert max(map(len, text.splitlines())) <= 120


def test_the_readmes_stock_hook_is_the_best_that_was_run(results, monkeypatch):
    monkeypatch.setattr(_steps_report, "HEADLINE_CASES", {("two", "resnet/1gbit"): "here"})
    for milliseconds, best in ((150, "1.60"), (100, "2.00")):
        results[0].rows["python bf16 hook"] = row("python bf16 hook", milliseconds)
        lines = _steps_report.headline_table(results).splitlines()
        assert lines[2] == f"| torch's best 16-bit hook | {best} |"
        assert lines[4] == "| int8 | 4.00 |" and lines[3] == "| bf16 | – |"


def test_a_step_that_computes_for_longer_than_its_bytes_take_has_that_for_its_ideal(results):
    results[0].rows["compute alone"]["median_s"] = 0.045
    assert results[0].of_ideal("fusedcomm int8") == "0.90"
    assert results[0].of_ideal("c++ fp16 hook") == ""  # its bytes were not counted
    results[0].settings["hosts"] = 0
    assert results[0].of_ideal("fusedcomm int8") == ""


def test_tables_are_written_between_their_marks(results, tmp_path):
    document = tmp_path / "benchmarks.md"
    document.write_text("# Title\n<!-- speed-ups -->\nold\n<!-- end -->\ntext\n<!-- two -->\n<!-- end -->\nlast\n")
    _steps_report.write_tables(document, results)
    text = document.read_text()
    assert text.startswith("# Title\n<!-- speed-ups -->\n| | computing, ms |") and text.endswith("<!-- end -->\nlast\n")
    assert "old" not in text and "\ntext\n" in text
    assert _steps_report.blocks_of(text) == _steps_report.tables(results, ["speed-ups", "two"])
    document.write_text("<!-- three -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="no bench/results/ddp-step-three.json for the table 'three'"):
        _steps_report.write_tables(document, results)


def test_the_document_says_what_the_results_say():
    blocks = _steps_report.blocks_of(_steps_report.DOCUMENT.read_text())
    results = _steps_report.load(list(_steps_report.RESULTS.glob("ddp-step-*.json")))
    assert {_steps_report.SPEED_UPS, *(result.name for result in results)} == set(blocks)
    assert blocks == _steps_report.tables(results, list(blocks))


def test_readmes_tables_are_of_the_results():
    blocks = _steps_report.blocks_of(_steps_report.README.read_text())
    results = _steps_report.load(list(_steps_report.RESULTS.glob("ddp-step-*.json")))
    assert set(blocks) == {_steps_report.HEADLINE, _report.WIRES}
    table = blocks[_steps_report.HEADLINE]
    assert table == _steps_report.headline_table(results)
    assert table.splitlines()[0].count("|") == len(_steps_report.HEADLINE_CASES) + 2
    for result in results:
        if (result.name, result.case) in _steps_report.HEADLINE_CASES:
            assert set(hooks_to_run(result)) <= set(result.rows), result.name


def hooks_to_run(result) -> tuple[str, ...]:
    """The 16-bit hooks of torch that a case must have been run with. The two fp16 hooks send the same bytes, so one of
    them is enough in a case that computes for long, where their own cost is hidden; where nearly all is hidden, any."""
    share = 1 - result.compute_s / result.baseline_s
    if share > 0.6:
        return _steps_report.STOCK_HOOKS
    return ("c++ fp16 hook", "python bf16 hook") if share > 0.1 else ("c++ fp16 hook",)


def test_the_other_tables_are_of_the_results():
    for document, tables in _report.tables().items():
        blocks = _steps_report.blocks_of(document.read_text())
        assert {name: blocks[name] for name in tables} == tables
        assert document == _report.README or set(blocks) == set(tables)
    rows = [line.split("|") for line in blocks["fsdp"].splitlines()[2:]]
    assert len(rows) == 7 and all(cell.strip() for row in rows for cell in row[1:-1])
    assert all(len(table.splitlines()) > 4 for table in blocks.values())


def test_what_is_said_of_fsdp_is_of_the_results():
    document = _report.BENCHMARKS.read_text()
    said = " ".join(document[document.index("<!-- fsdp -->") :].split())
    for hosts in (2, 4):
        rows = {row["impl"]: row for row in _report.load(f"fsdp-{hosts}-hosts-100mbit.json")["rows"]}
        steps = {way: row["median_s"] for way, row in rows.items()}
        gradients = {way: row["figures"]["gradients_s"] for way, row in rows.items()}
        ours = [f"fusedcomm {wire}" for wire in ("bf16", "int8", "int4")]
        for of_ways in (
            [gradients["fusedcomm fp32"] / gradients[way] for way in ours],
            [steps["fully_shard"] / steps[way] for way in ours],
        ):
            assert "{:.2f}, {:.2f} and {:.2f}".format(*of_ways) in said
        assert f"{steps['no gradients'] / steps['fusedcomm int4']:.0%} " in said


@pytest.fixture
def plotting():
    pytest.importorskip("matplotlib")


@pytest.mark.full
def test_every_picture_is_drawn_from_the_results(plotting, tmp_path, monkeypatch):
    import _pictures

    monkeypatch.setattr(_pictures, "FOLDER", tmp_path)
    _pictures.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn <= {path.name for path in (BENCH.parent / "docs" / "pictures").iterdir()} and len(drawn) == 5
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 5000
