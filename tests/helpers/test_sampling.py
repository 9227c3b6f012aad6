"""tests/helpers/sampling.py: `make test` runs every value, and `make test-all` every case."""

import itertools
import types

import pytest
from sampling import covering, sampled

CASES = [
    {"wire": wire, "dtype": dtype, "shape": shape}
    for wire, dtype, shape in itertools.product(["bf16", "int8", "int4"], ["float32", "float16"], "abcd")
]


@pytest.mark.parametrize(
    ("most", "is_there"), [(4, lambda _: True), (6, lambda case: case["wire"] == "bf16" or case["shape"] == "a")]
)
def test_every_value_that_there_is_appears_in_few_cases(most, is_there):
    cases = list(filter(is_there, CASES))
    chosen = [cases[index] for index in covering(cases)]
    values = [{value for case in some for value in case.items()} for some in (chosen, cases)]
    assert values[0] == values[1] and len(chosen) <= most


class Item:
    """The parts of a pytest item that sampled() uses."""

    def __init__(self, name, *marks, **params):
        self.nodeid = f"test_x.py::{name}[{params}]"
        self.get_closest_marker = {mark.name: mark.mark for mark in marks}.get
        self.callspec = types.SimpleNamespace(params=params, indices=dict.fromkeys(params, 0))


def test_unmarked_tests_run_whole_and_marked_ones_in_part():
    mark, by_first = pytest.mark.sampled, pytest.mark.sampled(by=lambda text: {"first": text[0]})
    plain = [Item("plain", number=number) for number in range(5)]
    matrix = [Item("matrix", mark, a=a, b=b) for a in range(3) for b in "xy"]
    features = [Item("features", by_first, text=text) for text in ("xy", "xz", "y")]
    every = [each for group in (plain, matrix, features) for each in group] + [Item("whole", pytest.mark.full)]
    run, left_out = sampled(every)
    assert [each for each in every if each in run] == run and [each for each in every if each in left_out] == left_out
    assert len(run) == 5 + 3 + 2 and len(left_out) == 3 + 1 + 1 and run[:5] == plain
    assert {each.callspec.params["b"] for each in run[5:8]} == {"x", "y"}
    assert run == sampled(every)[0]


def test_one_case_runs_where_there_are_no_values_to_cover():
    items = [Item("matrix", pytest.mark.sampled(by=lambda text: {}), text=text) for text in "xyz"]
    assert [len(each) for each in sampled(items)] == [1, 2]


def test_values_are_covered_by_cases_that_are_not_full():
    full = {"y": [pytest.mark.full], "x": []}
    items = [Item("matrix", pytest.mark.sampled, *full[b], a=a, b=b) for a in range(3) for b in "yx"]
    assert [each.callspec.params for each in sampled(items)[0]] == [{"a": a, "b": "x"} for a in range(3)]
