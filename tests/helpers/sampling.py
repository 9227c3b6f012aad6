"""Which cases of a large matrix `make test` runs. `make test-all` (pytest --all) runs every one.

A test function marked ``sampled`` keeps few of its cases, but every value of every parameter appears in one of them;
marked ``sampled(strength=2)``, every pair of values of two parameters that any case has. That is a covering array. The
choice depends only on the cases, so all of pytest-xdist's workers choose alike.

What is marked ``full``, whole benchmarks and the largest sizes, is for `make test-all` alone.

``sampled(by=function)`` covers the values of the dictionary that the function makes of a case's parameters instead: for
cases that are chosen by hand and have a name, of what the name stands for.
"""

import itertools
from collections.abc import Callable

import pytest


def covering(cases: list[dict[str, str]], strength: int) -> list[int]:
    """Indices of few cases in which every combination of `strength` parameters' values appears that any case has.

    Greedy: the next one has most combinations that have not appeared. Ties are broken by the order of cases, from
    alternating ends, since neighbours differ least.
    """
    combinations = [set(itertools.combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    missing = set().union(*combinations)
    chosen = []
    while missing:
        order = range(len(cases)) if len(chosen) % 2 == 0 else range(len(cases) - 1, -1, -1)
        best = max(order, key=lambda index: len(combinations[index] & missing))
        missing -= combinations[best]
        chosen.append(best)
    return sorted(chosen)


def values(item: pytest.Item, by: Callable[..., dict] | None) -> dict[str, str]:
    """What of a case is to be covered, as text that is the same in every process: where a parameter's text has an
    address in memory, its number in the list of values."""
    if by is not None:
        return {name: repr(value) for name, value in by(**item.callspec.params).items()}
    case = {}
    for name, value in item.callspec.params.items():
        text = repr(value)
        case[name] = str(item.callspec.indices[name]) if " at 0x" in text else text
    return case


def sampled(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(What runs, what does not), both in the order of `items`. What needs a GPU is chosen separately, so that no value
    appears only in cases that skip themselves."""
    matrices: dict[tuple, list[pytest.Item]] = {}
    left_out = {item for item in items if item.get_closest_marker("full")}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and hasattr(item, "callspec"):
            needs_gpu = item.get_closest_marker("gpu") is not None
            matrices.setdefault((item.nodeid.partition("[")[0], needs_gpu), []).append(item)
    for matrix in matrices.values():
        options = matrix[0].get_closest_marker("sampled").kwargs
        chosen = covering([values(item, options.get("by")) for item in matrix], options.get("strength", 1))
        left_out.update(set(matrix) - {matrix[index] for index in chosen})
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]
