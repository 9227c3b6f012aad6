"""What grows with the ranks: connections, threads, memory, time to attach, and bytes while nothing is trained.

    python bench/scale.py                              # 2 to 16 processes of this machine, as root
    python bench/scale.py --ranks 32 64 --members 256 1024

Every rank is a process, forked after torch is imported, over gloo in a network of its own, so that all bytes of its
loopback are the job's. What a way adds to torch's process group is printed for each rank:

    attach s    from the first rank's call to the last rank's return
    sockets     open connections and listeners of rank 0, and of the rank with the most
    threads     of the rank with the most
    MiB         of private memory, the mean over ranks
    step MB     that a rank sends in a step of a model of 256 KiB; torch's own sums are in the row "torch DDP"
    idle B/s    that a rank sends while nobody trains

--members: so many members lose one and take in another, a few times, their rules in a simulated network: for each
change the seconds of computing and the bytes sent, of the mean member and of the one that proposes.
"""

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  DDP would import it on each rank
import torch.distributed as dist
from lib.common import Report, Row, run_command
from lib.oracle import Process, World
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
import fusedcomm.horovod as hvd
from fusedcomm.ranks.groups import end_together

IDLE_S, STEPS = 5.0, 4


def torch_ddp(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model)


def ddp(model: torch.nn.Module) -> torch.nn.Module:
    wrapped = DistributedDataParallel(model)
    fusedcomm.attach(wrapped, "int8", quiet=True)
    return wrapped


def reducer(model: torch.nn.Module) -> torch.nn.Module:
    fusedcomm.GradReducer(model, "int8", quiet=True)
    return model


def fsdp(model: torch.nn.Module) -> torch.nn.Module:
    fully_shard(model)
    fusedcomm.attach(model, "int8", quiet=True)
    return model


def members(model: torch.nn.Module) -> torch.nn.Module:
    fusedcomm.GradReducer(model, "int8", quiet=True, members=fusedcomm.Members())
    return model


def horovod(model: torch.nn.Module) -> torch.nn.Module:
    hvd.init()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=hvd.Compression.int8)
    return model


WAYS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "torch DDP": torch_ddp,
    "ddp": ddp,
    "reducer": reducer,
    "fsdp": fsdp,
    "horovod": horovod,
    "members": members,
}


def state() -> dict[str, float]:
    """Of this process."""
    sockets = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            sockets += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    private = Path("/proc/self/smaps_rollup").read_text().split("Private_Dirty:")[1].split()[0]
    return {"sockets": sockets, "threads": len(os.listdir("/proc/self/task")), "mib": int(private) / 1024}


def sent() -> int:
    """Bytes that all ranks have sent."""
    (loopback,) = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(loopback.split()[1])


def rank_of(job: argparse.Namespace, rank: int, results: multiprocessing.SimpleQueue) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(job.size)}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
    dist.barrier()
    before, began = state(), time.monotonic()
    wrapped = WAYS[job.way](model)
    dist.barrier()
    attach_s = time.monotonic() - began

    optimizer = getattr(model, "optimizer", None) or torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        wrapped(torch.full((2, 128), (rank + 1.0) / job.size)).square().mean().backward()
        optimizer.step()

    step()
    dist.barrier()
    numbers = [sent()]
    dist.barrier()
    for _ in range(STEPS):
        step()
    dist.barrier()
    numbers.append(sent())
    time.sleep(1.0)  # the last rank leaves the barrier
    numbers.append(sent())
    time.sleep(IDLE_S)
    numbers.append(sent())
    dist.barrier()
    after = state()
    weight = model[0].weight
    own = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach()
    of_rank_0 = own.clone()
    dist.broadcast(of_rank_0, 0)
    found = {name: after[name] - before[name] for name in after}
    results.put(found | {"attach_s": attach_s, "sent": numbers, "equal": torch.equal(own, of_rank_0)})
    end_together()


