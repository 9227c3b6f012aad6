"""One rank of bench/local_speed.py: times steps without communication and with LocalSteps by turns, and writes rows as
JSON."""

import time

import torch
import torch.distributed as dist
from lib.characters import Characters, Transformer, character_loss
from lib.rank import started

import fusedcomm

DELAY = 5
"""The least delay that is tried, where H allows it: LocalSteps' own."""
FIRST_STEPS = 10
"""Steps whose median time says what the plan needs to know. They are not part of the result."""


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
    plan = comm.plan(settings["bits_s"], step_s)  # the same on every rank
    delay = min(max(plan.least_delay or 1, DELAY), every - 1)
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
        "line_s": plan.line_s,
        "sent_nbytes": plan.sent_nbytes,
        "waited_s": slowest((comm.stats().waited_ms - waited_ms) * 1e-3),
    }
    assert comm.stats().under_way == 0
    comm.detach()
    return row


def main() -> None:
    with started() as (settings, hand_over):
        characters, rows = Characters(), []
        for every in settings["every"]:
            for wire in settings["wires"]:
                rows.append(measure(every, wire, settings, characters))
                hand_over(rows, f"H={every} {wire} done")


if __name__ == "__main__":
    main()
