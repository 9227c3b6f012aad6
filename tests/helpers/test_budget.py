"""--executed-minutes leaves out marked tests when their time is spent, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = """
from budget import Budget

def pytest_addoption(parser):
    parser.addoption("--executed-minutes", type=float)

def pytest_configure(config):
    config.addinivalue_line("markers", "executed")
    config.pluginmanager.register(Budget())
"""
TESTS = """
import pytest
import pytest

@pytest.mark.executed
def test_first(): pass

@pytest.mark.executed
def test_second(): pass

def test_other(): pass
"""


def run(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", folder, folder, *options]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True).stdout


@pytest.mark.full
def test_leaves_marked_tests_out_when_the_time_is_spent(tmp_path):
    told = run(tmp_path, "--executed-minutes", "0", "-rs")
    assert "2 passed, 1 skipped" in told
    assert "1 tests of compiled code ran, 1 were left" in told
    assert "--executed-minutes" in told


def test_without_the_option_all_run(tmp_path):
    told = run(tmp_path)
    assert "3 passed" in told
    assert "2 tests of compiled code ran, 0 were left" in told
