"""Chooses the cases of large parametrized tests that `make test` and `make check` run. `make test-all` (pytest --all)
runs every case.

Of a test function marked ``sampled`` few cases run, but every value of every parameter appears in one of them. The
choice depends only on the cases, so all pytest-xdist workers make the same choice.

With ``sampled(by=function)``, the values to cover are those of the dictionary that the function returns for a case's
parameters. It serves cases that have only a name as their parameter: the function returns what the name means.

Tests marked ``full`` (whole benchmarks and the largest sizes) run only in `make test-all`; of parameters from
``few(cases, …)`` only the named ones run in `make test`.
"""

from collections.abc import Callable, Iterable

import pytest


def covering(cases: list[dict[str, str]]) -> list[int]:
    """Returns the sorted indices of few cases that together contain every value of every parameter.

    The choice is greedy: the next case is the one with the most missing values. Of equally good cases it takes the
    first and the last in turn, because neighbors are the most similar.
    """
    # () is in every case, so that one is chosen where there is no value to cover.
    found = [{(), *case.items()} for case in cases]
    missing = set().union(*found)
    chosen = []
    while missing:
        order = range(len(cases)) if len(chosen) % 2 == 0 else range(len(cases) - 1, -1, -1)
        best = max(order, key=lambda index: len(found[index] & missing))
        missing -= found[best]
        chosen.append(best)
    return sorted(chosen)


def few(cases: Iterable, *default: object) -> list:
    """Parameters for `pytest.mark.parametrize`: all cases except `default` are marked ``full``."""
    return [case if case in default else pytest.param(case, marks=pytest.mark.full) for case in cases]


def values(item: pytest.Item, by: Callable[..., dict] | None) -> dict[str, str]:
    """The values of a case that must be covered, as texts that are the same in every process. If a value's repr has a
    memory address, its text is its index in the list of values."""
    if by is not None:
        return {name: repr(value) for name, value in by(**item.callspec.params).items()}
    case = {}
    for name, value in item.callspec.params.items():
        text = repr(value)
        case[name] = str(item.callspec.indices[name]) if " at 0x" in text else text
    return case


def sampled(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Returns (the items that run, the items that do not), both in the order of `items`. Cases that need a GPU are
    chosen separately, so that no value appears only in cases that skip themselves."""
    matrices: dict[tuple, list[pytest.Item]] = {}
    left_out = {item for item in items if item.get_closest_marker("full")}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark and item not in left_out and hasattr(item, "callspec"):
            needs_gpu = item.get_closest_marker("gpu") is not None
            matrices.setdefault((item.nodeid.partition("[")[0], needs_gpu), []).append(item)
    for matrix in matrices.values():
        options = matrix[0].get_closest_marker("sampled").kwargs
        chosen = covering([values(item, options.get("by")) for item in matrix])
        left_out.update(set(matrix) - {matrix[index] for index in chosen})
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]


def for_all_lists(actions: list, num_examples: int, law: Callable[[list], None]) -> None:
    """Calls `law` with all actions, and with short lists of them that hypothesis draws, the same ones in every run. It
    does not look for shorter ones if one fails: each may take seconds."""
    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st

    @settings(max_examples=num_examples, phases=[Phase.generate], derandomize=True, deadline=None, database=None)
    @given(st.lists(st.sampled_from(actions), min_size=2, max_size=6))
    def check(drawn: list) -> None:
        law(drawn)

    law(actions)
    check()