def processes(arguments: argparse.Namespace, report: Report) -> None:
    fork = multiprocessing.get_context("fork")
    columns = ("attach s", "sockets", "threads", "MiB", "step MB", "idle B/s")
    print("way        ranks" + "".join(f"{column:>10}" for column in columns))
    for way in arguments.ways:
        for size in arguments.ranks:
            results = fork.SimpleQueue()
            job = argparse.Namespace(way=way, size=size)
            ranks = [fork.Process(target=rank_of, args=(job, rank, results)) for rank in range(size)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                report.missing(f"{size} ranks", way, "a rank failed")
                continue
            found = [results.get() for _ in ranks]
            begun, stepped, idle, rested = found[0]["sent"]
            figures = {name: max(each[name] for each in found) for name in ("attach_s", "sockets", "threads")}
            figures["mib"] = sum(each["mib"] for each in found) / size
            figures["step_nbytes"] = (stepped - begun) / STEPS / size
            figures["idle_nbytes_s"] = (rested - idle) / IDLE_S / size
            checked = all(each["equal"] for each in found)
            attach_s = figures["attach_s"]
            report.add([Row(f"{size} ranks", way, 4 * 128 * 129, 0, attach_s, attach_s, checked, figures=figures)])
            print(
                f"{way:10} {size:5}{attach_s:10.2f}{figures['sockets']:10.0f}{figures['threads']:10.0f}"
                f"{figures['mib']:10.1f}{figures['step_nbytes'] / 1e6:10.3f}{figures['idle_nbytes_s']:10.0f}",
                flush=True,
            )


class Measured(World):
    """A simulated job that notes what its members compute and send."""

    def __init__(self, size: int) -> None:
        self.seconds: collections.Counter[str] = collections.Counter()
        self.sent: list[tuple[str, dict]] = []
        super().__init__(0, size, uid_of="{:032x}".format)
        self.tell_states()

    def act(self, process: Process, do: Callable[[], object]) -> None:
        began = time.thread_time()
        super().act(process, do)
        self.seconds[process.uid] += time.thread_time() - began

    def send(self, source: str, target: str, message: dict) -> None:
        self.sent.append((source, message))
        super().send(source, target, message)

    def change(self, change: Callable[[], object]) -> tuple[list[float], list[int]]:
        """(seconds, bytes) of each member until all are in the view that the change leads to."""
        self.seconds.clear()
        self.sent.clear()
        change()
        self.flow()
        self.make_ready()
        lengths = {id(message): len(json.dumps(message)) for _, message in self.sent}  # most go to many members
        nbytes: collections.Counter[str] = collections.Counter()
        for source, message in self.sent:
            nbytes[source] += lengths[id(message)]
        uids = [process.uid for process in self.alive()]
        return [self.seconds[uid] for uid in uids], [nbytes[uid] for uid in uids]


def simulated(size: int, num_changes: int, report: Report) -> None:
    job = Measured(size)
    changes = {"a second": job.tell_states, "loss": lambda: job.lose(job.alive()[0].uid), "join": job.propose_joiner}
    for name, change in changes.items():
        found = [job.change(change) for _ in range(1 if name == "a second" else num_changes)]
        seconds, nbytes = ([each for of_change in kind for each in of_change] for kind in zip(*found, strict=True))
        views = {(each.rules.view.number, each.rules.roster.active.number) for each in job.alive()}
        figures = {
            "mean_s": sum(seconds) / len(seconds),
            "most_s": max(seconds),
            "mean_nbytes": sum(nbytes) / len(nbytes),
            "most_nbytes": max(nbytes),
        }
        all_active = len(views) == 1 and len(set(*views)) == 1
        case = f"{size} members, {name}"
        report.add([Row(case, "rules", 0, 0, figures["mean_s"], figures["most_s"], all_active, figures=figures)])
        print(
            f"{case:28} computing {figures['mean_s'] * 1e3:9.2f} ms, most {figures['most_s'] * 1e3:9.2f} ms; sent "
            f"{figures['mean_nbytes'] / 1e6:8.3f} MB, most {figures['most_nbytes'] / 1e6:8.3f} MB",
            flush=True,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16], help="processes of a job (2 4 8 16)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="(all)")
    parser.add_argument("--members", type=int, nargs="*", default=[], help="also simulate so many members")
    parser.add_argument("--changes", type=int, default=10, help="losses, and then joins, of simulated members (10)")
    parser.add_argument("--quick", action="store_true", help="defaults of 2 processes, 8 members, 2 changes")
    parser.add_argument("--json", metavar="PATH", help="write results there as soon as they are known")
    if parser.parse_args().quick:
        parser.set_defaults(ranks=[2], members=[8], changes=2)
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.ranks and os.geteuid() == 0 and "FUSEDCOMM_SCALE" not in os.environ:
        command = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, "FUSEDCOMM_SCALE": "1"}).returncode)
    report = Report(arguments.json, command=sys.argv[1:])
    for size in arguments.members:
        simulated(size, arguments.changes, report)
    processes(arguments, report)
    report.finish()


if __name__ == "__main__":
    run_command(main)
