"""Hosts made of network namespaces. They are removed afterwards, whatever happens."""

import ipaddress
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import HANG_S
from processes import is_running

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))  # stays: ranks that are started import this file, too

import ddp_step  # noqa: E402
import hosts  # noqa: E402
from lib import namespaces  # noqa: E402
from lib.namespaces import NetworkError  # noqa: E402

pytestmark = pytest.mark.alone

PROBLEM = namespaces.problem()
makes_hosts = pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))


def namespaces_of(token: str) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"fusedcomm-hosts-{token}-")]


def traces(token: str) -> list[str]:
    """The namespaces and files that a run with this token has left."""
    return namespaces_of(token) + [path.name for path in Path("/run/fusedcomm-hosts").glob(f"*{token}*")]


def interfaces() -> list[str]:
    """The machine's own network interfaces."""
    return sorted(os.listdir("/sys/class/net"))


# ---- hosts are made and removed


@makes_hosts
def test_hosts_are_there_and_then_gone():
    before = interfaces()
    with hosts.make(2, "unlimited") as cluster:
        token = cluster.network.token
        assert sorted(namespaces_of(token)) == [
            f"fusedcomm-hosts-{token}-{name}" for name in ("host0", "host1", "switch")
        ]
        assert interfaces() == before
        look = "import os, socket; print(socket.gethostname(), sorted(os.listdir('/sys/class/net')))"
        look += "; print(socket.gethostbyname('host0'), socket.gethostbyname('host1'))"
        done = cluster.start(1, [sys.executable, "-c", look], stdout=subprocess.PIPE, text=True).communicate()[0]
        assert done.splitlines() == ["host1 ['eth0', 'lo']", " ".join(cluster.addresses)]
    assert traces(token) == []
    assert interfaces() == before


@makes_hosts
def test_hosts_have_cores_of_their_own():
    look = "import os; print(sorted(os.sched_getaffinity(0)))"
    ours = sorted(os.sched_getaffinity(0))
    with hosts.make(2, "unlimited") as cluster:
        started = [cluster.start(host, [sys.executable, "-c", look], stdout=subprocess.PIPE) for host in range(2)]
        seen = [json.loads(process.communicate()[0]) for process in started]
    assert seen == [hosts.cores_of(0, 2), hosts.cores_of(1, 2)]
    assert sorted({*seen[0], *seen[1]}) == ours and (len(ours) == 1 or not {*seen[0]} & {*seen[1]})


def test_cores_are_shared_out_evenly_or_not_at_all(monkeypatch):
    monkeypatch.setattr(hosts.os, "sched_getaffinity", lambda _: {0, 2, 3, 4, 7})
    assert [hosts.cores_of(host, 2) for host in range(2)] == [[0, 2], [3, 4, 7]]
    assert [hosts.cores_of(host, 5) for host in range(5)] == [[0], [2], [3], [4], [7]]
    assert [hosts.cores_of(host, 6) for host in range(6)] == 6 * [[0, 2, 3, 4, 7]]
    assert hosts.cores_of(0, 1) == [0, 2, 3, 4, 7]


@makes_hosts
def test_hosts_are_gone_after_an_exception():
    with pytest.raises(ZeroDivisionError), hosts.make(2, "100mbit") as cluster:
        token = cluster.network.token
        sleeper = cluster.start(0, ["sleep", "100"])
        raise ZeroDivisionError
    assert traces(token) == []
    assert sleeper.wait(HANG_S) == -signal.SIGKILL


@makes_hosts
def test_a_process_that_has_not_come_to_its_host_yet_is_ended_too(monkeypatch):
    its_way = ["sh", "-c", "sleep 100 & wait"]
    with pytest.raises(ZeroDivisionError), hosts.make(2, "100mbit") as cluster:
        monkeypatch.setattr(namespaces.Network, "command", lambda self, host, command: its_way)
        on_its_way = cluster.start(0, ["never"])
        raise ZeroDivisionError
    assert on_its_way.wait(HANG_S) == -signal.SIGKILL
    deadline = time.monotonic() + HANG_S
    with pytest.raises(ProcessLookupError):  # its child is gone, too, once init has asked for its status
        while time.monotonic() < deadline:
            os.killpg(on_its_way.pid, 0)
            time.sleep(0.01)


@makes_hosts
def test_hosts_are_gone_if_making_them_fails(monkeypatch):
    tokens = []

    def fail(namespace: str, interface: str, bits_s: int | None) -> None:
        tokens.append(namespace.split("-")[2])
        raise NetworkError("no queue")

    monkeypatch.setattr(namespaces, "_limit", fail)
    with pytest.raises(NetworkError, match="no queue"), hosts.make(2, "100mbit"):
        pass
    assert traces(tokens[0]) == []


