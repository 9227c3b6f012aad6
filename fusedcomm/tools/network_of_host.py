"""The network of this host as gloo and NCCL use it: the interface, and TCP's congestion control. Loads no torch."""

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from fusedcomm.ranks import own_address

INTERFACES = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
ROUTES = Path("/proc/net/route")
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
LOOPBACK = "lo"


def lines() -> list[tuple[str, str]]:
    """(name, text) for ``fusedcomm doctor``: the interface of each backend, and the congestion control. A text says
    what to do if something is in the way."""
    return [("gloo uses", gloo()), ("NCCL uses", nccl()), ("TCP", congestion_control())]


def gloo() -> str:
    """The interface that gloo would use here, and why."""
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    if named:
        missing = [name for name in named.split(",") if INTERFACES.exists() and not (INTERFACES / name).exists()]
        if missing:
            wrong = f"GLOO_SOCKET_IFNAME={named}, and there is no {missing[0]}"
            return f"nothing: {wrong}; name one of {_names()}, or unset it"
        return f"{named}, which GLOO_SOCKET_IFNAME names"
    name, address = own_address.host_name(), _own_address()
    other = f"for several hosts set GLOO_SOCKET_IFNAME={default_interface() or 'eth0'}"
    if address is None:
        return f"{LOOPBACK}, which other hosts cannot reach: this host's name, {name}, has no address; {other}"
    if address.startswith("127.") or address == "::1":
        return (
            f"{LOOPBACK}, which other hosts cannot reach: this host's name, {name}, has the address {address}; {other}"
        )
    return f"{_interface_of(address)}: this host's name, {name}, has its address {address}"


def nccl() -> str:
    """The interface that NCCL would use here for sockets, and why."""
    named = os.environ.get("NCCL_SOCKET_IFNAME")
    if named:
        return f"{named}, which NCCL_SOCKET_IFNAME names"
    if INFINIBAND.is_dir() and (devices := sorted(path.name for path in INFINIBAND.iterdir())):
        return f"{', '.join(devices)}, by InfiniBand or RoCE, unless NCCL_IB_DISABLE=1"
    usable = [name for name in _names().split(", ") if name and name != LOOPBACK and not name.startswith("docker")]
    up = [name for name in usable if _state(name) == "up"]
    if not up:
        return f"{LOOPBACK}: no other interface is up, so it cannot reach other hosts"
    several = f". It takes the first that it finds; NCCL_SOCKET_IFNAME={up[0]} chooses" if len(up) > 1 else ""
    return f"{', '.join(up)}{several}"


def congestion_control() -> str:
    """TCP's congestion control, and what to do if it is bbr."""
    chosen = _read(CONGESTION_CONTROL)
    if chosen is None:
        return "congestion control unknown: this system does not say"
    if not chosen.startswith("bbr"):
        return f"congestion control {chosen}"
    others = [name for name in (_read(AVAILABLE) or "").split() if not name.startswith("bbr")]
    other = "cubic" if "cubic" in others or not others else others[0]
    return (
        f"congestion control {chosen}, a trap with more than two hosts: it paces each connection by the rate that it "
        "had before. Among four hosts at 100 Mbit/s exchanges got 0.75 to 0.92 of the line with bbr, and 0.93 to 0.95 "
        f"with cubic or reno. On every host, as root: sysctl -w net.ipv4.tcp_congestion_control={other}"
    )


def default_interface() -> str | None:
    """The interface of the default route; None if there is none."""
    for row in _rows(ROUTES):
        if len(row) > 1 and row[1] == "00000000":
            return row[0]
    return None


def _rows(path: Path) -> Sequence[list[str]]:
    text = _read(path)
    return [] if text is None else [line.split() for line in text.splitlines()[1:]]


def _names() -> str:
    """The interfaces of this host, separated by commas; empty if the system does not say."""
    return ", ".join(sorted(path.name for path in INTERFACES.iterdir())) if INTERFACES.is_dir() else ""


def _state(name: str) -> str:
    return _read(INTERFACES / name / "operstate") or "unknown"


def _interface_of(address: str) -> str:
    """The interface that has this IPv4 address; the address itself if that is not found."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if own_address.of_interface(name) == address), f"the interface with {address}")


def _own_address() -> str | None:
    """The first address of this host's name, where gloo listens; None if the name has none."""
    with contextlib.suppress(OSError):
        return own_address.numeric(own_address.host_name())
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
