"""Where this process listens: at the addresses that the pages name, never on all interfaces without need."""

import datetime
import os
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

import fusedcomm
from fusedcomm.horovod import control, launch
from fusedcomm.ranks.own_group import served_store

EVERYWHERE = {"0" * 8, "0" * 32}
SOON = datetime.timedelta(seconds=0.1)


def listening() -> set[tuple[str, int]]:
    """(Address as the system writes it, port) of each listener of this process."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return {(host, int(port, 16)) for host, port in found}


def horovods_store(host: str) -> dist.Store:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        port = free.getsockname()[1]
    return launch._store_at(host, port, True, SOON)


def horovods_door(host: str) -> object:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        return control._Door("", "", 2)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


WAYS = {
    "store": served_store,
    "members": fusedcomm.Members,
    "horovod's store": horovods_store,
    "horovod's door": horovods_door,
}


def added(rank, world_size, way, host):
    before = listening()
    made = WAYS[way](host=host)
    found = {address for address, _ in listening() - before}
    if isinstance(made, fusedcomm.Members):
        made.leave()
    return sorted(found)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_process_listens_at_the_address_that_it_was_given_alone(ranks, way, host):
    if host == "::1" and (way == "horovod's door" or not Path("/proc/net/if_inet6").exists()):
        pytest.skip("no IPv6 there")
    (addresses,) = ranks.run(added, way, host, world_size=1)
    assert addresses != [] and EVERYWHERE.isdisjoint(addresses)
    wanted = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    assert {bytes.fromhex(address) for address in addresses} == {swapped(wanted)}


def swapped(address: bytes) -> bytes:
    """As /proc/net has it on this machine: each four bytes as one number."""
    words = [address[at : at + 4] for at in range(0, len(address), 4)]
    return b"".join(int.from_bytes(word, "little").to_bytes(4, "big") for word in words)


def test_a_store_of_horovods_variables_may_be_served_by_this_process_already():
    first = horovods_store("127.0.0.1")
    again = launch._store_at("127.0.0.1", first.port, True, SOON)
    first.set("key", "value")
    assert again.get("key") == b"value"
