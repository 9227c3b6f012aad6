"""Network namespaces that a bridge joins. They are made for one run and removed with it; nothing else is touched.

    switch: bridge ─┬─ port0 ══ eth0 :host0
                    └─ port1 ══ eth0 :host1        ══ a veth pair, limited at both ends

The bridge is in its own namespace and every pair is made inside two namespaces, so no interface ever appears in the
machine's own network. Each run has a token. Its namespaces are named PREFIX + token + "-" + name, and a file with the
token's name is locked while the run's process exists. Only namespaces with the token of such a file are entered or
removed.
"""

import contextlib
import dataclasses
import fcntl
import ipaddress
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "fusedcomm-hosts-"
RECORDS = Path("/run/fusedcomm-hosts")
INTERFACE = "eth0"
# The first of these that this machine does not use is taken.
SUBNETS = ("10.213.0.0/24", "172.29.213.0/24", "192.168.213.0/24")
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
TOOLS = {
    "ip": "iproute2 (dnf: iproute)",
    "tc": "iproute2 (dnf: iproute-tc)",
    "unshare": "util-linux",
    "taskset": "util-linux",
}

# A link's token bucket holds 1 ms of its rate, and at least MIN_BURST_NBYTES. Timers are late by less than 1 ms even on
# a busy machine, and a link that was idle can exceed its rate by no more than these bytes.
BURST_S, MIN_BURST_NBYTES = 1e-3, 20 << 10
# TCP's packets, up to MAX_PACKET_NBYTES before a network card would cut them, must fit into the token bucket. If the
# queue cut them, that would cost CPU time and twice the acknowledgments. A packet may take PACKET_OF_BURST of the
# bucket; the rest is for headers.
PACKET_OF_BURST, MAX_PACKET_NBYTES = 0.8, 1 << 16
# Headers of Ethernet, IP, and TCP with timestamps; and a whole packet with 1,500 bytes of IP.
HEADERS_NBYTES, SENT_PACKET_NBYTES = 66, 1514
# Seconds that a packet may wait in a queue. TCP fills the queue when several ranks send to one host. A shorter queue
# would drop packets instead.
QUEUE_S = 0.05

CONGESTION = "cubic"
"""Linux's default. bbr paces a connection by the rate that it had before, which does not suit all-to-alls of more than
two hosts: at 100 Mbit/s, 4 hosts got 0.93–0.95 of the line with cubic or reno, and 0.75–0.92 with bbr."""


class NetworkError(RuntimeError):
    """Its text is shown to the user as it is."""


@dataclasses.dataclass(frozen=True)
class Host:
    name: str
    namespace: str
    address: str


@dataclasses.dataclass(frozen=True)
class Network:
    token: str
    hosts: tuple[Host, ...]
    names_file: Path
    """The file that every host has as /etc/hosts."""

    def command(self, host: Host, command: list[str]) -> list[str]:
        """A command that runs `command` on the host, with its interfaces (in /sys too), name and /etc/hosts."""
        # `ip netns exec` gives the process its own mounts, so /etc/hosts is replaced for no other process.
        script = 'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", script, "sh", host.name, str(self.names_file), *command]
        return ["ip", "netns", "exec", host.namespace, *inside]

    def kill(self, host: Host) -> None:
        """Kills every process on the host."""
        _kill_inside(host.namespace)


