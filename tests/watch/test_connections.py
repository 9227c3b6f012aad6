"""The unsent bytes of a process's TCP connections."""

import subprocess
import sys

import pytest
from scripts import compiled

pytestmark = pytest.mark.check


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports unsent bytes")
def test_what_the_other_end_does_not_take_has_not_left(tmp_path):
    binary = compiled(tmp_path, "tests/native/connections_scene.cpp", "csrc/watch/connections.cpp")
    printed = subprocess.run([binary], capture_output=True, text=True, check=True).stdout.splitlines()
    given, (unsent, arrived, *own), (unsent_later, arrived_later, *own_later) = (
        int(printed[0]),
        *(line.split() for line in printed[1:]),
    )
    # The other end's window is full. An IPv4 connection of a dual-stack socket has an IPv4 address. TCP also counts one
    # byte that the process has not written.
    assert 0 < int(unsent) < given and int(arrived) <= given - int(unsent) + 1
    assert own == own_later == ["127.0.0.1"]
    assert int(unsent_later) == 0 and int(arrived) < int(arrived_later) and 0 <= int(arrived_later) - given <= 2
