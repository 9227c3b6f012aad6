"""``fusedcomm run``: starts the ranks of a script that uses fusedcomm.horovod, here or over ssh.

torchrun starts such scripts just as well, as long as no rank is lost. When one is, torchrun's agent ends every process
of its host and starts the script again from its first line: nothing survives in memory, and the number of processes on
a host is fixed. With --elastic this launcher leaves the other ranks alone, and tells them in a store who is alive.
"""

import argparse
import contextlib
import dataclasses
import errno
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from fusedcomm.tools.arguments import whole
from fusedcomm.tools.errors import UsageError

POLL_S = 0.05
GRACE_S = 2.0
"""After a rank has reported a failure: how long its cause may take to end. Then all ranks that live meet again."""
END_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=10")
"""A host that is cut off counts as lost after three intervals."""
FORWARDED = ("HOROVOD_", "FUSEDCOMM_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "TORCH_")
NOT_EXECUTABLE, NOT_FOUND, SSH_FAILED = 126, 127, 255
"""Exit statuses, as shells and ssh have them."""
REMOTE = """IFS= read -r {key} && export {key} && cd {folder} || exit
exec 3<&0
setsid env {variables} {program} </dev/null 3<&- & worker=$!
(cat <&3; kill -s TERM -- -$worker; sleep {end_s:g}; kill -s KILL -- -$worker) >/dev/null 2>&1 &
wait $worker"""
"""What `sh` runs on another host. The job's key comes through standard input, since other users see command lines. That
input stays open as long as this launcher and ssh live; the worker, with its own processes, ends with them."""


@dataclasses.dataclass
class Worker:
    """A process that runs the command, here or by ssh on another host."""

    name: str
    """Its rank; in an elastic job its number in the order of starts."""
    host: str
    process: subprocess.Popen


def add_to(commands: "argparse._SubParsersAction") -> None:
    """Adds ``fusedcomm run`` to the commands."""
    parser = commands.add_parser(
        "run",
        help="start the ranks of a fusedcomm.horovod script, also elastic ones",
        description="Starts a command once for each rank, with the variables that hvd.init() reads. Ends all ranks if\n"
        "one fails. With --elastic the others go on: hvd.elastic.run() restores their state from memory.",
        example="fusedcomm run -np 4 python train.py\n"
        "fusedcomm run -np 4 -H one:2,two:2 python train.py\n"
        "fusedcomm run -np 3 --elastic --min-np 2 --max-restarts 1 python train.py",
    )
    parser.add_argument("-np", "--num-proc", type=whole(1), metavar="N", required=True, help="ranks to start")
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,…", help="where; other hosts need ssh (this machine)")
    parser.add_argument("--elastic", action="store_true", help="when a rank is lost, the others go on (all end)")
    parser.add_argument("--min-np", type=whole(1), metavar="M", help="with fewer ranks an elastic job ends (1)")
    parser.add_argument(
        "--max-restarts", type=whole(0), metavar="N", default=0, help="lost ranks of an elastic job to start again (0)"
    )
    parser.add_argument(
        "--reset-limit",
        type=whole(0),
        metavar="N",
        help="times that ranks may meet again before the job ends (no limit)",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND", help="what each rank runs")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """The exit status: 0, or that of the first rank that failed for good. Raises UsageError."""
    slots = places(args.hosts, args.num_proc)
    if not args.program:
        raise UsageError("no command: fusedcomm run -np 4 python train.py")
    if not args.elastic and (args.min_np or args.max_restarts or args.reset_limit is not None):
        raise UsageError("--min-np, --max-restarts and --reset-limit need --elastic")
    if args.min_np and args.min_np > args.num_proc:
        raise UsageError(f"--min-np {args.min_np} is more than -np {args.num_proc}")
    job = Job(args, slots)
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return job.elastic() if args.elastic else job.fixed()
    except StartError as error:
        job.say(str(error))
        return error.status
    finally:
        job.end()
        for number, handler in before.items():
            signal.signal(number, handler)


class StartError(Exception):
    """A command cannot be started. The text says why."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def _interrupt(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


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
    return host in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


class Job:
    """The workers of one job, and the store over which they meet."""

    def __init__(self, args: argparse.Namespace, slots: list[str]) -> None:
        import torch.distributed as dist

        from fusedcomm.horovod import rendezvous, signatures
        from fusedcomm.horovod.control import own_addresses

        self.args, self.slots, self.rendezvous, self.key_name = args, slots, rendezvous, signatures.KEY
        # This process signs, and so do local workers, which inherit its variables.
        os.environ[self.key_name] = secrets.token_hex(32)
        is_local = all(map(is_here, slots))
        address = "127.0.0.1" if is_local else own_addresses()[0]
        if not is_local and address == "127.0.0.1":
            raise UsageError(
                f"--hosts {args.hosts}: other hosts cannot reach this one, which has found no address of its own but "
                "127.0.0.1: set GLOO_SOCKET_IFNAME to the interface that they share"
            )
        # This process serves the store, at the address that workers are given, on a port that the system chooses.
        listener = socket.create_server((address, 0))
        port = listener.getsockname()[1]
        server = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.store = dist.PrefixStore(rendezvous.PREFIX, server)
        self.newest = self.last_met = rendezvous.NONE
        self.was_changed = False
        self.where = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not serve one
        }
        if is_local and sys.platform == "linux":
            # Without this, gloo looks up this machine's host name, which does not always resolve.
            self.where["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self.workers: list[Worker] = []

    def start(self, host: str, variables: dict[str, str], name: str) -> Worker:
        """Starts the command on a host, with these variables of its environment. Raises StartError."""
        variables = {**self.where, **variables}
        if is_here(host):
            process = _opened(self.args.program, env={**os.environ, **variables})
        else:
            remote = f"exec sh -c {shlex.quote(self.remote_script(variables))}"
            process = _opened(["ssh", *SSH_OPTIONS, host, remote], stdin=subprocess.PIPE)
            with contextlib.suppress(BrokenPipeError):  # ssh has failed, which its exit status says
                process.stdin.write(f"{os.environ[self.key_name]}\n".encode())
                process.stdin.flush()
        worker = Worker(name, host, process)
        self.workers.append(worker)
        return worker

    def remote_script(self, variables: dict[str, str]) -> str:
        """What `sh` runs on another host: the command with these variables and those of FORWARDED."""
        # Python's output goes through a pipe, and is to be seen at once.
        forwarded = {"PYTHONUNBUFFERED": "1"}
        forwarded |= {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
        forwarded |= variables
        del forwarded[self.key_name]
        return REMOTE.format(
            key=self.key_name,
            folder=shlex.quote(os.getcwd()),
            variables=" ".join(f"{name}={shlex.quote(value)}" for name, value in forwarded.items()),
            program=shlex.join(self.args.program),
            end_s=END_S,
        )

    def fixed(self) -> int:
        """Starts every rank, and ends all when one fails."""
        hosts = list(dict.fromkeys(self.slots))
        for rank, host in enumerate(self.slots):
            local_rank = self.slots[:rank].count(host)
            cross = [each for each in hosts if self.slots.count(each) > local_rank]
            numbers = {
                "RANK": rank,
                "SIZE": len(self.slots),
                "LOCAL_RANK": local_rank,
                "LOCAL_SIZE": self.slots.count(host),
                "CROSS_RANK": cross.index(host),
                "CROSS_SIZE": len(cross),
            }
            variables = {f"HOROVOD_{name}": str(number) for name, number in numbers.items()}
            self.start(host, {**variables, "HOROVOD_HOSTNAME": host}, str(rank))
        while self.workers:
            for worker in self.ended():
                if worker.process.returncode:
                    self.say(f"rank {worker.name} on {worker.host} {_end(worker)}; the others are ended")
                    return _status(worker)
            time.sleep(POLL_S)
        return 0

    def elastic(self) -> int:
        """Starts the workers, and publishes a generation whenever some are lost or added. See rendezvous.py."""
        num_started = 0
        min_np, restarts_left = self.args.min_np or 1, self.args.max_restarts
        waiting: list[Worker] = []  # started again, not ready yet

        def start(host: str) -> Worker:
            nonlocal num_started
            num_started += 1
            name = str(num_started - 1)
            variables = {"HOROVOD_ELASTIC": "1", "FUSEDCOMM_HOROVOD_WORKER": name, "HOROVOD_HOSTNAME": host}
            return self.start(host, variables, name)

        members = [start(host) for host in self.slots]
        have_met = {each.name for each in members}
        self.publish(members, False)
        has_finished = False
        reported: float | None = None
        while self.workers:
            self.put_back()
            lost = []
            for worker in self.ended():
                if worker.process.returncode == 0:
                    has_finished = True
                    # It has finished: others do not wait for it.
                    members = [each for each in members if each is not worker]
                    if not self.has_met():  # it never will
                        reported = time.monotonic()
                    continue
                lost.append(worker)
                self.say(f"worker {worker.name} on {worker.host} {_end(worker)}")
            if self.has_met():
                have_met.update(self.newest.members)
            if has_finished:
                # A worker that comes too late would train anew, alone.
                waiting, members = [], [each for each in members if each.name in have_met]
                if not members:
                    return 0
            waiting = [each for each in waiting if each not in lost]
            left = [each for each in members if each not in lost]
            for worker in lost:
                if restarts_left and not has_finished:
                    restarts_left -= 1
                    waiting.append(start(worker.host))
            ready = [each for each in waiting if self.rendezvous.are_set(self.store, [f"waiting/{each.name}"])]
            least = 1 if has_finished else min_np
            if lost and len(left) + len(waiting) < least:
                self.say(f"{len(left)} workers are left, fewer than {least}: the job ends")
                return 0 if has_finished else _status(lost[0])
            if self.rendezvous.are_set(self.store, [f"failed/{self.newest.number}"]):
                reported = reported or time.monotonic()
            is_due = reported is not None and time.monotonic() - reported > GRACE_S
            is_lost = len(left) < len(members)
            members = left
            # Losses make a generation at once, unless too few are left: then with those that are being started.
            if (is_lost or ready or is_due) and len(members) + len(ready) >= least:
                waiting = [each for each in waiting if each not in ready]
                members = members + ready
                limit = self.args.reset_limit
                if limit is not None and self.newest.number > limit and not has_finished:
                    self.say(f"ranks are to meet again after --reset-limit {limit} times: the job ends")
                    return _status(lost[0]) if lost else 1
                self.publish(members, is_lost and not ready)
                reported = None
            elif is_lost:
                reported = time.monotonic()  # tried again until there are enough
            time.sleep(POLL_S)
        return 0 if has_finished else 1

    def has_met(self) -> bool:
        """Whether every member of the newest generation was ready to connect."""
        if self.last_met != self.newest and self.rendezvous.are_ready(self.store, self.newest):
            self.last_met = self.newest
        return self.last_met == self.newest

    def publish(self, members: list[Worker], only_removed: bool) -> None:
        """Makes these workers the newest generation."""
        number = self.newest.number + 1
        sync_before = self.newest.sync_before if only_removed else number
        self.newest = self.rendezvous.Generation(number, [each.name for each in members], sync_before)
        self.rendezvous.publish(self.store, self.newest)

    def put_back(self) -> None:
        """Publishes the newest generation again if it was changed. Says so once."""
        if self.rendezvous.put_back(self.store, self.newest) and not self.was_changed:
            self.was_changed = True
            self.say(
                "somebody without this job's key has changed its list of workers in the store. It is put back, now and "
                "each further time: keep others away from the port, by a firewall or a network of your own"
            )

    def ended(self) -> Iterator[Worker]:
        """The workers that have ended since the last call."""
        found = [worker for worker in self.workers if worker.process.poll() is not None]
        self.workers = [worker for worker in self.workers if worker not in found]
        return iter(found)

    def end(self) -> None:
        """Ends all workers that still run."""
        os.environ.pop(self.key_name)
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


def _opened(command: list[str], **options: Any) -> subprocess.Popen:
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


def _end(worker: Worker) -> str:
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


def _status(worker: Worker) -> int:
    """As shells count: 128 + the signal."""
    code = worker.process.returncode
    return 128 - code if code < 0 else code
