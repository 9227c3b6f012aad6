"""bench/local_speed.py: the table of its results."""

import pytest


@pytest.fixture
def bench(bench_modules):
    import local_speed

    return local_speed


def row(**others):
    of_turns = {"alone_s": [10.0, 8.0, 12.0], "local_s": [10.0, 10.0, 10.0]}
    found = {"every": 10, "wire": "int4", "delay": 5, "steps": 20, "line_s": 0.5, "sent_nbytes": 1000, "waited_s": 0.6}
    return {**found, **of_turns, **others}


def test_turns_are_compared_one_by_one_and_the_line_bounds_the_speed(bench, capsys):
    bench.print_rows("20mbit", [row(), row(line_s=10.0)])
    _, link, columns, fits, bound = capsys.readouterr().out.splitlines()
    assert link == "20mbit" and columns.split()[:3] == ["H", "wire", "delay"]
    # A step takes half a second, so ten of them five seconds.
    assert fits.split() == ["10", "int4", "5", "0.100", "1.000", "1.000", "0.800", "1.200", "500.0", "10.00"]
    # A message takes twenty steps, five of them hidden: ten steps and a wait of fifteen.
    assert bound.split()[3:5] == ["2.000", "0.400"]
