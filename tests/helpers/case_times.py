"""The budget of `make test`: what one case, and all of them together, may take on idle cores. What was made quick stays
quick."""

import time

import pytest
from _pytest.runner import runtestprotocol
from processes import scheduled

CASE_S = 2.0
"""Seconds of the test's own call, without its fixtures."""
ALL_S = 12 * 60.0
"""Seconds of all workers, with fixtures."""
COUNTED_S = 0.05
"""Seconds that processes must have run, so that it tells how long they had to wait for a core."""
REMEMBERED = 0.9
"""Share of the earlier cases' times that counts after one more case."""


class CaseTimes:
    """Fails a run with a case over CASE_S, or with cases that add up to more than ALL_S.

    Times are divided by the slowness meanwhile: how many times as long as they ran the main threads of the case's
    processes took to run, with their waits for a core. So other programs, and the other workers, do not count. A
    program that a case has started and that has ended is not counted any more, so the slowness of the worker's latest
    cases holds where it is greater. Without these counts, which come from Linux, nothing is too slow. A case that seems
    so runs once more, since a machine may pause.
    """

    def __init__(self) -> None:
        self._total_s = 0.0
        self._ran_s = self._waited_s = 0.0  # in the latest cases
        self._too_slow: dict[str, float] = {}

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports, taken_s, call_s = self._run(item, nextitem)
        self._total_s += taken_s
        # After a worker's last case its ranks have ended, and would have to start again.
        if call_s > CASE_S and nextitem is not None and all(report.passed for report in reports):
            reports, _, call_s = self._run(item, nextitem)
            if call_s > CASE_S:
                self._too_slow[item.nodeid] = call_s
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> tuple[list[pytest.TestReport], float, float]:
        """Runs a case. Returns its reports, and the seconds on idle cores in all and of its call."""
        before, began = scheduled(), time.monotonic()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        taken_s = time.monotonic() - began
        ran_s = waited_s = 0.0
        for pid, (ran, waited) in scheduled().items():
            ran_before, waited_before = before.get(pid, (0.0, 0.0))
            ran_s, waited_s = ran_s + ran - ran_before, waited_s + waited - waited_before
        self._ran_s = REMEMBERED * self._ran_s + ran_s
        self._waited_s = REMEMBERED * self._waited_s + waited_s
        times = (ran_s, waited_s), (self._ran_s, self._waited_s)
        slowness = max((1 + waited / ran for ran, waited in times if ran > COUNTED_S), default=1.0)
        if not before:
            slowness = float("inf")
        call_s = sum(report.duration for report in reports if report.when == "call")
        return reports, taken_s / slowness, call_s / slowness

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
        taken = f"{self._total_s:.0f} s of {ALL_S:.0f} s that the cases may take together on idle cores"
        terminalreporter.write_sep("-", taken)
        if self._total_s > ALL_S:
            terminalreporter.write_line(f"FAILED {taken}: make some cheaper, or mark them `check`", red=True)
        for nodeid, seconds in sorted(self._too_slow.items()):
            what = f"FAILED {nodeid} took {seconds:.1f} s on idle cores, twice, and may take {CASE_S}"
            terminalreporter.write_line(f"{what}: make it cheaper, or mark it `check`", red=True)
