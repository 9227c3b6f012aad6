"""The Makefile: what it says where a tool, a package or a variable is wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S

ROOT = Path(__file__).resolve().parent.parent


def made(*arguments: str) -> subprocess.CompletedProcess:
    # Neither variables nor options of a `make test` that runs this test.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    environment = {name: value for name, value in environment.items() if name not in ("PYTHON", "VENV", "TORCH", "CXX")}
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["check-tools", "PYTHON=no-such-python"],
            r"no-such-python: not found\. Install Python >= 3\.10 \(apt: python3 ",
        ),
        (
            ["check-tools", "CXX=no-such-compiler"],
            r"no-such-compiler: no such C\+\+ compiler\. Install one \(apt: g\+\+",
        ),
        (
            ["check-packages", "VENV=", "PACKAGES=no-such-package>=2"],
            r"lacks: no-such-package>=2 \(not there\)\. Install",
        ),
        (
            ["check-packages", "VENV=", "PACKAGES=torch>=99 pytest>=2"],
            r"lacks: torch>=99 \(it has \d+\.\d+.*\)\. Install",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_is_wrong_is_named_with_what_to_do(arguments, words):
    done = made(f"PYTHON={sys.executable}", *arguments)
    assert done.returncode == 2
    assert re.search(words, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (
            "import sys; sys.version_info = (3, 9, 1)",
            r"is Python .*, and fusedcomm needs 3\.10 or later\. Name another",
        ),
        (
            "import sysconfig; sysconfig.get_path = lambda name: '/no/headers'",
            r"has no Python\.h, .* \(apt: python3-dev",
        ),
        (
            "import sys; sys.modules['ensurepip'] = None",
            r"cannot make virtual environments\. .* or use the packages it has",
        ),
    ],
    ids=["version", "headers", "ensurepip"],
)
def test_a_python_that_will_not_do_is_refused(tmp_path, first, words):
    """The Python of this test, which first executes a line that takes something from it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\nshift; code=$1; shift\nexec {sys.executable} -c "{first}\n$code" "$@"\n')
    python.chmod(0o755)
    done = made("check-tools", f"PYTHON={python}")
    assert done.returncode == 2
    assert re.search(words, done.stderr), done.stderr


def test_another_torch_than_the_environments_is_refused(tmp_path):
    (tmp_path / ".torch").write_text("torch==2.12.0\n")
    done = made("build/.built-for", f"VENV={tmp_path}", "TORCH=torch==2.13.0")
    assert done.returncode == 2
    assert f"{tmp_path} was made with torch==2.12.0, and TORCH is torch==2.13.0: remove {tmp_path}, or" in done.stderr