def problem() -> str | None:
    """One line that says why no network can be made here, and what to do; None if it can be made."""
    if sys.platform != "linux":
        return "hosts on one machine need Linux and its network namespaces"
    missing = {tool: package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if missing:
        packages = ", ".join(dict.fromkeys(missing.values()))
        return f"hosts on one machine need {' and '.join(missing)}: install {packages}"
    if os.geteuid() != 0:
        return "hosts on one machine need root, to make network namespaces: run this with sudo"
    done = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    if done.returncode:
        return "hosts on one machine need the right to make namespaces: run the container with SYS_ADMIN and NET_ADMIN"
    return None


@contextlib.contextmanager
def make_network(
    num_hosts: int, bits_s: int | None, subnet: str | None = None, congestion: str = CONGESTION
) -> Iterator[Network]:
    """`num_hosts` hosts whose links carry `bits_s` each way (None: unlimited). They are removed when the context ends.
    Within it SIGINT, SIGTERM and SIGHUP raise SystemExit.

    Raises NetworkError if the hosts cannot be made.
    """
    reason = problem()
    if reason:
        raise NetworkError(reason)
    addresses = choose_subnet(subnet, num_hosts)
    remove_stale()
    with _signals_raise(), _record() as token:
        try:
            yield _make(token, addresses, num_hosts, bits_s, congestion)
        finally:
            # A failure to remove hosts is only printed: it must not replace results, or the error that ended the run.
            with _signals_wait(), _said():
                _remove(token)


# ---- addresses


def choose_subnet(subnet: str | None, num_hosts: int) -> ipaddress.IPv4Network:
    """The given subnet, or the first of SUBNETS that is free.

    Raises NetworkError if none is free, or if the given one is not private, in use on this machine, or too small.
    """
    used = _used_networks()
    if subnet is None:
        chosen = next((network for network in map(ipaddress.ip_network, SUBNETS) if not _clash(network, used)), None)
        if chosen is None:
            raise NetworkError(f"this machine uses all of {', '.join(SUBNETS)}: name a private one with --subnet")
    else:
        try:
            chosen = ipaddress.IPv4Network(subnet)
        except ValueError as error:
            raise NetworkError(f"--subnet {subnet} is not possible: {error}") from None
        if not any(chosen.subnet_of(ipaddress.ip_network(network)) for network in PRIVATE):
            raise NetworkError(f"--subnet {subnet} is not private: use one inside {', '.join(PRIVATE)}")
        clash = _clash(chosen, used)
        if clash:
            raise NetworkError(f"--subnet {subnet} is in use on this machine ({clash}): choose another private one")
    if chosen.num_addresses - 2 < num_hosts:
        raise NetworkError(f"--subnet {chosen} has too few addresses for {num_hosts} hosts: choose a larger one")
    return chosen


def _used_networks() -> dict[str, ipaddress.IPv4Network]:
    """The networks that this machine has addresses in or routes to. A key describes its network."""
    used = {}
    for interface in json.loads(_call("ip", "-json", "-4", "addr", "show") or "[]"):
        for address in interface.get("addr_info", ()):
            network = ipaddress.ip_network(f"{address['local']}/{address['prefixlen']}", strict=False)
            used[f"{network} on {interface['ifname']}"] = network
    for route in json.loads(_call("ip", "-json", "-4", "route", "show", "table", "all") or "[]"):
        if route["dst"] != "default":
            used[f"a route to {route['dst']}"] = ipaddress.ip_network(route["dst"], strict=False)
    return used


def _clash(network: ipaddress.IPv4Network, used: dict[str, ipaddress.IPv4Network]) -> str | None:
    return next((text for text, other in used.items() if network.overlaps(other)), None)


# ---- making and removing


def _make(token: str, addresses: ipaddress.IPv4Network, num_hosts: int, bits_s: int | None, congestion: str) -> Network:
    switch = _add_namespace(token, "switch")
    _call("ip", "-netns", switch, "link", "add", "bridge", "type", "bridge")
    _call("ip", "-netns", switch, "link", "set", "bridge", "up")
    hosts = []
    for index, address in zip(range(num_hosts), addresses.hosts(), strict=False):
        host = Host(f"host{index}", _add_namespace(token, f"host{index}"), str(address))
        hosts.append(host)
        port = f"port{index}"
        pair = ("type", "veth", "peer", "name", port, "netns", switch)
        _call("ip", "link", "add", INTERFACE, "netns", host.namespace, *pair)
        _call("ip", "-netns", switch, "link", "set", port, "master", "bridge", "up")
        _call("ip", "-netns", host.namespace, "link", "set", "lo", "up")
        _call("ip", "-netns", host.namespace, "link", "set", INTERFACE, "up")
        prefixed = f"{address}/{addresses.prefixlen}"
        _call("ip", "-netns", host.namespace, "address", "add", prefixed, "dev", INTERFACE)
        route = (str(addresses), "dev", INTERFACE, "src", str(address), "congctl", congestion)
        _call("ip", "-netns", host.namespace, "route", "replace", *route)
        # A queue limits what leaves: at the host's end what it sends, at the switch's end what it receives.
        _limit(host.namespace, INTERFACE, bits_s)
        _limit(switch, port, bits_s)
    names_file = RECORDS / f"{token}.hosts"
    # torch also looks up the names of IPv4 addresses that are mapped into IPv6.
    names = [f"{prefix}{host.address} {host.name}\n" for host in hosts for prefix in ("", "::ffff:")]
    names_file.write_text("127.0.0.1 localhost\n" + "".join(names))
    return Network(token, tuple(hosts), names_file)


def _add_namespace(token: str, name: str) -> str:
    namespace = f"{PREFIX}{token}-{name}"
    _call("ip", "netns", "add", namespace)
    # Without IPv6, interfaces have only the address that they are given, and only the ranks send packets.
    switch_off = "test ! -e $0 || echo 1 > $0"
    _call("ip", "netns", "exec", namespace, "sh", "-c", switch_off, "/proc/sys/net/ipv6/conf/default/disable_ipv6")
    return namespace


def _burst(bits_s: int) -> tuple[int, int]:
    """(bytes of a link's token bucket, bytes of a TCP packet)."""
    burst_nbytes = max(MIN_BURST_NBYTES, round(bits_s / 8 * BURST_S))
    return burst_nbytes, min(MAX_PACKET_NBYTES, round(PACKET_OF_BURST * burst_nbytes))


def line_s(counted_nbytes: float, bits_s: int) -> float:
    """Seconds that a link of `bits_s` takes for bytes that an interface has counted.

    The interface counts TCP's packets before a network card would cut them. The queue, like a real line, charges the
    headers of every packet after the cut: according to `tc -s`, 1.041 times as many bytes at 100 Mbit/s and 1.044 times
    from 1 Gbit/s on.
    """
    _, packet_nbytes = _burst(bits_s)
    payload_nbytes = counted_nbytes * packet_nbytes / (packet_nbytes + HEADERS_NBYTES)
    return 8 / bits_s * payload_nbytes * SENT_PACKET_NBYTES / (SENT_PACKET_NBYTES - HEADERS_NBYTES)


def _limit(namespace: str, interface: str, bits_s: int | None) -> None:
    if bits_s is None:
        return
    burst_nbytes, packet_nbytes = _burst(bits_s)
    _call("ip", "-netns", namespace, "link", "set", interface, "gso_max_size", str(packet_nbytes))
    shape = ("rate", f"{bits_s}bit", "burst", str(burst_nbytes), "latency", f"{round(QUEUE_S * 1e3)}ms")
    _call("tc", "-netns", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *shape)


def _remove(token: str) -> None:
    """Removes everything with the token, also of a run that failed half way. Raises NetworkError if some remains."""
    said = ""
    for namespace in _namespaces_of(token):
        _kill_inside(namespace)
        # The namespace may be gone by now: two runs may remove the same stale one.
        delete = ["ip", "netns", "delete", namespace]
        said = subprocess.run(delete, capture_output=True, text=True, start_new_session=True).stderr.strip() or said
    (RECORDS / f"{token}.hosts").unlink(missing_ok=True)
    left = _namespaces_of(token)
    if left:
        raise NetworkError(f"cannot remove {', '.join(left)} ({said}): the next run will try again")


def _namespaces_of(token: str) -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.glob(f"{PREFIX}{token}-*")) if folder.exists() else []


