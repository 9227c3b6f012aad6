"""The tables and pictures of results are those of the JSON in bench/results."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import _report  # noqa: E402
import _steps_report  # noqa: E402

STEPS = _steps_report.load(list(_steps_report.RESULTS.glob(f"{_steps_report.PREFIX}*.json")))


def generated() -> dict[Path, dict[str, str]]:
    """The tables of each document, by their names."""
    found = _report.tables()
    of_steps = [_steps_report.SPEED_UPS, *dict.fromkeys(result.name for result in STEPS)]
    found[_steps_report.DOCUMENT] = _steps_report.tables(STEPS, of_steps)
    found[_steps_report.README] |= _steps_report.tables(STEPS, [_steps_report.HEADLINE])
    return found


def test_documents_have_the_tables_of_the_results():
    for document, tables in generated().items():
        assert _steps_report.blocks_of(document.read_text()) == tables, document
        assert all(tables.values()), document


def test_a_case_of_readmes_table_was_run_with_every_stock_hook_that_could_be_the_best():
    headline = [result for result in STEPS if (result.name, result.case) in _steps_report.HEADLINE_CASES]
    assert len(headline) == len(_steps_report.HEADLINE_CASES)
    for result in headline:
        assert set(hooks_to_run(result)) <= set(result.rows), result.name


def hooks_to_run(result: _steps_report.Result) -> tuple[str, ...]:
    """The two fp16 hooks send the same bytes, so one of them is enough in a case that computes for long, where their
    own cost is hidden; where nearly all is hidden, any."""
    share = 1 - result.compute_s / result.baseline_s
    if share > 0.6:
        return _steps_report.STOCK_HOOKS
    return ("c++ fp16 hook", "python bf16 hook") if share > 0.1 else ("c++ fp16 hook",)


@pytest.mark.full
def test_every_picture_is_drawn_from_the_results(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import _pictures

    monkeypatch.setattr(_pictures, "FOLDER", tmp_path)
    _pictures.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn <= {path.name for path in (BENCH.parent / "docs" / "pictures").iterdir()} and len(drawn) == 5
    assert min(path.stat().st_size for path in tmp_path.iterdir()) > 5000
