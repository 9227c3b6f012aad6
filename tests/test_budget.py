"""The budget of lines and words."""

import json

import budget


def test_nothing_is_over_its_limit():
    assert not budget.passed()
    assert set(json.loads(budget.LIMITS.read_text())) == set(budget.COUNTED)
