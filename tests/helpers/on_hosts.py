"""Hosts on lines of 100 Mbit/s, for tests of what a line makes of messages. Shared by the tests."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))  # for good: ranks import what uses this, too

import hosts  # noqa: E402
from lib import namespaces  # noqa: E402

PROBLEM = namespaces.problem()
needs_hosts = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))


def printed_by(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture, ends_well: bool = True, num_hosts: int = 2
) -> str:
    """What its ranks print, one on each host. It has to end well, or not to."""
    path = tmp_path / "script.py"
    path.write_text(script)
    with hosts.make(num_hosts, "100mbit") as cluster:
        assert (cluster.torchrun([str(path)]) == 0) == ends_well
    return capsys.readouterr().out
