"""The command line: what ``doctor`` says, and what the version is."""

import importlib.metadata
import platform
import re

import pytest
from scripts import python

import fusedcomm
from fusedcomm.tools.cli import main

# ---- versions


def test_the_version_is_told_without_torch():
    hide = "import sys; sys.modules['torch'] = None; from fusedcomm.tools import cli; sys.exit(cli.main())"
    done = python("-c", hide, "--version")
    assert done.returncode == 0, done.stderr
    first, torch, last = done.stdout.splitlines()
    assert first.startswith(f"fusedcomm {fusedcomm.__version__}")
    assert torch == f"torch {importlib.metadata.version('torch')}" and last == f"Python {platform.python_version()}"


# ---- doctor


def doctor(capsys) -> tuple[int, str]:
    """(exit status, output) of the command in this process."""
    status = main(["doctor"])
    return status, capsys.readouterr().out


def test_doctor_says_what_there_is(capsys):
    status, said = doctor(capsys)
    assert status == 0
    for word in ("torch", "gloo yes", "compiler", "portable", "supported over gloo"):
        assert word in said


@pytest.mark.check
@pytest.mark.parametrize("module", ["fusedcomm._C", "torch"])
def test_doctor_runs_without(module):
    hide = (
        f"import sys; sys.modules[{module!r}] = None; from fusedcomm.tools import cli; sys.exit(cli.main(['doctor']))"
    )
    done = python("-c", hide)
    assert done.returncode == 1, done.stderr
    assert "cannot be used" in done.stdout and "make build" in done.stdout or module == "torch"
    assert not done.stderr


@pytest.mark.check
def test_without_the_extension_a_command_says_how_to_build_it():
    hide = "import sys; sys.modules['fusedcomm._C'] = None; from fusedcomm.tools import cli; sys.exit(cli.main())"
    done = python("-c", hide, "probe")
    assert done.returncode == 1 and "make build" in done.stderr
    assert "pip install --no-build-isolation" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "status", "words"),
    [
        ("CXX", "", 0, r"c\+\+"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", 0, "CUDA_DEVICE_MAX_CONNECTIONS=1: .* wait for each other, so"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "3", 0, "CUDA_DEVICE_MAX_CONNECTIONS=3: on CUDA the .* share 3 queues"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "5", 0, "CUDA_DEVICE_MAX_CONNECTIONS=5: on CUDA, with sums on two levels, the"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "8", 0, "^((?!CUDA_DEVICE_MAX_CONNECTIONS)[\\s\\S])*$"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "", 0, "^((?!CUDA_DEVICE_MAX_CONNECTIONS)[\\s\\S])*$"),
        ("FUSEDCOMM_ISA", "abacus", 1, "FUSEDCOMM_ISA=abacus"),
    ],
)
def test_doctor_says_what_a_variable_does(capsys, monkeypatch, variable, value, status, words):
    monkeypatch.setenv(variable, value)
    found, said = doctor(capsys)
    assert found == status and re.search(words, said)
