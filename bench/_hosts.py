"""Hosts on one machine: network namespaces, joined by links of a chosen speed.

    python bench/_hosts.py --hosts 2 --ranks-per-host 1 --link 1gbit -- script.py --its arguments

runs the script on every host under torchrun, as on a small cluster. Each host has its own name and address, and its
link carries --link bits a second each way, headers included. If there are at least as many cores as hosts, each host
has its own cores, as in a cluster. Otherwise all hosts share all cores.

The hosts can reach each other and nothing else. They are made for this run, in their own namespaces, and removed with
it. The machine's own network is not touched, several runs may go on at once, and a run removes what a killed run has
left. This needs Linux, root, and ip and tc (package iproute2).

Other programs use `with hosts.make(2, "1gbit") as cluster: cluster.torchrun([...])`. A process on a host has these
environment variables, besides torchrun's:

    FUSEDCOMM_BENCH_HOSTS, FUSEDCOMM_BENCH_LINK      the number of hosts, and the value of --link
    FUSEDCOMM_BENCH_INTERFACE, GLOO_SOCKET_IFNAME    the interface that leads to the other hosts

Needs root, ip, tc and taskset, and half a GiB of memory for each process.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.namespaces import CONGESTION, INTERFACE, Network, NetworkError, make_network, problem

if TYPE_CHECKING:
    from lib.common import Report

UNLIMITED = "unlimited"
MIN_BITS_S, MAX_BITS_S = 10**6, 10**11
MAX_HOSTS = 64
# May be the same in all runs, because every host has its own ports.
MASTER_PORT = 29500
# Seconds that other processes may go on after one has failed, and between two looks at them.
GRACE_S, POLL_S = 10.0, 0.02


def parse_link(text: str) -> int | None:
    """Bits a second; None: unlimited. Raises NetworkError for anything but 1mbit to 100gbit or "unlimited"."""
    if text == UNLIMITED:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", text)
    bits_s = round(float(match[1]) * {"k": 10**3, "m": 10**6, "g": 10**9}[match[2]]) if match else 0
    if not MIN_BITS_S <= bits_s <= MAX_BITS_S:
        raise NetworkError(f"--link {text} is not possible: use 1mbit to 100gbit (100mbit, 2.5gbit) or {UNLIMITED}")
    return bits_s


@contextlib.contextmanager
def make(num_hosts: int, link: str, subnet: str | None = None, congestion: str = CONGESTION) -> Iterator["Cluster"]:
    """`num_hosts` hosts, each with a link of speed `link`. They are removed when the context ends, however it ends.

    In the main thread SIGINT, SIGTERM and SIGHUP raise SystemExit within the context. Raises NetworkError, with a text
    for the user, if the hosts cannot be made.
    """
    if not 1 <= num_hosts <= MAX_HOSTS:
        raise NetworkError(f"--hosts {num_hosts} is not possible: use 1 to {MAX_HOSTS}")
    with make_network(num_hosts, parse_link(link), subnet, congestion) as network:
        cluster = Cluster(network, link)
        try:
            yield cluster
        finally:
            cluster.end_started()


def cores_of(index: int, num_hosts: int) -> list[int]:
    """The cores of this machine on which a host's processes run. Each host has its own, because hosts that share cores
    delay each other by chance, and all hosts wait for the slowest. With more hosts than cores, all share all cores."""
    cores = sorted(os.sched_getaffinity(0))
    if num_hosts > len(cores):
        return cores
    return cores[index * len(cores) // num_hosts : (index + 1) * len(cores) // num_hosts]


class Cluster:
    """Starts processes on hosts."""

    def __init__(self, network: Network, link: str) -> None:
        self.network, self.link = network, link
        self._started: list[subprocess.Popen] = []

    @property
    def addresses(self) -> list[str]:
        return [host.address for host in self.network.hosts]

    def start(self, index: int, command: Sequence[str], **popen: object) -> subprocess.Popen:
        """Starts a process on host `index`. It is killed when the hosts are removed."""
        environment = {
            "OMP_NUM_THREADS": "1",  # ranks share this machine's cores; unset, torchrun would warn
            **os.environ,
            "FUSEDCOMM_BENCH_HOSTS": str(len(self.network.hosts)),
            "FUSEDCOMM_BENCH_LINK": self.link,
            "FUSEDCOMM_BENCH_INTERFACE": INTERFACE,
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        cores = cores_of(index, len(self.network.hosts))
        inside = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
        inside = self.network.command(self.network.hosts[index], inside)
        # The process has its own session, so an interrupt from the terminal reaches only this process, which removes
        # the hosts.
        self._started.append(subprocess.Popen(inside, env=environment, start_new_session=True, **popen))
        return self._started[-1]

    def end_started(self) -> None:
        """Kills the processes that start() has started. Some may not have entered their host's namespace yet, and would
        not be killed with the host."""
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def run(self, commands: Sequence[Sequence[str]]) -> int:
        """Runs one command on each host, and prints their output with the host's name before each line. Returns 0, or
        the status of the first command that failed; then the others are ended."""
        processes, threads = [], []
        for index, command in enumerate(commands):
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
            process = self.start(index, command, **output)
            name = self.network.hosts[index].name
            threads.append(threading.Thread(target=_copy_lines, args=(process.stdout, name), daemon=True))
            threads[-1].start()
            processes.append(process)
        try:
            status = _first_failure(processes)
        finally:
            self.end_started()
            for host in self.network.hosts:
                self.network.kill(host)
            for process in processes:
                process.wait()
        for thread in threads:
            thread.join(GRACE_S)
        return status

    def torchrun(self, arguments: Sequence[str], ranks_per_host: int = 1) -> int:
        """Runs a script with its arguments under torchrun on every host; the first host is the master. Returns the exit
        status, like run()."""
        common = [
            *(sys.executable, "-m", "torch.distributed.run"),
            f"--nnodes={len(self.network.hosts)}",
            f"--nproc-per-node={ranks_per_host}",
            f"--master-addr={self.addresses[0]}",
            f"--master-port={MASTER_PORT}",
        ]
        return self.run(
            [
                [*common, f"--node-rank={index}", f"--local-addr={host.address}", *arguments]
                for index, host in enumerate(self.network.hosts)
            ]
        )


def _copy_lines(lines: Iterator[str], name: str) -> None:
    for line in lines:
        # One write for each line, so that lines of several hosts do not mix.
        sys.stdout.write(f"[{name}] {line.rstrip()}\n")
        sys.stdout.flush()


def _first_failure(processes: Sequence[subprocess.Popen]) -> int:
    """Waits until all processes have ended, and returns 0. If one fails, waits at most GRACE_S for the others'
    messages, and returns its status: 128 + the signal's number if a signal ended it."""
    while True:
        statuses = [process.poll() for process in processes]
        failed = next((status for status in statuses if status), None)
        if failed is not None:
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and any(process.poll() is None for process in processes):
                time.sleep(POLL_S)
            return failed if failed > 0 else 128 - failed
        if None not in statuses:
            return 0
        time.sleep(POLL_S)


