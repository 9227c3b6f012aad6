"""What ``fusedcomm doctor`` says about the network of this host."""

import socket
from pathlib import Path

import pytest

from fusedcomm.tools import network_of_host as network

CUBIC = "sysctl -w net.ipv4.tcp_congestion_control=cubic"
RENO = "sysctl -w net.ipv4.tcp_congestion_control=reno"
DOCKER = "docker0 eth7- eth8 eth9"
ROWS = [
    (
        network.gloo,
        {"address": "127.0.1.1"},
        "lo, which other hosts cannot … 127.0.1.1 … GLOO_SOCKET_IFNAME=eth7",
    ),
    (network.gloo, {"address": ""}, "lo, which other hosts cannot reach … has no address … GLOO_SOCKET_IFNAME=eth7"),
    (network.gloo, {"address": "198.51.100.7"}, "the interface with 198.51.100.7: this host's name"),
    (network.gloo, {"named": "eth7"}, "eth7, which GLOO_SOCKET_IFNAME names"),
    (network.gloo, {"named": "eth8"}, "nothing: … there is no eth8; name one of eth7, lo, or unset it"),
    (network.nccl, {"interfaces": DOCKER}, "eth8, eth9. It takes the first … NCCL_SOCKET_IFNAME=eth8"),
    (network.nccl, {"interfaces": DOCKER, "named": "eth9"}, "eth9, which NCCL_SOCKET_IFNAME names"),
    (network.nccl, {"interfaces": "eth7-"}, "lo: no other interface is up, so it cannot reach other hosts"),
    (network.nccl, {"infiniband": "mlx5_0"}, "mlx5_0, by InfiniBand"),
    (network.congestion_control, {"control": "cubic"}, "congestion control cubic"),
    (network.congestion_control, {"control": ""}, "congestion control unknown: this system does not say"),
    (network.congestion_control, {"control": "bbr"}, f"congestion control bbr, a trap with more than two … {CUBIC}"),
    (network.congestion_control, {"control": "bbr2", "available": "reno bbr2"}, f"… bbr2, a trap … {RENO}"),
    (network.congestion_control, {"control": "bbr", "available": ""}, f"… bbr, a trap … {CUBIC}"),
]
"""What is asked, of which host (see `make`), and the answer, with … for what is left out."""


def make(
    folder: Path, patch, address="", named="", interfaces="eth7", infiniband="", control="", available="bbr cubic"
):
    """Makes this host another one, by the files that Linux describes it with.

    address: of the host's name. named: the interface in both variables. interfaces: beside lo; one with - is down.
    """
    for name in f"lo {interfaces}".split():
        (folder / "net" / name.rstrip("-")).mkdir(parents=True)
        (folder / "net" / name.rstrip("-") / "operstate").write_text("down\n" if "-" in name else "up\n")
    (folder / "infiniband").mkdir()
    for name in infiniband.split():
        (folder / "infiniband" / name).mkdir()
    routes = "Iface\tDestination\tGateway\neth7\t00000000\t010200C0"
    for name, text in {"ROUTES": routes, "CONGESTION_CONTROL": control, "AVAILABLE": available}.items():
        if text:
            (folder / name).write_text(f"{text}\n")
        patch.setattr(network, name, folder / name)
    patch.setattr(network, "INTERFACES", folder / "net")
    patch.setattr(network, "INFINIBAND", folder / "infiniband" if infiniband else folder / "none")
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        patch.setenv(variable, named)

    def getaddrinfo(*_, **__):
        if not address:
            raise socket.gaierror("Name or service not known")
        return [(None, None, None, "", (address, 0))]

    patch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize(("asked", "of_host", "answer"), ROWS)
def test_the_answer_says_what_is_used_and_what_to_do(tmp_path, monkeypatch, asked, of_host, answer):
    make(tmp_path, monkeypatch, **of_host)
    begin, *others = answer.split("… ")
    text = asked()
    assert text.startswith(begin.rstrip()) and all(words.rstrip() in text for words in others)
    assert "…" in answer or asked is not network.congestion_control or text == answer


def test_the_real_host_has_an_answer_to_each():
    lines = dict(network.lines())
    assert set(lines) == {"gloo uses", "NCCL uses", "TCP"} and all(lines.values())
    if network.CONGESTION_CONTROL.exists():
        assert network.CONGESTION_CONTROL.read_text().strip() in lines["TCP"]
    assert network._interface_of("127.0.0.1") == "lo"
