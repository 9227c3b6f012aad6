"""How fast is a loss over, where ranks come and go? bench/ddp_step.py has steps of members of whom none is lost.

    python bench/members.py
    python bench/members.py --torchft FOLDER

Real processes of this machine, over gloo. A rank that trains is killed by SIGKILL, any one, at a random moment. From
then to the end of the first step of the smaller group on the last survivor; and the backward passes of survivors that
were thrown away. The ways: Members; fusedcomm.horovod.elastic under `fusedcomm run --elastic`, with a commit in each
step, and in every tenth; torchft, if it is installed, or is in the folder --torchft (pip install --target FOLDER
torchft opentelemetry-sdk opentelemetry-exporter-otlp-proto-http): a replica group for each rank.

Parameters are compared, in all bits, between ranks after every step.

Needs half a GiB of memory for each rank; ten minutes, one minute with --quick.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path

from lib.common import Report, Row, run_command
from lib.job import Job, JobError

MEMBERS, HOROVOD, HOROVOD_10, TORCHFT = "members", "horovod elastic", "horovod elastic, commits 1 in 10", "torchft"
KILL_WAYS = {MEMBERS: ("members", 1), HOROVOD: ("horovod", 1), HOROVOD_10: ("horovod", 10), TORCHFT: ("torchft", 1)}
"""By name: the way of _members_rank.py, and steps from one commit to the next."""
WARM_STEPS = 5
"""Steps that every rank has told before one is killed."""
BENCH = Path(__file__).resolve().parent


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks at the beginning, 3 or more (4)")
    parser.add_argument("--ways", nargs="+", choices=KILL_WAYS, default=list(KILL_WAYS), help="(all)")
    parser.add_argument("--kills", type=int, default=4, help="of each way (4)")
    parser.add_argument("--kill-params", type=float, default=1e6, help="elements of the model (1e6)")
    parser.add_argument("--compute-ms", type=float, default=50, help="that a step sleeps (50)")
    parser.add_argument("--torchft", metavar="FOLDER", default="", help="where it is installed")
    parser.add_argument("--timeout", type=float, default=120, help="seconds of silence that are an error (120)")
    parser.add_argument("--quick", action="store_true", help="one way and one kill: the figures mean little")
    parser.add_argument("--json", metavar="PATH", help="write results there as soon as they are known")
    if parser.parse_args().quick:
        parser.set_defaults(ways=[MEMBERS], kills=1)
    arguments = parser.parse_args()
    for name, least in (("ranks", 3), ("kills", 1)):
        if getattr(arguments, name) < least:
            parser.error(f"--{name} must be at least {least}")
    return arguments


def start_ranks(job: Job, way: str, options: dict, torchft: str) -> None:
    rank, environment = str(BENCH / "_members_rank.py"), {}
    if way == "torchft":
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [torchft, os.environ.get("PYTHONPATH")]))
        job.start([rank, "lighthouse", job.pipe, json.dumps(options)], environment)
        job.wait_for("the lighthouse", lambda: bool(job.told))
        options["lighthouse"] = job.told[0]["lighthouse"]
    if way == "horovod":
        command = [sys.executable, rank, way, job.pipe, json.dumps(options)]
        job.start(["-m", "fusedcomm", "run", "-np", str(options["ranks"]), "--elastic", *command])
    else:
        for place in range(options["ranks"]):
            job.start([rank, way, job.pipe, json.dumps({**options, "place": place})], environment)


def kill(job: Job, step_s: float) -> dict:
    """Kills a rank, and waits until the others have ended a step without it: what that took and cost."""
    size = len(job.alive)
    victim, killed = job.kill_one(within_s=10 * step_s)
    before = {pid: job.steps[pid][-1] for pid in job.alive}
    job.forget_digests()

    def told_since(pid: int) -> list[dict]:
        return [told for told in job.steps[pid] if told["at"] > killed and told["size"] == size - 1]

    job.wait_for("the survivors", lambda: all(map(told_since, job.alive)))
    first = {pid: told_since(pid)[0] for pid in job.alive}
    thrown = [
        (first[pid]["passes"] - before[pid]["passes"]) - (first[pid]["step"] - before[pid]["step"]) for pid in first
    ]
    return {
        "ranks": size,
        "to_next_step_s": max(told["at"] for told in first.values()) - killed,
        "pause_s": max(told.get("pause_s", 0.0) for told in first.values()),
        "step_s": step_s,
        "passes_thrown_away": sum(thrown),
        "load": os.getloadavg()[0],
    }


def one_job(arguments: argparse.Namespace, name: str, seed: int, num_kills: int) -> list[dict]:
    """A job from which one rank after the other is killed, while two are left."""
    way, commit_every = KILL_WAYS[name]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), arguments.timeout, random.Random(seed))
        options = {"ranks": arguments.ranks, "folder": folder, "commit_every": commit_every, "place": 0}
        options |= {"kill_params": arguments.kill_params, "compute_ms": arguments.compute_ms}
        found: list[dict] = []
        try:
            start_ranks(job, way, options, arguments.torchft)
            while len(found) < min(num_kills, arguments.ranks - 2):
                size = arguments.ranks - len(found)
                least = {pid: len(job.steps[pid]) for pid in job.alive}

                def is_warm(size: int = size, least: dict = least) -> bool:
                    recent = [job.steps[pid][least.get(pid, 0) :] for pid in job.alive]
                    warm = [len(of_rank) >= WARM_STEPS and of_rank[-WARM_STEPS]["size"] == size for of_rank in recent]
                    return len(warm) == size and all(warm)

                job.wait_for("the first steps", is_warm)
                found.append(kill(job, step_s_of(job)))
        finally:
            job.end()
    return found


def step_s_of(job: Job) -> float:
    """The median time of the last steps."""
    times = [[told["at"] for told in job.steps[pid][-WARM_STEPS:]] for pid in job.alive]
    return statistics.median(b - a for of_rank in times for a, b in zip(of_rank, of_rank[1:], strict=False))


def kills(arguments: argparse.Namespace, report: Report) -> None:
    found: dict[str, list[dict]] = {name: [] for name in arguments.ways}
    if TORCHFT in found and not arguments.torchft and importlib.util.find_spec("torchft") is None:
        report.missing("kill", TORCHFT, "it is not installed: see --torchft", failed=False)
        del found[TORCHFT]
    report.extra["kills"] = found
    turn = 0
    while pending := [name for name in found if len(found[name]) < arguments.kills]:
        turn += 1
        for name in pending:  # the ways take turns
            try:
                found[name] += one_job(arguments, name, turn, arguments.kills - len(found[name]))
            except JobError as error:
                report.missing("kill", name, error)
                print(error)
                del found[name]
                continue
            for each in found[name][-(arguments.ranks - 2) :]:
                print(f"kill {name}: {json.dumps({key: round(value, 3) for key, value in each.items()})}", flush=True)
            report.write()
    for name, each in found.items():
        times = [one["to_next_step_s"] for one in each]
        thrown = [one["passes_thrown_away"] for one in each]
        figures = {
            "worst_s": max(times),
            "step_s": statistics.median(one["step_s"] for one in each),
            "pause_s": statistics.median(one["pause_s"] for one in each),
            "passes_thrown_away": statistics.fmean(thrown),
            "kills": len(each),
        }
        median = statistics.median(times)
        case = f"kill/{arguments.ranks} ranks"
        report.add([Row(case, name, int(arguments.kill_params), 0, median, min(times), True, figures=figures)])
        print(
            f"{case} {name}: next step after {median:.2f} s (worst {max(times):.2f}), a step takes "
            f"{figures['step_s']:.2f} s, passes thrown away: {thrown}",
            flush=True,
        )


def main() -> None:
    arguments = parse()
    settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "torchft")}
    report = Report(arguments.json, settings=settings, load_at_begin=os.getloadavg())
    report.env.update(threads=1, ranks=arguments.ranks)
    kills(arguments, report)
    report.finish()


if __name__ == "__main__":
    run_command(main)
