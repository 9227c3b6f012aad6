"""Kills ranks that train at random moments, lets others join, and checks that all have the same bits after every step.

    python tests/members/chaos.py --ranks 4 --kills 300 --wire int8
    python tests/members/chaos.py --ranks 4 --kills 100 --in-turn       # ranks are replaced one by one

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
        self.tellers: dict[int, set[int]] = {}  # by step: the ranks that have told its digest
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
            self.tellers.setdefault(told["step"], set()).add(pid)
            assert known == told["digest"], f"step {told['step']}: {told} differs from {known}"
            assert pid not in self.steps or told["step"] == self.steps[pid]["step"] + 1, (
                f"{pid} left out a step: {told}"
            )
            self.steps[pid] = told
            self.first_steps.setdefault(pid, told["at"])
            if told["view"] > self.first_of_view.get(pid, (-1, 0.0))[0]:
                self.first_of_view[pid] = (told["view"], told["at"])

    def forget(self, pid: int) -> None:
        """The process has ended, and another may get its number. A step that it has finished alone does not count: the
        others sum that again without it."""
        step = self.steps[pid]["step"] if pid in self.steps else -1
        self.tellers.get(step, set()).discard(pid)
        if not self.tellers.get(step):
            self.digests.pop(step, None)
        for told in (self.ready, self.steps, self.first_steps, self.first_of_view):
            told.pop(pid, None)

    def wait_for(self, what, condition) -> None:
        """Waits until condition() holds."""
        while not condition():
            if not self.read(LONGEST_WAIT_S):
                raise AssertionError(f"nothing was said for {LONGEST_WAIT_S:g} s, waiting for {what}: {self.steps}")


class Chaos:
    """One run: kills and joins, and how long they took."""

    def __init__(self, args) -> None:
        self.args, self.choose, self.watcher = args, random.Random(args.seed), Watcher(args)
        folder = Path(tempfile.mkdtemp(prefix="chaos"))
        self.last = folder / "last"
        self.alive = {self.watcher.fork((rank, str(folder / "store")), last=self.last) for rank in range(args.ranks)}
        self.watcher.wait_for("the first steps", lambda: self.alive <= set(self.watcher.steps))
        self.pauses: list[float] = []
        self.joins: list[float] = []
        self.num_oldest = 0

    def kill(self) -> float:
        """Kills a rank or two at a random moment; returns when."""
        num = 2 if self.args.ranks > 3 and self.choose.random() < self.args.twice else 1
        time.sleep(self.choose.random() * self.args.spread)
        while self.watcher.read(0):
            pass
        oldest = min(self.alive, key=lambda pid: self.watcher.ready[pid]["at"])
        victims = [oldest] if self.args.in_turn else self.choose.sample(sorted(self.alive), num)
        self.num_oldest += oldest in victims
        killed = time.monotonic()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.alive.discard(pid)
            while self.watcher.read(0):
                pass  # its last words
            self.watcher.forget(pid)
        return killed

    def join(self) -> set[int]:
        """Starts as many ranks as are missing, each with the address of any living one."""
        known = self.watcher.ready
        missing = self.args.ranks - len(self.alive)
        addresses = [known[self.choose.choice(sorted(self.alive))]["address"] for _ in range(missing)]
        return {self.watcher.fork(address=address, last=self.last) for address in addresses}

    def wait_for_survivors(self, view: int, killed: float) -> None:
        """Waits until all that live have ended a step in a view after `view`."""
        first = self.watcher.first_of_view
        self.watcher.wait_for("survivors", lambda: all(first[pid][0] > view for pid in self.alive))
        self.pauses.append(max(first[pid][1] for pid in self.alive) - killed)

    def wait_for_joiners(self, joiners: set[int], forked: float) -> None:
        """Waits until they have ended a step."""
        self.watcher.wait_for("joiners", lambda: joiners <= set(self.watcher.steps))
        self.joins += [self.watcher.first_steps[pid] - forked for pid in joiners]
        self.alive |= joiners

    def change(self) -> None:
        """A kill, and a join: at once, or when the survivors have gone on."""
        view = max(told["view"] for told in self.watcher.steps.values())
        killed = self.kill()
        at_once = self.choose.random() < self.args.early
        forked, joiners = time.monotonic(), self.join() if at_once else set()
        self.wait_for_survivors(view, killed)
        if not at_once:
            forked, joiners = time.monotonic(), self.join()
        self.wait_for_joiners(joiners, forked)

    def end(self) -> list[list]:
        """Lets all ranks end; returns the changes that they have counted."""
        end = max(self.watcher.digests) + 20
        self.last.with_suffix(".new").write_text(str(end))
        self.last.with_suffix(".new").rename(self.last)
        self.watcher.wait_for("the end", lambda: self.alive <= set(self.watcher.ended))
        for pid in self.alive:
            _, status = os.waitpid(pid, 0)
            assert status == 0, f"{pid} ended with {status}"
        return [change for changes in self.watcher.ended.values() for change in changes]


def run(args) -> dict:
    """Returns the pauses. Raises AssertionError if a rank fails, hangs, or has other bits."""
    began = time.monotonic()
    chaos = Chaos(args)
    for number in range(1, args.kills + 1):
        chaos.change()
        if args.say:
            step, pause_s, join_s = max(chaos.watcher.digests), chaos.pauses[-1], chaos.joins[-1]
            print(f"{number} of {args.kills}: step {step}, pause {pause_s:.2f} s, join {join_s:.2f} s", flush=True)
    changes = chaos.end()
    return {
        "ranks": args.ranks,
        "kills": args.kills,
        "of the oldest rank": chaos.num_oldest,
        "steps": max(chaos.watcher.digests) + 1,
        "kill to next step, p50 s": _median(chaos.pauses),
        "kill to next step, worst s": round(max(chaos.pauses), 3),
        "join to first step, p50 s": _median(chaos.joins),
        "join to first step, worst s": round(max(chaos.joins), 3),
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
    parser.add_argument("--in-turn", action="store_true", help="kill the oldest rank, one at a time")
    parser.add_argument("--twice", type=float, default=0.2, help="share of kills of two ranks")
    parser.add_argument("--early", type=float, default=0.5, help="share of joins at once after a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--say", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(run(parsed(sys.argv[1:])), indent=1))
