"""Kills ranks that train at random moments, lets others join, and checks that all have the same bits after every step.

    python tests/members/chaos.py --ranks 4 --kills 300 --wire int8

Each process is forked from this one, which has imported everything, so that a rank starts in a moment.
"""

import argparse
import hashlib
import json
import os
import random
import select
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  (imported by the first DataParallel)
import torch.distributed as dist
from torch import nn

import fusedcomm

LONGEST_WAIT_S = 180.0
"""Seconds after which a rank that says nothing counts as hanging."""


def digest_of(tensors) -> str:
    """A short text that differs if a bit does."""
    return hashlib.sha1(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


def make_model(width: int) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def train(args, out: int, founder: tuple[int, str] | None, address: str | None, last: Path) -> None:
    """A rank: trains until the step in the file `last` has ended, and writes a line for each step to the pipe `out`."""

    def say(**told) -> None:
        os.write(out, (json.dumps({"at": time.monotonic(), "pid": os.getpid(), **told}) + "\n").encode())

    torch.set_num_threads(1)
    if founder is not None:
        rank, store = founder
        dist.init_process_group("gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks)
    members = fusedcomm.Members(join=address, min_ranks=1)
    config = fusedcomm.Config(
        args.wire,
        feedback=fusedcomm.Feedback("fp32") if args.feedback else None,
        chunks=fusedcomm.Chunks(nbytes=16384, in_flight=3),
    )
    net = make_model(args.width)
    model = fusedcomm.DataParallel(net, config=config, members=members, quiet=True, bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    members.carry(optimizer=optimizer)
    say(ready=True, address=members.address, step=members.step, view=members.view)
    while not last.exists() or members.step < int(last.read_text()):
        step = members.step
        torch.manual_seed(step * 100 + members.rank)
        loss = (model(torch.randn(8, 16)) - torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = [value["exp_avg_sq"] for value in optimizer.state.values()]
        say(step=step, digest=digest_of([*net.parameters(), *state]), size=members.size, view=members.view)
        time.sleep(args.pause)
    say(changes=[[change.pause_s, len(change.lost), len(change.joined)] for change in model.comm.stats().changes])
    members.leave()
    os._exit(0)


class Watcher:
    """Reads what the ranks tell, and checks it."""

    def __init__(self, args) -> None:
        self.args = args
        self.read_end, self.write_end = os.pipe()
        self.buffer = b""
        self.digests: dict[int, str] = {}
        self.ready: dict[int, dict] = {}  # by pid, of living ranks
        self.steps: dict[int, dict] = {}  # by pid: the last step that it has told
        self.first_steps: dict[int, float] = {}
        self.first_of_view: dict[int, tuple[int, float]] = {}  # by pid: its view, and when it ended a step there first
        self.ended: dict[int, list] = {}

    def fork(self, founder=None, address=None, last: Path = Path()) -> int:
        """Starts a rank; returns its pid."""
        pid = os.fork()
        if pid == 0:
            try:
                train(self.args, self.write_end, founder, address, last)
            except BaseException as error:
                line = json.dumps({"pid": os.getpid(), "failed": f"{type(error).__name__}: {error}"[:1500]}) + "\n"
                os.write(self.write_end, line.encode())
                os._exit(1)
        return pid

    def read(self, timeout_s: float) -> bool:
        """Takes what has been told; False if nothing was within the time."""
        if not select.select([self.read_end], [], [], timeout_s)[0]:
            return False
        self.buffer += os.read(self.read_end, 1 << 16)
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            self.take(json.loads(line))
        return True

    def take(self, told: dict) -> None:
        """Checks one line."""
        pid = told["pid"]
        if "failed" in told:
            raise AssertionError(f"a rank failed: {told['failed']}")
        if "ready" in told:
            self.ready[pid] = told
        if "changes" in told:
            self.ended[pid] = told["changes"]
        if "digest" in told:
            known = self.digests.setdefault(told["step"], told["digest"])
            assert known == told["digest"], f"step {told['step']}: {told} differs from {known}"
            assert pid not in self.steps or told["step"] == self.steps[pid]["step"] + 1, (
                f"{pid} left out a step: {told}"
            )
            self.steps[pid] = told
            self.first_steps.setdefault(pid, told["at"])
            if told["view"] > self.first_of_view.get(pid, (-1, 0.0))[0]:
                self.first_of_view[pid] = (told["view"], told["at"])

    def wait_for(self, what, condition) -> None:
        """Waits until condition() holds."""
        while not condition():
            if not self.read(LONGEST_WAIT_S):
                raise AssertionError(f"nothing was said for {LONGEST_WAIT_S:g} s, waiting for {what}: {self.steps}")


def run(args) -> dict:
    """Returns the pauses. Raises AssertionError if a rank fails, hangs, or has other bits."""
    choose = random.Random(args.seed)
    watcher = Watcher(args)
    folder = Path(tempfile.mkdtemp(prefix="chaos"))
    last = folder / "last"
    alive = {watcher.fork((rank, str(folder / "store")), last=last) for rank in range(args.ranks)}
    watcher.wait_for("the first steps", lambda: alive <= set(watcher.steps))
    pauses, joins, num_first, began = [], [], 0, time.monotonic()
    for kill in range(args.kills):
        num = 2 if args.ranks > 3 and choose.random() < args.twice else 1
        sizes = [watcher.steps[pid]["size"] for pid in alive]
        assert min(sizes) <= args.ranks
        time.sleep(choose.random() * args.spread)
        while watcher.read(0):
            pass
        oldest = min(alive, key=lambda pid: watcher.ready[pid]["at"])
        victims = choose.sample(sorted(alive), num)
        num_first += oldest in victims
        before = max(told["view"] for told in watcher.steps.values())
        killed = time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            alive.discard(pid)
        early = choose.random() < args.early  # a rank may join before the others have gone on
        joiners = set()
        for moment in ("early", "late"):
            if (moment == "early") == early:
                for _ in victims:
                    address = watcher.ready[choose.choice(sorted(alive))]["address"]
                    joiners.add(watcher.fork(address=address, last=last))
            if moment == "early":
                watcher.wait_for("survivors", lambda: all(watcher.steps[pid]["view"] > before for pid in alive))
                pauses.append(max(watcher.first_of_view[pid][1] for pid in alive) - killed)
        forked = time.monotonic()
        watcher.wait_for("joiners", lambda: joiners <= set(watcher.steps))
        joins += [watcher.first_steps[pid] - forked for pid in joiners]
        alive |= joiners
        if args.say:
            print(
                fX,
                flush=True,
            )
    end = max(watcher.digests) + 20
    last.with_suffix(".new").write_text(str(end))
    last.with_suffix(".new").rename(last)
    watcher.wait_for("the end", lambda: alive <= set(watcher.ended))
    for pid in alive:
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"{pid} ended with {status}"
    changes = [change for changes in watcher.ended.values() for change in changes]
    return {
        "ranks": args.ranks,
        "kills": args.kills,
        "of the oldest rank": num_first,
        "steps": max(watcher.digests) + 1,
        "kill to next step, p50 s": round(statistics.median(pauses), 3),
        "kill to next step, worst s": round(max(pauses), 3),
        "join to first step, p50 s": round(statistics.median(joins), 3),
        "join to first step, worst s": round(max(joins), 3),
        "pause of a loss, p50 s": _median([pause for pause, lost, _ in changes if lost]),
        "pause of a join, p50 s": _median([pause for pause, lost, joined in changes if joined and not lost]),
        "whole s": round(time.monotonic() - began, 1),
    }


def _median(values: list[float]) -> float | None:
    return round(statistics.median(values), 3) if values else None


def parsed(argv: list[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--wire", default="int8")
    parser.add_argument("--feedback", action="store_true")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--pause", type=float, default=0.005, help="seconds between steps")
    parser.add_argument("--spread", type=float, default=0.3, help="most seconds before a kill")
    parser.add_argument("--twice", type=float, default=0.2, help="share of kills of two ranks")
    parser.add_argument("--early", type=float, default=0.5, help="share of joins at once after a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--say", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(run(parsed(sys.argv[1:])), indent=1))
