"""``fusedcomm run``: starts the ranks of a script, here or over ssh.

torchrun starts such scripts just as well, as long as no rank is lost. When one is, torchrun's agent ends every process
of its host and starts the script again from its first line: nothing survives in memory, and the number of processes on
a host is fixed. With --members (run_members.py) and --elastic this launcher leaves the other ranks alone. For elastic
jobs of Horovod it tells them in a store who is alive.
"""

import argparse
import signal
import time

from fusedcomm.tools.arguments import whole
from fusedcomm.tools.errors import UsageError
from fusedcomm.tools.run_members import MembersJob
from fusedcomm.tools.workers import POLL_S, StartError, Worker, Workers, end_of, places, status_of

GRACE_S = 2.0
"""After a rank has reported a failure: how long its cause may take to end. Then all ranks that live meet again."""


def add_to(commands: "argparse._SubParsersAction") -> None:
    """Adds ``fusedcomm run`` to the commands."""
    parser = commands.add_parser(
        "run",
        help="start the ranks of a fusedcomm.horovod script, also elastic ones, or ranks that come and go",
        description="Starts a command once for each rank, with the variables that hvd.init() reads. Ends all ranks if\n"
        "one fails. With --elastic the others go on: hvd.elastic.run() restores their state from memory.\n"
        "With --members, for scripts with fusedcomm.Members(join='auto'), the others go on within the step.",
        example="fusedcomm run -np 4 python train.py\n"
        "fusedcomm run -np 4 -H one:2,two:2 python train.py\n"
        "fusedcomm run -np 3 --elastic --min-np 2 --max-restarts 1 python train.py\n"
        "fusedcomm run -np 4 --members --max-restarts 10 python train.py\n"
        "fusedcomm run -np 2 --members --join 10.0.0.7:29411 python train.py",
    )
    parser.add_argument("-np", "--num-proc", type=whole(1), metavar="N", required=True, help="ranks to start")
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,…", help="where; other hosts need ssh (this machine)")
    parser.add_argument("--elastic", action="store_true", help="when a rank is lost, the others go on (all end)")
    parser.add_argument(
        "--members",
        action="store_true",
        help="ranks of fusedcomm.Members: a lost one starts again, and joins (Horovod's)",
    )
    parser.add_argument(
        "--join",
        metavar="HOST:PORT",
        help="with --members: these ranks join a member, or one of those in a file (they begin)",
    )
    parser.add_argument(
        "--address",
        metavar="HOST",
        help="with --members: where other hosts reach this one (127.0.0.1, or with -H found)",
    )
    parser.add_argument("--min-np", type=whole(1), metavar="M", help="with fewer ranks an elastic job ends (1)")
    parser.add_argument(
        "--max-restarts",
        type=whole(0),
        metavar="N",
        default=0,
        help="lost ranks to start again, with --elastic or --members (0)",
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
    _refuse(args)
    if not args.program:
        raise UsageError("no command: fusedcomm run -np 4 python train.py")
    job = MembersJob(args, slots) if args.members else Job(args, slots)
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        if isinstance(job, MembersJob):
            return job.members()
        return job.elastic() if args.elastic else job.fixed()
    except StartError as error:
        job.say(str(error))
        return error.status
    finally:
        job.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def _refuse(args: argparse.Namespace) -> None:
    """Raises UsageError for options that do not fit together."""
    if args.members and args.elastic:
        raise UsageError("--members and --elastic exclude each other: --elastic is for scripts of fusedcomm.horovod")
    for option, value in (("--join", args.join), ("--address", args.address)):
        if value and not args.members:
            raise UsageError(f"{option} {value} needs --members")
    if args.members and args.min_np:
        raise UsageError("--min-np is for --elastic: the script's fusedcomm.Members(min_ranks=…) says it for --members")
    if not args.elastic and (args.min_np or args.reset_limit is not None):
        raise UsageError("--min-np and --reset-limit need --elastic")
    if not args.elastic and not args.members and args.max_restarts:
        raise UsageError("--max-restarts needs --elastic or --members")
    if args.min_np and args.min_np > args.num_proc:
        raise UsageError(f"--min-np {args.min_np} is more than -np {args.num_proc}")


def _interrupt(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class Job(Workers):
    """The ranks of a script of Horovod's."""

    def __init__(self, args: argparse.Namespace, slots: list[str]) -> None:
        import torch.distributed as dist

        from fusedcomm.horovod import rendezvous

        super().__init__(args, slots)
        self.rendezvous = rendezvous
        self.store = dist.PrefixStore(rendezvous.PREFIX, self.server)
        self.newest = self.last_met = rendezvous.NONE
        self.where |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": self.address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self.port)}

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
                    self.say(f"rank {worker.name} on {worker.host} {end_of(worker)}; the others are ended")
                    return status_of(worker)
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
                self.say(f"worker {worker.name} on {worker.host} {end_of(worker)}")
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
            ready = [each for each in waiting if self.store.check([f"waiting/{each.name}"])]
            least = 1 if has_finished else min_np
            if lost and len(left) + len(waiting) < least:
                self.say(f"{len(left)} workers are left, fewer than {least}: the job ends")
                return 0 if has_finished else status_of(lost[0])
            if self.store.check([f"failed/{self.newest.number}"]):
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
                    return status_of(lost[0]) if lost else 1
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
