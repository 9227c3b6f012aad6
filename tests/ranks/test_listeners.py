"""Where this process listens: at the addresses that the pages name, never on all interfaces without need."""

import contextlib
import socket
from pathlib import Path

import pytest
from patience import HANG_S
from processes import listening_ports

import fusedcomm
from fusedcomm.ranks.own_group import served_store


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=HANG_S):
        return True
    return False


WAYS = {
    "store": served_store,
    "members": fusedcomm.Members,
}


def heard_at(rank, world_size, way, host, other):
    """For each new port: whether it is open at the host's address, and at the other one."""
    found = []
    for _ in range(3):  # another process may have the same port at the other address
        before = listening_ports()
        made = WAYS[way](host=host)
        found = [(answers(host, port), answers(other, port)) for port in listening_ports() - before]
        if isinstance(made, fusedcomm.Members):
            made.leave()
        if (True, True) not in found:
            break
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "127.0.0.2"), ("::1", "127.0.0.1")])
def test_a_process_listens_at_the_address_that_it_was_given_alone(ranks, way, host, other):
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 there")
    (found,) = ranks.run(heard_at, way, host, other, world_size=1)
    assert found != [] and set(found) == {(True, False)}