# ---- for programs that run a script of their own on hosts or, with --hosts 0, over loopback


def add_options(parser: argparse._ActionsContainer, links: str) -> None:
    """The options that complete() completes. links: the speeds without --link, as the help says them."""
    parser.add_argument("--hosts", type=int, default=0, help="hosts to make, which needs root; 0: loopback (0)")
    parser.add_argument("--ranks-per-host", type=int, help="ranks on each host (1; with --hosts 0: 2)")
    parser.add_argument("--link", nargs="+", help=f"speed of a host's link, each way ({links})")
    parser.add_argument("--subnet", help="a private subnet for the hosts that this machine does not use")


def complete(parser: argparse.ArgumentParser, arguments: argparse.Namespace, **of_hosts: object) -> None:
    """Sets the defaults of options that were not given. `of_hosts` has the defaults of options for hosts only, which
    are refused over loopback. The default of --ranks-per-host is 1 on hosts, else 2."""
    for name, default in of_hosts.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
        elif not arguments.hosts:
            parser.error(f"--{name} is for hosts that are made: use --hosts 2 or more with it, or leave it out")
    if arguments.ranks_per_host is None:
        arguments.ranks_per_host = 1 if arguments.hosts else 2
    if arguments.hosts < 0 or arguments.hosts == 1 or max(arguments.hosts, 1) * arguments.ranks_per_host < 2:
        parser.error("use --hosts 0 with at least two --ranks-per-host, or at least two hosts")


