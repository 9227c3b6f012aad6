"""This host's name, and the addresses at which other processes may reach it. Loads no torch."""

import contextlib
import os
import socket
import struct

SIOCGIFADDR = 0x8915
"""Linux's request for an interface's address, in sockios.h."""
_OUTSIDE = ("192.0.2.1", 9)
"""An address that nobody has. A datagram socket that is connected to it sends nothing; it only gets a route."""


def host_name() -> str:
    """The name of this host. Ranks with the same one share a host."""
    return socket.gethostname()


def own_process() -> str:
    """Names this process and its host, for people."""
    return f"process {os.getpid()} on {host_name()}"


def numeric(host: str) -> str:
    """The first numeric address of a host. Raises OSError if its name has none."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def towards(host: str, port: int) -> str:
    """The address of the interface from which packets go there; nothing is sent. Raises OSError if there is none."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.connect(address)
        return str(asked.getsockname()[0])


def of_interface(name: str) -> str | None:
    """The IPv4 address of an interface; None if it has none, or is not there."""
    import fcntl  # Linux has it

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            answer = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def candidates() -> list[str]:
    """IPv4 addresses at which others may reach this host, the likeliest first: those of the interfaces in
    GLOO_SOCKET_IFNAME, else those of the host's name and of the interface that leads outside; loopback last."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    found = [address for name in names if (address := of_interface(name))]
    if not found:
        with contextlib.suppress(OSError):
            infos = socket.getaddrinfo(host_name(), None, socket.AF_INET, socket.SOCK_STREAM)
            found += [str(info[4][0]) for info in infos]
        with contextlib.suppress(OSError):
            found.append(towards(*_OUTSIDE))
    # A host's name often stands for loopback.
    return list(dict.fromkeys([*(each for each in found if not each.startswith("127.")), "127.0.0.1"]))
