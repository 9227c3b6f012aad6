"""Limits the time that a process spends on tests of compiled code, which `make test-all` has hours of.

`pytest --executed-minutes M` skips the rest of the tests marked ``executed`` when this process has spent M minutes on
them. Such tests execute compiled kernels, compile edited sources to see whether the edit is found, or go on with random
input for long. The report ends with the number of those that ran and of those that were left.
"""

import time
from collections import Counter
from collections.abc import Iterator

import pytest

PROPERTY = "executed"


class Budget:
    """A pytest plugin."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        begin = time.monotonic()
        try:
            return (yield)
        finally:
            if item.get_closest_marker("executed"):
                self.spent_s += time.monotonic() - begin

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        minutes = item.config.getoption("--executed-minutes")
        if item.get_closest_marker("executed") is None:
            return
        left = minutes is not None and self.spent_s > 60 * minutes
        item.user_properties.append((PROPERTY, "left" if left else "ran"))
        if left:
            pytest.skip(f"this process has spent {minutes:g} minutes on compiled code: --executed-minutes")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        reports = [report for of_outcome in terminalreporter.stats.values() for report in of_outcome]
        tests = {x.nodeid: dict(x.user_properties) for x in reports if isinstance(x, pytest.TestReport)}
        counts = Counter(properties.get(PROPERTY) for properties in tests.values())
        if counts["ran"] or counts["left"]:
            text = f"{counts['ran']} tests of compiled code ran, {counts['left']} were left"
            terminalreporter.write_sep("-", text)
