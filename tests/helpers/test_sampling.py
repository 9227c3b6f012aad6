"""tests/helpers/sampling.py: `make test` meets every value, and `make test-all` every case."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S
from sampling import covering

CASES = [
    {"wire": wire, "dtype": dtype, "shape": shape}
    for wire, dtype, shape in itertools.product(["bf16", "int8", "int4"], ["float32", "float16"], "abcd")
]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 15)])
def test_every_combination_of_so_many_values_appears(strength, most):
    def combinations(cases):
        return {together for case in cases for together in itertools.combinations(case.items(), strength)}

    chosen = [CASES[index] for index in covering(CASES, strength)]
    assert combinations(chosen) == combinations(CASES) and len(chosen) <= most


def test_what_excludes_itself_is_not_missed():
    cases = [case for case in CASES if case["wire"] == "bf16" or case["shape"] == "a"]
    chosen = [cases[index] for index in covering(cases, 2)]
    assert {(case["wire"], case["shape"]) for case in chosen} == {(case["wire"], case["shape"]) for case in cases}


def test_one_case_that_is_named_runs():
    assert covering(CASES[5:6], 2) == [0]


MATRIX = """
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", [object, int])
def test_matrix(a, b): pass

@pytest.mark.sampled(by=lambda name: {"first": name[0]})
@pytest.mark.parametrize("name", ["xy", "xz", "y"])
def test_features(name): pass

@pytest.mark.parametrize("c", range(5))
def test_of_all(c): pass
"""


@pytest.mark.parametrize(("options", "expected"), [([], 3 + 2 + 5), (["--all"], 6 + 3 + 5), (["-k", "xz"], 1)])
def test_sampled_tests_run_in_part_and_others_whole(tmp_path, options, expected):
    (tmp_path / "test_matrix.py").write_text(MATRIX)
    (tmp_path / "conftest.py").write_text("from fusedcomm_tests_conftest import *\n")
    tests = Path(__file__).parents[1]
    (tmp_path / "fusedcomm_tests_conftest.py").symlink_to(tests / "conftest.py")
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {tests / 'helpers'} {tmp_path}\nmarkers =\n    sampled: as in pyproject.toml\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path)
    assert f"{expected} passed" in done.stdout, done.stdout + done.stderr