def _kill_inside(namespace: str) -> None:
    """Kills every process in the namespace. A process that starts meanwhile is killed in the next round."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samefile(f"/run/netns/{namespace}", "/proc/self/ns/net"):
            raise NetworkError(f"{namespace} is the network of this process: not touched")
    for _ in range(100):
        done = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
        pids = [int(pid) for pid in done.stdout.split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _call(*command: str) -> str:
    # The command has its own session, so an interrupt from the terminal reaches only this process, which handles it
    # between two calls.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


# ---- records of the runs that made namespaces


@contextlib.contextmanager
def _record() -> Iterator[str]:
    """A new token. Its file is locked while this process exists, however the process ends."""
    RECORDS.mkdir(mode=0o700, exist_ok=True)
    token = secrets.token_hex(4)
    path = RECORDS / f"{token}.lock"
    unfinished = RECORDS / f".{token}"
    with open(unfinished, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        unfinished.rename(path)  # locked by now: no other run sees the file unlocked
        try:
            yield token
        finally:
            if not _namespaces_of(token):
                path.unlink(missing_ok=True)


def remove_stale() -> list[str]:
    """Removes the namespaces and files of runs that were killed, and returns their tokens. Prints a line for each token
    whose namespaces cannot be removed; they stay."""
    stale = []
    for path in sorted(RECORDS.glob("*.lock")):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), open(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with _said():
                _remove(path.stem)
                path.unlink(missing_ok=True)
                stale.append(path.stem)
    return stale


@contextlib.contextmanager
def _said() -> Iterator[None]:
    """Prints a NetworkError instead of raising it."""
    try:
        yield
    except NetworkError as error:
        print(f"hosts: {error}", file=sys.stderr)


# ---- signals

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """A signal raises SystemExit with the status that a shell gives for it, so `finally` blocks run."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    with _handlers(stop):
        yield


def _signals_wait() -> contextlib.AbstractContextManager[None]:
    """Signals are ignored, so that the removal completes."""
    return _handlers(signal.SIG_IGN)


@contextlib.contextmanager
def _handlers(handler: object) -> Iterator[None]:
    before = {}
    with contextlib.suppress(ValueError):  # only the main thread may set handlers
        before = {number: signal.signal(number, handler) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
