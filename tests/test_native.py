"""What importing the extension says where it was built for another torch."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from sampling import few
from scripts import python

import fusedcomm
from fusedcomm.version import BUILT_FOR, minor

pytestmark = pytest.mark.check


def imported(package: Path, built_for: str, statement: str) -> subprocess.CompletedProcess:
    """Runs a statement with a copy of fusedcomm in the folder `package`, built for another torch."""
    shutil.copytree(os.path.dirname(fusedcomm.__file__), package, ignore=shutil.ignore_patterns("_C.torch", "kernels"))
    (package / BUILT_FOR).write_text(f"{built_for}\n")
    # An editable install would find the checkout first.
    here = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]"
    code = f"{here}; sys.path.insert(0, {str(package.parent)!r}); {statement}"
    return python("-c", code)


def test_another_minor_version_of_torch_is_refused(tmp_path):
    done = imported(tmp_path / "fusedcomm", "2.5.1+cpu", "import fusedcomm; fusedcomm.attach")
    assert done.returncode == 1
    assert f"was built for torch 2.5.1+cpu, and this is torch {torch.__version__}: each minor version" in done.stderr
    assert "pip install --no-build-isolation --force-reinstall --no-deps ." in done.stderr
    assert "or install torch 2.5 again" in done.stderr


@pytest.mark.parametrize("build", few([".9+cu130", ".0a0+git0123"], ".9+cu130"))
def test_another_build_of_the_same_minor_version_is_used(tmp_path, build):
    built_for = minor(torch.__version__) + build
    show = "import fusedcomm.native; from fusedcomm.tools import cli; cli.main(['--version'])"
    done = imported(tmp_path / "fusedcomm", built_for, show)
    assert done.returncode == 0, done.stderr
    assert f"(built for torch {built_for})" in done.stdout


@pytest.mark.full
def test_an_unbuilt_checkout_that_hides_the_installed_package_is_named(tmp_path):
    checkout, installed = tmp_path / "checkout", tmp_path / "site-packages"
    for place in (checkout, installed):
        ignored = shutil.ignore_patterns("kernels", *(["_C*"] if place is checkout else []))
        shutil.copytree(os.path.dirname(fusedcomm.__file__), place / "fusedcomm", ignore=ignored)
    here = "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]"
    for places, words in (
        (
            [checkout, installed],
            f"the folder {checkout} holds a checkout of fusedcomm that has not been built, and hides",
        ),
        ([checkout], f"has not been built: there is none in {checkout / 'fusedcomm'}. Build it there with: make build"),
    ):
        others = "[each for each in sys.path if each and not __import__('glob').glob(each + '/fusedcomm')]"
        code = f"{here}; sys.path = {list(map(str, places))} + {others}; import fusedcomm.native"
        done = python("-c", code, cwd=tmp_path)
        assert done.returncode == 1 and words in done.stderr, done.stderr
        if installed in places:
            assert f"is installed in {installed}: " in done.stderr
            assert "Run from another folder" in done.stderr and "or build it there with: make build" in done.stderr
