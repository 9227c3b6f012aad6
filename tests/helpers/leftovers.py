"""What tests leave behind, each with the test that left it: processes, ports that the test's own process still listens
on, files in the folder for temporary files, which each worker has for itself."""

import multiprocessing.util
import os
import shutil
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from processes import listening_ports, with_variable

RUN = "FUSEDCOMM_TEST_RUN"
END_S = 60.0
"""How long processes that end with the tests may take for that."""
KEPT_BY_TORCH = ("torchinductor_", "torchelastic_")
"""How names of files begin that torch's compiler and torchrun leave."""
NEEDED_MB = 500


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one, which pytest-xdist has started."""
    return hasattr(config, "workerinput")


class Leftovers:
    def __init__(self, config: pytest.Config) -> None:
        self._found: list[str] = []
        self._left: dict[str | int, str] = {}  # a file's name or a port -> the test after which it was there
        if not is_worker(config):
            normal = tempfile.gettempdir()
            if (free_mb := shutil.disk_usage(normal).free >> 20) < NEEDED_MB:
                pytest.exit(
                    f"the tests need {NEEDED_MB} MB in {normal}, which has {free_mb}; or set TMPDIR", returncode=2
                )
            os.environ[RUN] = uuid.uuid4().hex
            os.environ.setdefault(
                "PYTEST_DEBUG_TEMPROOT", normal
            )  # tmp_path and its like stay where one looks for them
        multiprocessing.util.get_temp_dir()  # it removes its folder itself, at the very end
        self._folder = Path(tempfile.mkdtemp(prefix="fusedcomm-"))
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        num_open = len(os.listdir("/proc/self/fd"))
        result = yield
        new: set[str | int] = {name for name in os.listdir(self._folder) if not name.startswith(KEPT_BY_TORCH)}
        if len(os.listdir("/proc/self/fd")) > num_open:
            new |= listening_ports()
        self._left.update((each, item.nodeid) for each in new - self._left.keys())
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        files, ports = os.listdir(self._folder), listening_ports()
        self._found += [f"{test}: the file {self._folder / name}" for name, test in self._left.items() if name in files]
        self._found += [f"{test}: the port {port}, still open" for port, test in self._left.items() if port in ports]
        shutil.rmtree(self._folder, ignore_errors=True)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left"] = self._found
            return
        until = time.monotonic() + END_S
        while (left := with_variable(RUN, os.environ[RUN])) and time.monotonic() < until:
            time.sleep(0.05)
        for pid, (command, variables) in left.items():
            test = variables.get("PYTEST_CURRENT_TEST", "before the first test")
            self._found.append(f"{test}: process {pid}, {command}")
        if self._found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        self._found += getattr(node, "workeroutput", {}).get("left", [])

    def pytest_terminal_summary(self, terminalreporter) -> None:
        for what in self._found:
            terminalreporter.write_line(f"FAILED left behind by {what}", red=True)
