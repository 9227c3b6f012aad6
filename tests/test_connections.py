"""What a process knows of its TCP connections: what has not left them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_what_the_other_end_does_not_take_has_not_left(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        pytest.skip("needs a C++ compiler: there is no g++, and CXX is not set")
    binary = tmp_path / "scene"
    sources = [ROOT / "tests/native/connections_scene.cpp", ROOT / "csrc/connections.cpp"]
    subprocess.run([compiler, "-std=c++17", "-O1", *sources, "-o", binary], check=True)
    printed = subprocess.run([binary], capture_output=True, text=True, check=True).stdout.splitlines()
    given, (unsent, arrived, *own), (unsent_later, arrived_later, *own_later) = (
        int(printed[0]),
        *(line.split() for line in printed[1:]),
    )
    # The other end's window is full; IPv4 on a socket for both is told as IPv4.
    assert 0 < int(unsent) < given and int(arrived) <= given - int(unsent)
    assert own == own_later == ["127.0.0.1"]
    # The first byte that TCP counts is none of those given.
    assert int(unsent_later) == 0 and int(arrived) < int(arrived_later) and 0 <= int(arrived_later) - given <= 2
