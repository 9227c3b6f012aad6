"""One rank of bench/local_speed.py: times steps without communication and with LocalSteps by turns, and writes rows as
JSON."""

import math
import statistics
import time

import torch
import torch.distributed as dist
from lib.characters import Characters, Transformer, character_loss
from lib.rank import gathered, started

import fusedcomm

DELAY, MARGIN = 5, 1.1
"""The least delay that is tried, where H allows it: LocalSteps' own."""
FIRST_STEPS = 10
"""Steps whose median time says which delay hides messages. They are not part of the result."""


class Trained:
    """A model that takes steps."""

    def __init__(self, settings: dict, characters: Characters) -> None:
        torch.manual_seed(0)
        self.model = Transformer(settings["width"], settings["depth"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self._batches = characters.batches(dist.get_rank(), settings["batch"])
        self._device_s = settings["device_ms"] * 1e-3
        if self._device_s:
            self._compute()

    def steps(self, count: int) -> float:
        """Takes steps beside the other ranks, and returns the slowest rank's seconds."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            if self._device_s:
                time.sleep(self._device_s)  # a device computes; the gradients stay those of the first step
            else:
                self._compute()
            self.optimizer.step()
        return slowest(time.perf_counter() - begin)

    def _compute(self) -> None:
        self.optimizer.zero_grad()
        character_loss(self.model, next(self._batches)).backward()


def slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def made(trained: Trained, every: int, delay: int, wire: str) -> fusedcomm.LocalSteps:
    return fusedcomm.LocalSteps(trained.model, trained.optimizer, every, delay=delay, config=wire, quiet=True)


def measure(every: int, wire: str, settings: dict, characters: Characters) -> dict:
    alone, local = Trained(settings, characters), Trained(settings, characters)
    step_s = alone.steps(FIRST_STEPS) / FIRST_STEPS
    comm = made(local, every, 0, wire)
    plan = comm.plan()  # the same on every rank
    (row,) = plan.rows
    line_s = 8 * (row.sent_between_hosts_nbytes or row.sent_nbytes) / settings["bits_s"] if settings["bits_s"] else 0.0
    delay = min(max(math.ceil(MARGIN * line_s / step_s), DELAY), every - 1)
    comm.detach()
    comm = made(local, every, delay, wire)
    local.steps(every + delay)  # from here on a turn begins just after a merge has ended
    waited_ms = comm.stats().waited_ms
    steps = -(-settings["steps"] // every) * every
    alone_s, local_s = [], []
    for turn in range(settings["rounds"]):
        for which in (0, 1) if turn % 2 else (1, 0):
            (local_s if which else alone_s).append((local if which else alone).steps(steps))
    row = {
        "every": every,
        "wire": wire,
        "delay": delay,
        "steps": steps,
        "alone_s": alone_s,
        "local_s": local_s,
        "line_s": line_s,
        "sent_nbytes": plan.sent_nbytes,
        "waited_s": slowest((comm.stats().waited_ms - waited_ms) * 1e-3),
    }
    assert comm.stats().under_way == 0
    comm.detach()
    return row


class Unequal(Trained):
    """A model on ranks of which the last one sleeps `slow` times as long in each step as the others."""

    def __init__(self, settings: dict, characters: Characters) -> None:
        super().__init__({**settings, "device_ms": 0}, characters)
        slow = settings["slow"] if dist.get_rank() == dist.get_world_size() - 1 else 1
        self._sleep_s = slow * settings["device_ms"] * 1e-3
        self.num_steps = 0

    def step(self) -> None:
        self._compute()
        time.sleep(self._sleep_s)
        self.optimizer.step()
        self.num_steps += 1

    def steps_a_second(self, seconds: float) -> float:
        """This rank's, in so many seconds."""
        dist.barrier()
        begin, before = time.perf_counter(), self.num_steps
        while time.perf_counter() - begin < seconds:
            self.step()
        return (self.num_steps - before) / (time.perf_counter() - begin)

    def train(self, num_steps: int) -> None:
        """Takes steps without sleep until there are so many, for the loss."""
        self._sleep_s = 0.0
        while self.num_steps < num_steps:
            self.step()

    def held_out(self, characters: Characters) -> float:
        """Loss for each held-out character, after finish()."""
        batches = characters.batches(seed=99, batch=64, test=True)
        with torch.no_grad():
            return float(torch.stack([character_loss(self.model, next(batches)) for _ in range(8)]).mean())


def measure_windows(settings: dict, characters: Characters) -> dict:
    """Speeds of the ranks in windows of time, by turns with none, and the loss beside that of equal windows."""
    alone, timed, equal = (Unequal(settings, characters) for _ in range(3))
    options = {"config": settings["wires"][0], "quiet": True}
    comm = fusedcomm.LocalSteps(timed.model, timed.optimizer, settings["window"], **options)
    seconds, ratios, speeds = settings["turn_s"], [], []
    for _ in range(settings["rounds"]):
        alone_speed, speed = alone.steps_a_second(seconds), timed.steps_a_second(seconds)
        ratios.append(speed / alone_speed)
        speeds.append(speed)
    merges, waited_s, sent = comm.merges.num_begun, comm.stats().waited_ms * 1e-3, comm.stats().sent_nbytes
    comm.finish()
    loss, steps = timed.held_out(characters), gathered(timed.num_steps)
    every = round(min(steps) / merges)
    comm = fusedcomm.LocalSteps(equal.model, equal.optimizer, every, **options)
    equal.train(int(min(steps)))  # what the slowest makes in the same time
    comm.finish()
    in_time = equal.held_out(characters)
    equal.train(round(statistics.mean(steps)))
    comm.finish()
    return {
        "window": settings["window"],
        "every": every,
        "merges": merges,
        "speed": gathered(statistics.median(ratios)),
        "steps_a_second": gathered(statistics.median(speeds)),
        "waited_s": gathered(waited_s),
        "sent_nbytes": sent,
        "steps": steps,
        "loss": loss,
        "equal_loss_in_time": in_time,
        "equal_loss_in_steps": equal.held_out(characters),
    }


def main() -> None:
    with started() as (settings, hand_over):
        characters, rows = Characters(), []
        if settings["window"]:
            return hand_over([measure_windows(settings, characters)])
        for every in settings["every"]:
            for wire in settings["wires"]:
                rows.append(measure(every, wire, settings, characters))
                hand_over(rows, f"H={every} {wire} done")


if __name__ == "__main__":
    main()
