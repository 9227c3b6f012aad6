"""``fusedcomm run``: starts the ranks of a script that uses fusedcomm.horovod, here or over ssh.

torchrun starts such scripts just as well, as long as no rank is lost. When one is, torchrun's agent ends every process
of its host and starts the script again from its first line: nothing survives in memory, and the number of processes on
a host is fixed. With --elastic this launcher leaves the other ranks alone, and tells them in a store who is alive.
"""

import argparse
import dataclasses
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from fusedcomm.tools.arguments import whole
from fusedcomm.tools.errors import UsageError

POLL_S = 0.05
GRACE_S = 2.0
"""After a rank has reported a failure: how long its cause may take to end. Then all ranks that live meet again."""
END_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
SSH_OPTIONS = ("-tt", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10")
"""With a terminal, the remote process ends with this one. A host that is cut off is lost after three intervals."""
FORWARDED = ("HOROVOD_", "FUSEDCOMM_", "GLOO_", "NCCL_", "OMP_", "PYTHON", "TORCH_")


@dataclasses.dataclass
class Worker:
    name: str
    host: str
    process: subprocess.Popen


def add_to(commands: "argparse._SubParsersAction") -> None:
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
    finally:
        job.end()
        for number, handler in before.items():
            signal.signal(number, handler)


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
    return host in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


class Job:
    """The workers of one job, and the store over which they meet."""

    def __init__(self, args: argparse.Namespace, slots: list[str]) -> None:
        import torch.distributed as dist

        from fusedcomm.horovod import rendezvous
        from fusedcomm.horovod.control import own_addresses

        self.args, self.slots, self.rendezvous = args, slots, rendezvous
        is_local = all(map(is_here, slots))
        address = "127.0.0.1" if is_local else own_addresses()[0]
        # This process serves the store, on a port that the system chooses.
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store = dist.PrefixStore(rendezvous.PREFIX, server)
        self.where = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 need not serve one
        }
        if is_local and sys.platform == "linux":
            # Without this, gloo looks up this machine's host name, which does not always resolve.
            self.where["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self.workers: list[Worker] = []

    def start(self, host: str, variables: dict[str, str], name: str) -> Worker:
        variables = {**self.where, **variables}
        if is_here(host):
            process = subprocess.Popen(self.args.program, env={**os.environ, **variables})
        else:
            forwarded = {key: value for key, value in os.environ.items() if key.startswith(FORWARDED)} | variables
            assigned = " ".join(f"{key}={shlex.quote(value)}" for key, value in forwarded.items())
            remote = f"cd {shlex.quote(os.getcwd())} && exec env {assigned} {shlex.join(self.args.program)}"
            process = subprocess.Popen(["ssh", *SSH_OPTIONS, host, remote], stdin=subprocess.DEVNULL)
        worker = Worker(name, host, process)
        self.workers.append(worker)
        return worker

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
            return self.start(host, self.elastic_variables(host, num_started - 1), str(num_started - 1))

        members = published = [start(host) for host in self.slots]
        have_met = {each.name for each in members}
        number, has_finished = self.publish(members, False), False
        reported: float | None = None
        while self.workers:
            lost = []
            for worker in self.ended():
                if worker.process.returncode == 0:
                    has_finished = True
                    # It has finished: others do not wait for it.
                    members = [each for each in members if each is not worker]
                    if not self.has_met(number, published):  # it never will
                        reported = time.monotonic()
                    continue
                lost.append(worker)
                self.say(f"worker {worker.name} on {worker.host} {_end(worker)}")
            if self.has_met(number, published):
                have_met.update(each.name for each in published)
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
            ready = [each for each in waiting if self.store.check([f"waiting/{each.name}"])]
            least = 1 if has_finished else min_np
            if lost and len(left) + len(waiting) < least:
                self.say(f"{len(left)} workers are left, fewer than {least}: the job ends")
                return 0 if has_finished else _status(lost[0])
            if self.store.check([f"failed/{number}"]):
                reported = reported or time.monotonic()
            is_due = reported is not None and time.monotonic() - reported > GRACE_S
            is_lost = len(left) < len(members)
            members = left
            # Losses make a generation at once, unless too few are left: then with those that are being started.
            if (is_lost or ready or is_due) and len(members) + len(ready) >= least:
                waiting = [each for each in waiting if each not in ready]
                members = published = members + ready
                limit = self.args.reset_limit
                if limit is not None and number > limit and not has_finished:
                    self.say(f"ranks are to meet again after --reset-limit {limit} times: the job ends")
                    return _status(lost[0]) if lost else 1
                number, reported = self.publish(members, is_lost and not ready), None
            elif is_lost:
                reported = time.monotonic()  # tried again until there are enough
            time.sleep(POLL_S)
        return 0 if has_finished else 1

    def has_met(self, number: int, members: list[Worker]) -> bool:
        """Whether every member of a generation was ready to connect."""
        return self.store.check([f"ready/{number}/{each.name}" for each in members])

    def elastic_variables(self, host: str, index: int) -> dict[str, str]:
        return {"HOROVOD_ELASTIC": "1", "FUSEDCOMM_HOROVOD_WORKER": str(index), "HOROVOD_HOSTNAME": host}

    def publish(self, members: list[Worker], only_removed: bool) -> int:
        return self.rendezvous.publish(self.store, [each.name for each in members], only_removed)

    def ended(self) -> Iterator[Worker]:
        """The workers that have ended since the last call."""
        found = [worker for worker in self.workers if worker.process.poll() is not None]
        self.workers = [worker for worker in self.workers if worker not in found]
        return iter(found)

    def end(self) -> None:
        """Ends all workers that still run."""
        for worker in self.workers:
            worker.process.terminate()
        until = time.monotonic() + END_S
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()

    def say(self, text: str) -> None:
        print(f"fusedcomm run: {text}", file=sys.stderr, flush=True)


def _end(worker: Worker) -> str:
    code = worker.process.returncode
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has failed with exit status {code}"


def _status(worker: Worker) -> int:
    """As shells count: 128 + the signal."""
    code = worker.process.returncode
    return 128 - code if code < 0 else code
