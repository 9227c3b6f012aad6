"""The budget of `make test`: what one case, and all of them together, may take at the speed of an idle core. What was
made quick stays quick."""

import time

import pytest
from _pytest.runner import runtestprotocol
from patience import measured_slowness

CASE_S = 2.0
"""Seconds of the test's own call, without its fixtures."""
ALL_S = 12 * 60.0
"""Seconds of all workers, with fixtures."""
MEASURED_EVERY_S = 5.0


class CaseTimes:
    """Fails a run with a case over CASE_S, or with cases that add up to more than ALL_S, each divided by the slowness
    that was measured beside it. A case that seems too slow runs once more, since a machine may pause; it fails the run
    if that took too long again."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._too_slow: dict[str, float] = {}
        self._slowness, self._measured_at = 1.0, float("-inf")

    def _normal(self, seconds: float) -> float:
        """What took `seconds` until now, at the speed of an idle core."""
        if time.monotonic() - self._measured_at > MEASURED_EVERY_S or seconds / self._slowness > CASE_S:
            self._slowness, self._measured_at = measured_slowness(), time.monotonic()
        return seconds / self._slowness

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        self._total_s += self._normal(sum(report.duration for report in reports))
        if self._call_s(reports) > CASE_S and all(report.passed for report in reports):
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
            if (call_s := self._call_s(reports)) > CASE_S:
                self._too_slow[item.nodeid] = call_s
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _call_s(self, reports: list[pytest.TestReport]) -> float:
        return self._normal(sum(report.duration for report in reports if report.when == "call"))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        if output := getattr(node, "workeroutput", None):
            self._total_s += output["total_s"]
            self._too_slow |= output["too_slow"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput.update(total_s=self._total_s, too_slow=self._too_slow)
        elif session.exitstatus == pytest.ExitCode.OK and (self._too_slow or self._total_s > ALL_S):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        taken = f"{self._total_s:.0f} s of {ALL_S:.0f} s that the cases may take together on an idle core"
        terminalreporter.write_sep("-", taken)
        if self._total_s > ALL_S:
            terminalreporter.write_line(f"FAILED {taken}: make some cheaper, or mark them `check`", red=True)
        for nodeid, seconds in sorted(self._too_slow.items()):
            what = f"FAILED {nodeid} took {seconds:.1f} s on an idle core, twice, and may take {CASE_S}"
            terminalreporter.write_line(f"{what}: make it cheaper, or mark it `check`", red=True)
