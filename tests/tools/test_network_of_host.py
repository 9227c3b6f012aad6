"""What ``fusedcomm doctor`` says about the network of this host."""

import socket
from pathlib import Path

import pytest

from fusedcomm.tools import network_of_host as network


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A function that makes this host another one, by the files that Linux describes it with."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(variable, raising=False)

    def make(interfaces=("lo", "eth7"), up=("eth7",), default="eth7", control="cubic", available="reno cubic bbr"):
        folder = tmp_path / "net"
        for name in interfaces:
            (folder / name).mkdir(parents=True)
            (folder / name / "operstate").write_text(f"{'up' if name in up else 'down'}\n")
        route = f"{default}\t00000000\t010200C0\n" if default else ""
        files = {
            "ROUTES": f"Iface\tDestination\tGateway\n{route}",
            "CONGESTION_CONTROL": control,
            "AVAILABLE": available,
        }
        for name, text in files.items():
            path = tmp_path / name
            if text is not None:
                path.write_text(f"{text}\n")
            monkeypatch.setattr(network, name, path)
        monkeypatch.setattr(network, "INTERFACES", folder)

    return make


def named(monkeypatch, address: str | None) -> None:
    """Gives this host's name an address."""

    def getaddrinfo(*_, **__):
        if address is None:
            raise socket.gaierror("Name or service not known")
        return [(None, None, None, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


def test_the_real_host_has_an_answer_to_each():
    lines = dict(network.lines())
    assert set(lines) == {"gloo uses", "NCCL uses", "TCP"} and all(lines.values())
    if network.CONGESTION_CONTROL.exists():
        assert network.CONGESTION_CONTROL.read_text().strip() in lines["TCP"]


@pytest.mark.parametrize("address", ["127.0.1.1", None])
def test_gloo_on_the_loopback_is_told_what_to_set(host, monkeypatch, address):
    host()
    named(monkeypatch, address)
    text = network.gloo()
    assert text.startswith("lo, which other hosts cannot reach") and text.endswith("set GLOO_SOCKET_IFNAME=eth7")
    assert (address or "has no address") in text


def test_gloo_uses_the_interface_of_the_hosts_name(host, monkeypatch):
    host()
    named(monkeypatch, "127.0.0.1")
    assert network._interface_of("127.0.0.1") == "lo"
    named(monkeypatch, "198.51.100.7")
    assert network.gloo().startswith("the interface with 198.51.100.7: this host's name")


def test_gloo_uses_the_interface_that_is_named(host, monkeypatch):
    host()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert network.gloo() == "eth7, which GLOO_SOCKET_IFNAME names"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    assert network.gloo().endswith("there is no eth8; name one of eth7, lo, or unset it")


def test_nccl_uses_what_is_up(host, monkeypatch):
    host(interfaces=("lo", "docker0", "eth7", "eth8", "eth9"), up=("lo", "docker0", "eth8", "eth9"))
    monkeypatch.setattr(network, "INFINIBAND", Path("/nowhere"))
    assert network.nccl().startswith("eth8, eth9. It takes the first") and "NCCL_SOCKET_IFNAME=eth8" in network.nccl()
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth9")
    assert network.nccl() == "eth9, which NCCL_SOCKET_IFNAME names"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    for name in ("eth8", "eth9"):
        (network.INTERFACES / name / "operstate").write_text("down")
    assert network.nccl() == "lo: no other interface is up, so it cannot reach other hosts"


def test_nccl_prefers_infiniband(host, monkeypatch, tmp_path):
    host()
    (tmp_path / "infiniband" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(network, "INFINIBAND", tmp_path / "infiniband")
    assert network.nccl().startswith("mlx5_0, by InfiniBand")


@pytest.mark.parametrize(
    ("control", "available", "said"),
    [
        ("cubic", "reno cubic", "congestion control cubic"),
        ("reno", "reno", "congestion control reno"),
        (None, None, "congestion control unknown: this system does not say"),
    ],
)
def test_other_congestion_controls_are_only_named(host, control, available, said):
    host(control=control, available=available)
    assert network.congestion_control() == said


@pytest.mark.parametrize(
    ("control", "available", "other"),
    [("bbr", "reno cubic bbr", "cubic"), ("bbr2", "reno bbr2", "reno"), ("bbr", None, "cubic")],
)
def test_bbr_is_a_trap_and_the_way_out_is_said(host, control, available, other):
    host(control=control, available=available)
    text = network.congestion_control()
    assert text.startswith(f"congestion control {control}, a trap with more than two hosts")
    assert text.endswith(f"sysctl -w net.ipv4.tcp_congestion_control={other}")
