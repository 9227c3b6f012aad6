"""Runs scripts on simulated hosts whose links have 100 Mbit/s, for tests of how a link affects messages."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))  # stays: ranks import this module, too

import _hosts as hosts  # noqa: E402
from lib import namespaces  # noqa: E402

PROBLEM = namespaces.problem()
needs_hosts = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))


def printed_by(
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    ends_well: bool = True,
    num_hosts: int = 2,
    ranks_per_host: int = 1,
) -> str:
    """Runs `script` with `ranks_per_host` ranks on each of `num_hosts` hosts and returns what the ranks print. The
    script must succeed if `ends_well`, and must fail otherwise."""
    path = tmp_path / "script.py"
    path.write_text(script)
    with hosts.make(num_hosts, "100mbit") as cluster:
        assert (cluster.torchrun([str(path)], ranks_per_host) == 0) == ends_well
    return capsys.readouterr().out
