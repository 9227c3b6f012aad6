"""The tables of bench/results/probe.md against the results that they are made from."""

import sys
from pathlib import Path

import pytest

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
