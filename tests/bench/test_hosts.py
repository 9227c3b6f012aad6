"""Hosts made of network namespaces. They are removed afterwards, whatever happens."""

import ipaddress
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from on_hosts import hosts, namespaces, needs_hosts
from patience import HANG_S
from processes import is_running

pytestmark = pytest.mark.alone


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


@needs_hosts
def test_hosts_are_there_and_then_gone_also_after_an_exception():
    before = interfaces()
    with pytest.raises(ZeroDivisionError), hosts.make(2, "unlimited") as cluster:
        token = cluster.network.token
        assert sorted(namespaces_of(token)) == [
            f"fusedcomm-hosts-{token}-{name}" for name in ("host0", "host1", "switch")
        ]
        assert interfaces() == before
        look = "import os, socket; print(socket.gethostname(), sorted(os.listdir('/sys/class/net')))"
        look += "; print(socket.gethostbyname('host0'), socket.gethostbyname('host1'))"
        done = cluster.start(1, [sys.executable, "-c", look], stdout=subprocess.PIPE, text=True).communicate()[0]
        assert done.splitlines() == ["host1 ['eth0', 'lo']", " ".join(cluster.addresses)]
        sleeper = cluster.start(0, ["sleep", "100"])
        raise ZeroDivisionError
    assert traces(token) == []
    assert interfaces() == before
    assert sleeper.wait(HANG_S) == -signal.SIGKILL


@needs_hosts
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


@pytest.fixture
def sleeping_run(tmp_path):
    """A run of bench/_hosts.py whose ranks sleep: (its process, its token, the ranks' process ids)."""
    script = tmp_path / "sleep.py"
    script.write_text("import os, time; print('pid', os.getpid(), flush=True); time.sleep(100)\n")
    known = {path.stem for path in Path("/run/fusedcomm-hosts").glob("*.lock")}
    command = [sys.executable, hosts.__file__, "--hosts", "2", "--link", "100mbit", "--", str(script)]
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


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_hosts_are_gone_after_a_signal(sleeping_run, number):
    process, token, pids = sleeping_run
    process.send_signal(number)
    assert process.wait(HANG_S) == 128 + number
    assert traces(token) == []
    assert not any(is_running(pid) for pid in pids)


@needs_hosts
def test_the_next_run_removes_what_a_killed_one_left(sleeping_run):
    process, token, pids = sleeping_run
    process.kill()
    process.wait()
    assert len(namespaces_of(token)) == 3 and all(is_running(pid) for pid in pids)
    with hosts.make(1, "unlimited"):
        assert traces(token) == []
        assert not any(is_running(pid) for pid in pids)


@pytest.mark.full
@needs_hosts
def test_runs_side_by_side_leave_each_other_alone(sleeping_run):
    process, token, pids = sleeping_run
    with hosts.make(2, "unlimited") as cluster:
        assert cluster.network.token != token
    assert len(namespaces_of(token)) == 3 and all(is_running(pid) for pid in pids)


@needs_hosts
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


@needs_hosts
def test_this_process_network_is_never_killed(monkeypatch):
    monkeypatch.setattr(namespaces.os.path, "samefile", lambda *paths: True)
    with pytest.raises(namespaces.NetworkError, match="is the network of this process: not touched"):
        namespaces._kill_inside("fusedcomm-hosts-00000000-host0")


@pytest.mark.full
@needs_hosts
def test_output_and_status_of_the_first_that_fails(capsys, monkeypatch):
    monkeypatch.setattr(hosts, "GRACE_S", 0.5)
    began = time.monotonic()
    with hosts.make(2, "unlimited") as cluster:
        assert cluster.run([["echo", "one"], ["sh", "-c", "echo two; echo three >&2"]]) == 0
        assert cluster.run([["sleep", "100"], ["sh", "-c", "exit 7"]]) == 7
        assert cluster.run([["sh", "-c", "kill -9 $$"], ["sleep", "100"]]) == 128 + signal.SIGKILL
    assert time.monotonic() - began < 90  # the others sleep for 100 s
    assert sorted(capsys.readouterr().out.splitlines()) == ["[host0] one", "[host1] three", "[host1] two"]


def test_subnets_that_are_refused(monkeypatch):
    used = {"10.1.0.0/16 on eth9": ipaddress.ip_network("10.1.0.0/16")}
    monkeypatch.setattr(namespaces, "_used_networks", lambda: used)
    assert str(namespaces.choose_subnet("10.2.0.0/29", 6)) == "10.2.0.0/29"
    assert str(namespaces.choose_subnet(None, 2)) == namespaces.SUBNETS[0]
    for subnet in ("8.8.8.0/24", "10.1.2.0/24", "10.0.0.0/8", "10.2.0.0/30", "somewhere"):
        with pytest.raises(namespaces.NetworkError):
            namespaces.choose_subnet(subnet, 6)
    used.update({subnet: ipaddress.ip_network(subnet) for subnet in namespaces.SUBNETS[:1]})
    assert str(namespaces.choose_subnet(None, 2)) == namespaces.SUBNETS[1]