@makes_hosts
def test_what_cannot_be_removed_is_said_and_removed_by_the_next_run(monkeypatch, capsys):
    run = subprocess.run

    def busy(command, *arguments, **options):
        deletes = command[:3] == ["ip", "netns", "delete"] and command[3].endswith("-host1")
        return run(["sh", "-c", "echo it is busy >&2; exit 1"] if deletes else command, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", busy)
        with hosts.make(2, "unlimited") as cluster:
            token = cluster.network.token
    assert f"hosts: cannot remove {namespaces.PREFIX}{token}-host1 (it is busy): the next" in capsys.readouterr().err
    assert [name.rpartition("-")[2] for name in namespaces_of(token)] == ["host1"]
    assert token in namespaces.remove_stale() and traces(token) == []


@pytest.fixture
def sleeping_run(tmp_path):
    """A run of bench/hosts.py whose ranks sleep: (its process, its token, the ranks' process ids)."""
    script = tmp_path / "sleep.py"
    script.write_text("import os, time; print('pid', os.getpid(), flush=True); time.sleep(100)\n")
    known = {path.stem for path in Path("/run/fusedcomm-hosts").glob("*.lock")}
    command = [sys.executable, str(BENCH / "hosts.py"), "--hosts", "2", "--link", "100mbit", "--", str(script)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    pids = [int(process.stdout.readline().split()[-1]) for _ in range(2)]
    # Other runs may begin and end at the same time. The ranks' namespace tells this run's token.
    started = {path.stem for path in Path("/run/fusedcomm-hosts").glob("*.lock")} - known
    identify = [subprocess.run(["ip", "netns", "identify", str(pid)], capture_output=True, text=True) for pid in pids]
    token = identify[0].stdout.split("-")[2]
    assert token in started
    yield process, token, pids
    process.kill()
    process.wait()
    process.stdout.close()
    namespaces.remove_stale()


@makes_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_hosts_are_gone_after_a_signal(sleeping_run, number):
    process, token, pids = sleeping_run
    process.send_signal(number)
    assert process.wait(HANG_S) == 128 + number
    assert traces(token) == []
    assert not any(is_running(pid) for pid in pids)


@makes_hosts
def test_the_next_run_removes_what_a_killed_one_left(sleeping_run):
    process, token, pids = sleeping_run
    process.kill()
    process.wait()
    assert len(namespaces_of(token)) == 3 and all(is_running(pid) for pid in pids)
    with hosts.make(1, "unlimited"):
        assert traces(token) == []
        assert not any(is_running(pid) for pid in pids)


@pytest.mark.full
@makes_hosts
def test_runs_side_by_side_leave_each_other_alone(sleeping_run):
    process, token, pids = sleeping_run
    with hosts.make(2, "unlimited") as cluster:
        assert cluster.network.token != token
    assert len(namespaces_of(token)) == 3 and all(is_running(pid) for pid in pids)


@makes_hosts
def test_namespaces_of_others_are_not_touched():
    """Not even a namespace with a name like ours: no lock file shows that a run made it."""
    name = f"fusedcomm-hosts-{secrets.token_hex(4)}-host0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        with hosts.make(1, "unlimited"):
            pass
        assert namespaces_of(name.split("-")[2]) == [name]
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


@makes_hosts
def test_this_process_network_is_never_killed(monkeypatch):
    monkeypatch.setattr(namespaces.os.path, "samefile", lambda *paths: True)
    with pytest.raises(NetworkError, match="is the network of this process: not touched"):
        namespaces._kill_inside("fusedcomm-hosts-00000000-host0")


# ---- programs and links


@pytest.mark.full
@makes_hosts
def test_output_and_status_of_the_first_that_fails(capsys, monkeypatch):
    monkeypatch.setattr(hosts, "GRACE_S", 0.5)
    began = time.monotonic()
    with hosts.make(2, "unlimited") as cluster:
        assert cluster.run([["echo", "one"], ["sh", "-c", "echo two; echo three >&2"]]) == 0
        assert cluster.run([["sleep", "100"], ["sh", "-c", "exit 7"]]) == 7
        assert cluster.run([["sh", "-c", "kill -9 $$"], ["sleep", "100"]]) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 90  # the others sleep for 100 s
    assert sorted(capsys.readouterr().out.splitlines()) == ["[host0] one", "[host1] three", "[host1] two"]


@pytest.mark.full
@makes_hosts
def test_a_link_carries_what_it_is_limited_to():
    rates = []
    with hosts.make(2, "100mbit") as cluster:
        # Other programs may delay a sender, and then the link carries less. One good second is enough.
        while len(rates) < 20 and max(rates, default=0) < 0.95 * 100e6:
            (flow,) = hosts.measure_flow(cluster, 1.0)
            # 1,448 of a frame's 1,514 bytes are payload.
            rates.append(flow["nbytes"] * 8 / flow["seconds"] * 1514 / 1448)
    assert max(rates) == pytest.approx(100e6, rel=0.05), rates


@pytest.mark.full
@makes_hosts
def test_connections_have_the_congestion_control_that_was_asked_for():
    connect = (
        "import socket, sys; connection = socket.create_connection((sys.argv[1], 1)); "
        "print(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b'\\0').decode())"
    )
    listen = (
        "import socket, sys, time; server = socket.create_server((sys.argv[1], 1)); print(flush=True); time.sleep(60)"
    )
    for congestion in ("cubic", "reno"):
        with hosts.make(2, "1gbit", congestion=congestion) as cluster:
            address = cluster.addresses[1]
            server = cluster.start(1, [sys.executable, "-c", listen, address], stdout=subprocess.PIPE)
            server.stdout.readline()
            client = cluster.start(0, [sys.executable, "-c", connect, address], stdout=subprocess.PIPE, text=True)
            assert client.communicate(timeout=HANG_S)[0].strip() == congestion
    with pytest.raises(NetworkError, match="nonsense"), hosts.make(2, "1gbit", congestion="nonsense"):
        pass


# ---- refusals


def test_links_that_are_refused():
    assert hosts.parse_link("100mbit") == 10**8
    assert hosts.parse_link("2.5gbit") == 2_500_000_000
    assert hosts.parse_link("unlimited") is None
    for text in ("100", "fast", "0gbit", "200gbit", "10kbit", "-1gbit", "1gbit; true"):
        with pytest.raises(NetworkError, match="is not possible: use 1mbit to 100gbit"):
            hosts.parse_link(text)
    for number in (0, 65):
        with (
            pytest.raises(NetworkError, match=f"--hosts {number} is not possible: use 1 to 64"),
            hosts.make(number, "1gbit"),
        ):
            pass


def test_subnets_that_are_refused(monkeypatch):
    used = {"10.1.0.0/16 on eth9": ipaddress.ip_network("10.1.0.0/16")}
    monkeypatch.setattr(namespaces, "_used_networks", lambda: used)
    assert str(namespaces.choose_subnet("10.2.0.0/29", 6)) == "10.2.0.0/29"
    assert str(namespaces.choose_subnet(None, 2)) == namespaces.SUBNETS[0]
    for subnet, text in {
        "8.8.8.0/24": "8.8.8.0/24 is not private: use one inside 10.0.0.0/8, 172.16.0.0/12, 192.168.0.0/16",
        "127.0.0.0/24": "is not private",
        "10.0.0.0/7": "is not private",
        "10.1.2.0/24": r"10.1.2.0/24 is in use on this machine \(10.1.0.0/16 on eth9\): choose another private one",
        "10.0.0.0/8": "is in use on this machine",
        "10.2.0.0/30": "has too few addresses for 6 hosts",
        "fe80::/64": "is not possible",
        "somewhere": "is not possible",
    }.items():
        with pytest.raises(NetworkError, match=text):
            namespaces.choose_subnet(subnet, 6)
    used.update({subnet: ipaddress.ip_network(subnet) for subnet in namespaces.SUBNETS[:1]})
    assert str(namespaces.choose_subnet(None, 2)) == namespaces.SUBNETS[1]
    used.update({subnet: ipaddress.ip_network(subnet) for subnet in namespaces.SUBNETS})
    with pytest.raises(NetworkError, match="name a private one with --subnet"):
        namespaces.choose_subnet(None, 2)


def test_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(namespaces.sys, "platform", "linux")
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert namespaces.problem() == "hosts on one machine need tc: install iproute2 (dnf: iproute-tc)"
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    needs_root = "hosts on one machine need root, to make network namespaces: run this with sudo"
    assert namespaces.problem() == needs_root
    with pytest.raises(NetworkError, match=needs_root), hosts.make(2, "1gbit"):
        pass
    monkeypatch.setattr(hosts, "problem", lambda: needs_root)
    monkeypatch.setattr(sys, "argv", ["ddp_step.py", "--hosts", "2"])
    with pytest.raises(SystemExit, match=f"{needs_root}; --hosts 0 measures over loopback, as any user"):
        ddp_step.main()


@pytest.mark.full
@makes_hosts
def test_the_command_refuses_in_one_line():
    command = [sys.executable, str(BENCH / "hosts.py"), "--link", "3bit", "--", "script.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("hosts.py: --link 3bit is not possible") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "arguments", "refusal"),
    [
        (hosts, ["--hosts", "3"], "--hosts is for a script"),
        (hosts, ["--ranks-per-host", "2"], "--ranks-per-host is for a script"),
        (hosts, ["--json", "a.json", "--", "a.py"], "--json is for links that are measured"),
        (hosts, ["--quick", "--", "a.py"], "--seconds is for links that are measured"),
        (hosts, ["--quick", "--seconds", "1"], "not allowed with"),
        (ddp_step, ["--link", "100mbit"], "--link is for hosts that are made"),
        (ddp_step, ["--hosts", "0", "--congestion", "bbr"], "--congestion is for hosts that are made"),
        (ddp_step, ["--subnet", "10.9.0.0/24"], "--subnet is for hosts that are made"),
        (ddp_step, ["--batch", "2", "--compute-ms", "100"], "not allowed with"),
    ],
)
def test_options_without_effect_are_refused(module, arguments, refusal, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit):
        module.parse()
    assert refusal in capsys.readouterr().err
