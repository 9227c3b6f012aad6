"""What benchmarks have from the tests: `reference`, their definition of the codec, with which results are checked
before they are timed, the counter of bytes that a process sends over TCP, and the members' rules in a simulated
network."""

import sys

from lib.common import REPOSITORY

sys.path.append(str(REPOSITORY / "tests" / "helpers"))
import reference  # noqa: E402
from members_world import Process, World  # noqa: E402
from tcp_counter import tcp_nbytes_sent  # noqa: E402

__all__ = ["Process", "World", "reference", "tcp_nbytes_sent"]
