"""The budget of `make test`: what one case, and all of them together, may take on idle cores. What was made quick stays
quick."""

import time

import pytest
from _pytest.runner import runtestprotocol
from processes import scheduled

CASE_S = 2.0
"""Seconds of the test's own call, without its fixtures, over which a case is listed."""
ALL_S = 4 * 60.0
"""Seconds of all workers, with fixtures."""
SLOWER = 4.0
"""How many times as slow a machine may be: a run fails if a case, or all together, take so many times as long."""
COUNTED_S = 0.05
"""Seconds that processes must have run, so that it tells how long they had to wait for a core."""
REMEMBERED = 0.9
"""Share of the earlier cases' times that counts after one more case."""


class CaseTimes:
    """Lists the cases over CASE_S. Fails a run with one over SLOWER * CASE_S, or with cases over SLOWER * ALL_S in all.

    Times are divided by the slowness meanwhile: how many times as long as they ran the main threads of the case's
    processes took to run, with their waits for a core. So other programs, and the other workers, do not count. A
    program that a case has started and that has ended is not counted any more, so the slowness of the worker's latest
    cases holds where it is greater. Without these counts, which come from Linux, nothing is too slow. A case that seems
    too slow runs once more, since a machine may pause.
    """

    def __init__(self) -> None:
        self._total_s = 0.0
        self._ran_s = self._waited_s = 0.0  # in the latest cases
        self._slow: dict[str, float] = {}  # over CASE_S

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports, taken_s, call_s = self._run(item, nextitem)
        self._total_s += taken_s
        # After a worker's last case its ranks have ended, and would have to start again.
        if nextitem is not None and all(report.passed for report in reports):
            if call_s > SLOWER * CASE_S:
                reports, _, call_s = self._run(item, nextitem)
            if call_s > CASE_S:
                self._slow[item.nodeid] = call_s
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
            self._slow |= output["slow"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput.update(total_s=self._total_s, slow=self._slow)
        elif session.exitstatus == pytest.ExitCode.OK and self._too_slow():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        taken = f"{self._total_s:.0f} s on idle cores, and may take {SLOWER * ALL_S:.0f}"
        terminalreporter.write_sep("-", f"the cases together took {taken}")
        for nodeid, seconds in sorted(self._slow.items()):
            what = f"{nodeid} took {seconds:.1f} s on idle cores: a case should take {CASE_S}"
            terminalreporter.write_line(f"{what}. Make it cheaper, or mark it `check`")
        for what in self._too_slow():
            terminalreporter.write_line(f"FAILED {what}", red=True)

    def _too_slow(self) -> list[str]:
        """What fails the run, in words."""
        found = [
            f"{nodeid} took {seconds:.1f} s on idle cores, twice, and may take {SLOWER * CASE_S}"
            for nodeid, seconds in sorted(self._slow.items())
            if seconds > SLOWER * CASE_S
        ]
        if self._total_s > SLOWER * ALL_S:
            found.append(f"all cases together took {self._total_s:.0f} s on idle cores: mark some `check`")
        return found
