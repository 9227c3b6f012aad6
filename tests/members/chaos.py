"""Kills ranks that train at random moments, lets others join, and checks that all have the same bits after every step.

python tests/members/chaos.py --ranks 4 --kills 300 --wire int8
python tests/members/chaos.py --ranks 4 --kills 100 --in-turn       # ranks are replaced one by one
python tests/members/chaos.py --stop 0.2 --silence 3                # some stand still in place of being killed
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))  # as pytest has it

from patience import wait_until  # noqa: E402
from trainees import Endless, Script, Team  # noqa: E402

import fusedcomm  # noqa: E402


class Chaos:
    """One run: losses and joins, and how long they took."""

    def __init__(self, args: argparse.Namespace, team: Team) -> None:
        self.args, self.team, self.choose = args, team, random.Random(args.seed)
        self.alive = list(team.processes)  # the oldest first
        self.num_turns = 0
        self.pauses: list[float] = []
        self.joins: list[float] = []

    def change(self) -> None:
        """Ranks are lost, and as many join: at once, or when the survivors have gone on."""
        num = 2 if self.args.ranks > 3 and self.choose.random() < self.args.twice else 1
        is_stopped, at_once = self.choose.random() < self.args.stop, self.choose.random() < self.args.early
        time.sleep(self.choose.random() * self.args.spread)
        lost = self.alive[:1] if self.args.in_turn else self.choose.sample(self.alive, num)
        left = [name for name in self.alive if name not in lost]
        view = max(self.team.steps(name)[-1]["view"] for name in left)
        begun, killed = {name: len(self.team.steps(name)) for name in left}, time.monotonic()
        self.team.signal(signal.SIGSTOP if is_stopped else signal.SIGKILL, lost[0])
        self.team.signal(signal.SIGKILL, *lost[1:])
        joiners, joined = self.join(left) if at_once else [], killed
        self.pauses.append(max(self.first_step(name, begun[name], view) for name in left) - killed)
        if not at_once:
            joined, joiners = time.monotonic(), self.join(left)
        self.joins += [self.first_step(name, 0, view) - joined for name in joiners]
        self.alive = left + joiners
        for name in lost:
            self.team.processes[name].kill()  # if it only stands still

    def join(self, left: list[str]) -> list[str]:
        """Starts as many ranks as are missing, each with the address of any living one; returns their names."""
        self.num_turns += 1
        names = [f"{self.num_turns}.{index}" for index in range(self.args.ranks - len(left))]
        for name in names:
            self.team.join(name, of=self.choose.choice(left))
        return names

    def first_step(self, name: str, begun: int, view: int) -> float:
        """Waits until the rank has ended a step in a view after `view`, later than its first `begun` ones; returns when
        it did."""

        def found() -> list[float]:
            self.team.check_lives(name)
            return [told["at"] for told in self.team.steps(name)[begun:] if told["view"] > view]

        wait_until(found, f"{name} has ended a step after view {view}")
        return found()[0]


def run(args: argparse.Namespace) -> dict:
    """Returns the pauses. Raises AssertionError if a rank fails or has other bits, TimeoutError if one hangs."""
    began = time.monotonic()
    feedback = fusedcomm.Feedback() if args.feedback else None
    config = {"wire": args.wire, "feedback": feedback, "chunks": fusedcomm.Chunks(nbytes=4096, in_flight=2)}
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        script = Script(folder, config, num_founders=args.ranks, silence=args.silence)
        with Team(Endless, script) as team:
            team.wait_steps(*team.processes)
            chaos = Chaos(args, team)
            for number in range(1, args.kills + 1):
                chaos.change()
                if args.say:
                    print(f"{number}: pause {chaos.pauses[-1]:.2f} s, join {chaos.joins[-1]:.2f} s", flush=True)
            team.wait_steps(*chaos.alive)
            team.check_steps()
            num_steps = team.steps(chaos.alive[0])[-1]["step"] + 1
    return {
        "ranks": args.ranks,
        "kills": args.kills,
        "steps": num_steps,
        "kill to next step, p50 s": round(statistics.median(chaos.pauses), 3),
        "kill to next step, worst s": round(max(chaos.pauses), 3),
        "join to first step, p50 s": round(statistics.median(chaos.joins), 3),
        "join to first step, worst s": round(max(chaos.joins), 3),
        "whole s": round(time.monotonic() - began, 1),
    }


def parsed(argv: list[str]) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--wire", default="int8")
    parser.add_argument("--feedback", action="store_true")
    parser.add_argument("--spread", type=float, default=0.3, help="most seconds before a kill")
    parser.add_argument("--in-turn", action="store_true", help="kill the oldest rank, one at a time")
    parser.add_argument("--twice", type=float, default=0.2, help="share of kills of two ranks")
    parser.add_argument("--stop", type=float, default=0.0, help="share of losses in which a rank stands still")
    parser.add_argument("--silence", type=float, default=10.0, help="as for Members")
    parser.add_argument("--early", type=float, default=0.5, help="share of joins at once after a kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--say", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(run(parsed(sys.argv[1:])), indent=1))
