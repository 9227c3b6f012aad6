"""Ranks that train by local steps with members, follow a script, and write what each step left them; and what they
must have, by a plain simulation."""

import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from trainees import Rank, Script, gradient, wait_for

import fusedcomm
from fusedcomm.local_steps import windows

SHAPES = ((40, 33), (64, 32))
LR = 2.0**-8


@dataclass
class MergeScript(Script):
    """die: by name, (step, moment): "before" the optimizer's step, or "handed", once a message of that step, or of
    the next that has one, is with the engine. every: "4s" is of a clock that advances by a second in each step."""

    every: int | str = 4
    delay: int = 1
    fragments: int = 1
    merge: str = "corrected"


class Net(torch.nn.Module):
    """Each parameter is a module's, so that it may be a fragment of its own."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.of = torch.nn.ModuleList(torch.nn.ParameterList([torch.full(shape, value)]) for shape in SHAPES)


class Merger(Rank):
    """One rank."""

    def __init__(self, script: MergeScript, name: str, address: str | None) -> None:
        super().__init__(script, name, address)
        if address is None:  # as after a checkpoint: the steps that are waited for are those since
            self.members.load_state_dict({"step": 100, "num_microbatches": 0})
        self.model = Net(7.0 if self.joins else 0.0)  # whatever a joiner begins with, it gets the others'
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=0.5)
        self.comm: fusedcomm.LocalSteps | None = None
        if isinstance(script.every, str):
            windows.time = types.SimpleNamespace(monotonic=lambda: 0 if self.comm is None else self.comm.steps)
        self.comm = fusedcomm.LocalSteps(
            self.model,
            self.optimizer,
            script.every,
            delay=script.delay,
            merge=script.merge,
            fragments=script.fragments,
            config=fusedcomm.Config(**script.config),
            members=self.members,
            quiet=True,
        )
        self.members.carry(optimizer=self.optimizer)
        self.write("ready", {"address": self.members.address, "steps": self.comm.steps, "params": self.flat()})
        send = self.comm.messages.send

        def send_and_die(pending: Any) -> None:
            send(pending)
            step, moment = script.die.get(name, (0, ""))
            if moment == "handed" and self.comm.steps >= step:
                self.die()

        self.comm.messages.send = send_and_die

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def run(self) -> None:
        while self.comm.steps < self.script.num_steps:
            step = self.comm.steps + 1
            if step == self.script.hold.get(self.name):
                wait_for(self.folder / "go")
            self.meet(step)
            if self.dies(step, "before"):
                self.die()
            for index, parameter in enumerate(self.model.parameters()):
                parameter.grad = gradient(self.name, step, index, tuple(parameter.shape))
            self.optimizer.step()
            while self.comm.window is not None and self.comm.window._began is None:
                threading.Event().wait(0.001)  # what has arrived begins the next window on another thread
            anchors = torch.cat([fragment.anchor for fragment in self.comm.fragments])
            self.write(f"step.{step}", {"params": self.flat(), "anchors": anchors, "size": self.members.size})
        self.comm.finish()
        changes = [vars(change) for change in self.comm.stats().changes]
        self.write("end", {"params": self.flat(), "changes": changes, "size": self.members.size})


@dataclass
class Expected:
    """fp64, flat, of one rank after each step."""

    params: dict[tuple[str, int], torch.Tensor]
    anchors: dict[int, torch.Tensor]


def simulated(script: MergeScript, takes_part: Callable[[str, int], bool], joined: Mapping[str, int]) -> Expected:
    """Corrected merges of one fragment.

    takes_part(name, message). joined: by name, the message before which a rank joins.
    """
    names = [str(rank) for rank in range(script.num_founders)]
    anchor = torch.zeros(sum(torch.Size(shape).numel() for shape in SHAPES), dtype=torch.float64)
    now = {name: anchor.clone() for name in names}
    momentum = {name: torch.zeros_like(anchor) for name in names}
    snapshots: dict[str, torch.Tensor] = {}
    found, message, due = Expected({}, {}), 0, -1
    every = int(str(script.every).removesuffix("s"))
    for step in range(1, script.num_steps + 1):
        for name in names:
            pieces = [gradient(name, step, index, shape).flatten() for index, shape in enumerate(SHAPES)]
            momentum[name] = 0.5 * momentum[name] + torch.cat(pieces).double()
            now[name] = now[name] - LR * momentum[name]
        if step == due:
            anchor = end(anchor, now, snapshots, takes_part, message - 1)
        if step % every == 0:
            for name in [each for each, first in joined.items() if first == message]:
                names.append(name)
                now[name], momentum[name] = anchor.clone(), momentum["0"].clone()  # of the first member
            snapshots = {name: now[name].clone() for name in names}
            message, due = message + 1, step + script.delay
            if script.delay == 0:
                anchor = end(anchor, now, snapshots, takes_part, message - 1)
        found.anchors[step] = anchor.clone()
        found.params |= {(name, step): now[name].clone() for name in names}
    return found


def end(
    anchor: torch.Tensor,
    now: dict[str, torch.Tensor],
    snapshots: dict[str, torch.Tensor],
    takes_part: Callable[[str, int], bool],
    message: int,
) -> torch.Tensor:
    """Merges. Returns the merged state."""
    mean = torch.stack([snapshots[name] for name in snapshots if takes_part(name, message)]).mean(0)
    for name, snapshot in snapshots.items():
        now[name] = now[name] + (mean - snapshot)
    return mean
