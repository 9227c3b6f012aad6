"""``fusedcomm run``: starts the ranks of a script, here or over ssh.

torchrun starts such scripts just as well, as long as no rank is lost. When one is, torchrun's agent ends every process
of its host and starts the script again from its first line: nothing survives in memory, and the number of processes on
a host is fixed. With --members and --elastic this launcher leaves the other ranks alone (run_members.py): the ranks of
an elastic job of Horovod's are members, too.
"""

import argparse
import signal
import time

from fusedcomm.tools.arguments import whole
from fusedcomm.tools.errors import UsageError
from fusedcomm.tools.run_members import MembersJob
from fusedcomm.tools.workers import POLL_S, StartError, Workers, end_of, places, status_of


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
        help="with --members or --elastic: these ranks join a member, or one of those in a file (they begin)",
    )
    parser.add_argument(
        "--address",
        metavar="HOST",
        help="with --members or --elastic: where other hosts reach this one (127.0.0.1, or with -H found)",
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
    job = MembersJob(args, slots) if args.members or args.elastic else Job(args, slots)
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        return job.members() if isinstance(job, MembersJob) else job.fixed()
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
        if value and not (args.members or args.elastic):
            raise UsageError(f"{option} {value} needs --members")
    if args.members and args.min_np:
        raise UsageError("--min-np is for --elastic: the script's fusedcomm.Members(min_ranks=…) says it for --members")
    if not args.elastic and (args.min_np or args.reset_limit is not None):
        raise UsageError("--min-np and --reset-limit need --elastic")
    if not args.elastic and not args.members and args.max_restarts:
        raise UsageError("--max-restarts needs --elastic or --members")
    if args.min_np and args.min_np > args.num_proc and args.join is None:
        raise UsageError(f"--min-np {args.min_np} is more than -np {args.num_proc}")


def _interrupt(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


class Job(Workers):
    """The ranks of a script of Horovod's."""

    def __init__(self, args: argparse.Namespace, slots: list[str]) -> None:
        super().__init__(args, slots)
        self.where |= {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}

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
            self.start(host, {**variables, **self.place(rank), "HOROVOD_HOSTNAME": host}, str(rank))
        while self.workers:
            for worker in self.ended():
                if worker.process.returncode:
                    self.say(f"rank {worker.name} on {worker.host} {end_of(worker)}; the others are ended")
                    return status_of(worker)
            time.sleep(POLL_S)
        return 0
