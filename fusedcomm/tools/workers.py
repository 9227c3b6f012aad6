"""The workers of a job that a launcher starts, here or over ssh: their start, their end, and the store they share."""

import argparse
import dataclasses
import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from fusedcomm.ranks import own_address
from fusedcomm.tools.errors import UsageError

POLL_S = 0.05
END_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=10")
"""A host that is cut off counts as lost after three intervals."""
FORWARDED = ("HOROVOD_", "FUSEDCOMM_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "TORCH_")
NOT_EXECUTABLE, NOT_FOUND, SSH_FAILED = 126, 127, 255
"""Exit statuses, as shells and ssh have them."""
REMOTE = """cd {folder} || exit
exec 3<&0
setsid env {variables} {program} </dev/null 3<&- & worker=$!
(cat <&3; kill -s TERM -- -$worker; sleep {end_s:g}; kill -s KILL -- -$worker) >/dev/null 2>&1 &
wait $worker"""
"""The script that `sh` runs on another host. Its input stays open as long as this launcher and ssh live; the worker,
with its own processes, ends with them."""


@dataclasses.dataclass
class Worker:
    """A process that runs the command, here or by ssh on another host."""

    name: str
    """Its rank; in an elastic job its number in the order of starts."""
    host: str
    process: subprocess.Popen


class StartError(Exception):
    """A command cannot be started. The text says why."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def places(hosts: str | None, num_ranks: int) -> list[str]:
    """The host of each rank, hosts filled in their order. Raises UsageError for bad texts and too few slots."""
    if hosts is None:
        return ["localhost"] * num_ranks
    slots: list[str] = []
    for text in hosts.split(","):
        host, _, number = text.partition(":")
        if not host or host.startswith("-") or not (number or "1").isdecimal():
            raise UsageError(f"--hosts {hosts}: {text!r} is not possible: use host:slots, such as one:2,two:2")
        slots += [host] * int(number or 1)
    if len(slots) < num_ranks:
        raise UsageError(f"--hosts {hosts} has {len(slots)} slots, too few for -np {num_ranks}")
    return slots[:num_ranks]


def is_here(host: str) -> bool:
    """Whether the host is this machine, by its name."""
    return host in ("localhost", "127.0.0.1", own_address.host_name(), socket.getfqdn())


class Workers:
    """The workers of one job, and the store over which they meet.

    Args:
        address: this host's, where the store listens and other hosts reach it. None: 127.0.0.1 if all workers are here,
            else what this host has.
    """

    def __init__(self, args: argparse.Namespace, slots: list[str], address: str | None = None) -> None:
        from fusedcomm.ranks.own_group import served_store

        self.args, self.slots = args, slots
        is_local = address is None and all(map(is_here, slots))
        self.address = address or ("127.0.0.1" if is_local else own_address.candidates()[0])
        if not is_local and address is None and self.address == "127.0.0.1":
            raise UsageError(
                f"--hosts {args.hosts}: other hosts cannot reach this one, which has found no address of its own but "
                "127.0.0.1: set GLOO_SOCKET_IFNAME to the interface that they share"
            )
        # This process serves the store, at the address that workers are given, on a port that the system chooses.
        try:
            self.server = served_store(self.address)
        except OSError as error:
            raise UsageError(f"this host cannot listen at {self.address}: {error}. Use an address of its own") from None
        self.port = self.server.port
        self.where = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # rank 0 need not serve one
        if is_local and sys.platform == "linux":
            # Without this, gloo looks up this machine's host name, which does not always resolve.
            self.where["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self.workers: list[Worker] = []

    def place(self, rank: int) -> dict[str, str]:
        """The variables in which torchrun says a rank's place."""
        host = self.slots[rank]
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.slots)),
            "LOCAL_RANK": str(self.slots[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(self.slots.count(host)),
        }

    def start(self, host: str, variables: dict[str, str], name: str) -> Worker:
        """Starts the command on a host, with these variables of its environment. Raises StartError."""
        variables = {**self.where, **variables}
        if is_here(host):
            process = opened(self.args.program, env={**os.environ, **variables})
        else:
            remote = f"exec sh -c {shlex.quote(self.remote_script(variables))}"
            process = opened(["ssh", *SSH_OPTIONS, host, remote], stdin=subprocess.PIPE)
        worker = Worker(name, host, process)
        self.workers.append(worker)
        return worker

    def remote_script(self, variables: dict[str, str]) -> str:
        """The script that `sh` runs on another host: the command with these variables and those of FORWARDED."""
        # Python's output goes through a pipe, and is to be seen at once.
        forwarded = {"PYTHONUNBUFFERED": "1"}
        forwarded |= {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        forwarded |= variables
        return REMOTE.format(
            folder=shlex.quote(os.getcwd()),
            variables=" ".join(f"{name}={shlex.quote(value)}" for name, value in forwarded.items()),
            program=shlex.join(self.args.program),
            end_s=END_S,
        )

    def ended(self) -> Iterator[Worker]:
        """The workers that have ended since the last call."""
        found = [worker for worker in self.workers if worker.process.poll() is not None]
        self.workers = [worker for worker in self.workers if worker not in found]
        return iter(found)

    def end(self) -> None:
        """Ends all workers that still run."""
        for worker in self.workers:
            worker.process.terminate()
        deadline = time.monotonic() + END_S
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def say(self, text: str) -> None:
        """Writes a line to stderr."""
        print(f"fusedcomm run: {text}", file=sys.stderr, flush=True)


def opened(command: list[str], **options: Any) -> subprocess.Popen:
    """Raises StartError if the system cannot start the command."""
    try:
        return subprocess.Popen(command, **options)
    except OSError as error:
        if error.errno == errno.ENOENT:
            where = "no folder in PATH has it"
            if "/" in command[0]:
                where = "there is no such file, or no interpreter of the name in its first line"
            raise StartError(f"{command[0]} was not found: {where}", NOT_FOUND) from error
        raise StartError(f"{command[0]} cannot be executed: {error.strerror}", NOT_EXECUTABLE) from error


def end_of(worker: Worker) -> str:
    code = worker.process.returncode
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    said = f"has failed with exit status {code}"
    if is_here(worker.host):
        return said
    about = {
        SSH_FAILED: f"ssh reached no host {worker.host}, or lost it: check that `ssh {worker.host} true` works without "
        "a question",
        NOT_FOUND: "the command was not found there",
        NOT_EXECUTABLE: "the command cannot be executed there",
    }
    return f"{said} ({about[code]})" if code in about else said


def status_of(worker: Worker) -> int:
    """As shells count: 128 + the signal."""
    code = worker.process.returncode
    return 128 - code if code < 0 else code