@contextlib.contextmanager
def measuring(script: str, arguments: argparse.Namespace) -> Iterator[tuple["Report", list[str]]]:
    """Context of a benchmark's measurements: gives it an empty report, and the links to measure, "loopback" without
    hosts. Ends the process, with the reason, if hosts cannot be made or their network fails."""
    from lib.common import Report  # loads torch, which the command below does without

    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "link")}
    report = Report(arguments.json, settings=settings)
    ranks = max(arguments.hosts, 1) * arguments.ranks_per_host
    report.env.update(threads=1, ranks=ranks, ranks_per_host=arguments.ranks_per_host, hosts=arguments.hosts)
    reason = problem() if arguments.hosts else None
    if reason:
        raise SystemExit(f"{script}: {reason}; --hosts 0 measures over loopback, as any user")
    try:
        yield report, arguments.link if arguments.hosts else ["loopback"]
    except NetworkError as error:
        raise SystemExit(f"{script}: {error}") from None


def run_ranks(arguments: argparse.Namespace, worker: Sequence[str], link: str) -> int:
    """Runs `worker`, a script and its arguments, as every rank. Returns the exit status."""
    if arguments.hosts:
        congestion = getattr(arguments, "congestion", CONGESTION)
        with make(arguments.hosts, link, arguments.subnet, congestion) as cluster:
            return cluster.torchrun(worker, arguments.ranks_per_host)
    ranks = f"--nproc-per-node={arguments.ranks_per_host}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks, *worker]
    return subprocess.run(command, env={"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}).returncode


def found_by_ranks(arguments: argparse.Namespace, script: str, link: str, settings: dict) -> tuple[int, Any]:
    """Runs `script`, a file of bench/, as every rank; its arguments are a path and `settings` as JSON. Returns the exit
    status, and what rank 0 wrote to the path, also if the ranks have failed then; None if it wrote nothing."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        worker = [str(Path(__file__).with_name(script)), str(results), json.dumps(settings)]
        status = run_ranks(arguments, worker, link)
        return status, json.loads(results.read_text()) if results.exists() else None


def rows_of_ranks(arguments: argparse.Namespace, script: str, link: str, settings: dict) -> list[dict]:
    """As found_by_ranks(), of ranks that write a list of rows. Prints a status that is not 0."""
    status, rows = found_by_ranks(arguments, script, link, settings)
    if status:
        print(f"{link}: the ranks ended with exit status {status}")
    return rows or []


# ---- the command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="(2)")
    parser.add_argument("--ranks-per-host", type=int, default=1, help="ranks on each host (1)")
    parser.add_argument("--link", default="1gbit", help="its speed, each way: 100mbit … 10gbit, or unlimited (1gbit)")
    parser.add_argument("--subnet", help="a private subnet that this machine does not use (a free one)")
    parser.add_argument(
        "--congestion", default=CONGESTION, help=f"TCP's congestion control: cubic, reno, bbr ({CONGESTION})"
    )
    parser.add_argument("command", nargs="+", metavar="-- script.py …", help="what torchrun runs on every host")
    arguments = parser.parse_args()
    if arguments.ranks_per_host < 1:
        parser.error("--ranks-per-host must be at least 1")
    return arguments


def main() -> int:
    arguments = parse()
    try:
        with make(arguments.hosts, arguments.link, arguments.subnet, arguments.congestion) as cluster:
            return cluster.torchrun(arguments.command, arguments.ranks_per_host)
    except NetworkError as error:
        print(f"_hosts.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
