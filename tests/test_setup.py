"""setup.py: what it says where something is missing, which libraries it links, and how many units it compiles side by
side."""

import os
import re
import runpy
import subprocess
import sys
import tempfile

import pytest
import setuptools
from patience import HANG_S
from scripts import ROOT, python

from fusedcomm import memory

pytestmark = pytest.mark.check

GIB = 1 << 30


@pytest.fixture(autouse=True)
def folder_of_a_build(monkeypatch, tmp_path):
    """setup.py makes one that it removes when its process ends; some tests run it in their own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


PIP = r"(?s:.*)pip install --no-build-isolation \."
NO_TORCH = "sys.modules['torch'] = None"


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (NO_TORCH, "it is built against the torch that will load it, and Python .* cannot import" + PIP),
        ("import torch; torch.__version__ = '2.10.1+cpu'", "torch 2.11 or later is needed, .* has 2.10.1" + PIP),
        ("import setuptools; setuptools.__version__ = '65.5.0'", "setuptools 77 or later is needed, .* has 65.5" + PIP),
        # Other systems are named before anything is imported.
        (f"import setuptools; sys.platform = 'darwin'; {NO_TORCH}", r"builds on Linux only: .*this is darwin\. Use"),
        (f"import setuptools; sys.platform = 'win32'; {NO_TORCH}", r"builds on Linux only: .*this is win32\. Use"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(before, words):
    code = f"import runpy, sys; {before}; sys.argv = ['setup.py', '--version']; runpy.run_path('setup.py')"
    done = python("-c", code, cwd=ROOT)
    assert done.returncode == 1
    assert re.search(f"fusedcomm:? {words}", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"CXX": "no-such-compiler -O1"}, "fusedcomm: no C++ compiler no-such-compiler -O1. Install one"),
        ({"CXX": sys.executable, "PATH": ""}, "fusedcomm: ninja is needed and not found"),
    ],
    ids=["compiler", "ninja"],
)
def test_a_missing_tool_is_named_before_anything_is_compiled(tmp_path, variables, words):
    done = python("setup.py", "build_ext", "--build-lib", tmp_path, cwd=ROOT, **variables)
    assert done.returncode == 1
    assert words in done.stderr


@pytest.mark.parametrize(
    ("free_nbytes", "cores", "jobs"),
    [(64 * GIB, 4, 4), (8 * GIB, 4, 2), (1 * GIB, 4, 1), (0, 4, 1), (None, 4, 4), (64 * GIB, 1, 1)],
)
def test_no_more_is_compiled_at_once_than_memory_holds(monkeypatch, capsys, free_nbytes, cores, jobs):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    monkeypatch.setattr(memory, "free_nbytes", lambda: free_nbytes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert runpy.run_path("setup.py")["num_jobs"]() == jobs
    assert f"{jobs} at a time ({cores} cores; free memory" in capsys.readouterr().out


@pytest.mark.parametrize("copy", ["option", "only the static one is found"])
def test_libstdcxx_is_shared_with_torch_also_where_the_compiler_would_add_a_copy(monkeypatch, tmp_path, copy):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    compiler = "c++ -static-libstdc++"
    if copy != "option":
        found = subprocess.run(["c++", "-print-file-name=libstdc++.a"], capture_output=True, text=True).stdout.strip()
        (tmp_path / "libstdc++.a").symlink_to(found)
        compiler = f"c++ -B{tmp_path}/"
    source, library = tmp_path / "stream.cpp", tmp_path / "stream.so"
    source.write_text("#include <iostream>\nvoid write(int number) { std::cout << number; }\n")
    command = [*compiler.split(), "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=HANG_S)
    assert b"libstdc++.so" not in library.read_bytes()
    subprocess.run([*command, *runpy.run_path("setup.py")["shared_libstdcxx"](compiler)], check=True, timeout=HANG_S)
    assert b"libstdc++.so" in library.read_bytes()
