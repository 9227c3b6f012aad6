"""Ranks that train with members, follow a script, and write what each step gave them.

A rank's gradients are whole numbers that depend on its name and the step, so a test knows what their mean must be.
"""

import contextlib
import datetime
import itertools
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from patience import HANG_S
from ranks import forkserver

import fusedcomm
from fusedcomm.members import state
from fusedcomm.members.training import Training
from fusedcomm.ranks import groups

SHAPES = ((40, 33), (64, 32), (17, 128))
"""Of the parameters; each has a bucket of its own."""


@dataclass
class Script:
    """What all ranks do. die: by name, (step, moment); see Trainee. Any rank may die "connecting", in place of `step`
    the view whose connections it is about to make: 1 for the first that it connects."""

    folder: str
    config: dict[str, Any]
    num_founders: int = 3
    num_steps: int = 8
    min_ranks: int = 1
    microbatches: int | None = None
    die: dict[str, tuple[int, str]] = field(default_factory=dict)
    late: tuple[str, int] | None = None  # a rank whose step never counts before the others have finished it
    meets: int = -1  # the step before which the founders wait until a process is about to join
    hold: dict[str, int] = field(default_factory=dict)  # by name: a step before which it waits for the file "go"
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    silence: float = 10.0
    timeout_s: float = 1800.0

    def text(self) -> str:
        """For of(); `config` must be JSON."""
        return json.dumps(vars(self))

    @staticmethod
    def of(text: str) -> "Script":
        return Script(**json.loads(text))


def gradient(name: str, step: int, parameter: int, shape: tuple[int, ...]) -> torch.Tensor:
    """float32 whole numbers of both signs, different for each rank, step and parameter."""
    generator = torch.Generator().manual_seed(1000003 * step + 1009 * parameter + sum(map(ord, name)))
    return torch.randint(-100, 101, shape, generator=generator).float()


def means_of(names, step: int, config: dict) -> list[torch.Tensor]:
    """The means of the named ranks' gradients, as fusedcomm.simulate has them."""
    exact = fusedcomm.Config(**{**config, "sum": "two-shot"})
    of_ranks = [[gradient(name, step, i, shape) for name in names] for i, shape in enumerate(SHAPES)]
    return [fusedcomm.simulate(gradients, exact) for gradients in of_ranks]


class Rank:
    """A rank that follows a script."""

    def __init__(self, script: Script, name: str, address: str | None) -> None:
        self.script, self.name, self.folder = script, name, Path(script.folder)
        self.joins = address is not None
        torch.set_num_threads(1)
        if address is None:
            timeout = datetime.timedelta(seconds=script.timeout_s)
            place = {"rank": int(name), "world_size": script.num_founders}
            dist.init_process_group("gloo", store=self.store(), timeout=timeout, **place)
        if script.die.get(name, (0, ""))[1] == "connecting":
            self.die_connecting(script.die[name][0])
        self.write("founding", None)
        if self.dies(0, "founding"):
            for each in range(script.num_founders):  # a rank that is lost earlier ends torch's own call
                wait_for(self.folder / f"{each}.founding")
            self.die()
        self.members = fusedcomm.Members(
            join=address, min_ranks=script.min_ranks, microbatches=script.microbatches, silence=script.silence
        )

    def store(self) -> dist.Store:
        return dist.FileStore(str(self.folder / "store"), self.script.num_founders)

    def write(self, what: str, value: Any) -> None:
        """The file appears whole."""
        target = self.folder / f"{self.name}.{what}"
        torch.save(value, target.with_suffix(".new"))
        os.rename(target.with_suffix(".new"), target)

    def die_connecting(self, view: int) -> None:
        connect, numbers = groups.gloo_backend_over, itertools.count(1)
        groups.gloo_backend_over = lambda *of_view: self.die() if next(numbers) == view else connect(*of_view)

    def meet(self, step: int) -> None:
        plane = self.members.plane
        while step == self.script.meets and plane._gate._hold is None and plane.view.number == 0:
            threading.Event().wait(0.005)

    def dies(self, step: int, moment: str) -> bool:
        return self.script.die.get(self.name) == (step, moment)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Trainee(Rank):
    """One rank. Moments to die: "before" the backward pass, "between" two buckets, "handed" over but without means,
    "finished" with all means but before it counts, and in step 0: "made" before it has a reducer, "receiving",
    for a rank that joins, before it has the model."""

    def __init__(self, script: Script, name: str, address: str | None) -> None:
        super().__init__(script, name, address)
        self.parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in script.shapes]
        if self.joins:  # whatever it begins with, it gets the others'
            for parameter in self.parameters:
                parameter.data.fill_(7)
        if self.dies(0, "made"):
            self.die()
        if self.joins and self.dies(0, "receiving"):
            state.Transfer.content = lambda *_: self.die()
        self.comm = fusedcomm.GradReducer(
            [(f"p{i}", parameter) for i, parameter in enumerate(self.parameters)],
            fusedcomm.Config(**script.config),
            bucket_mib=1e-6,
            members=self.members,
            quiet=True,
        )
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.25, momentum=0.5)
        self.members.carry(optimizer=self.optimizer)
        self.write("ready", {"address": self.members.address, "step": self.members.step})
        if script.late is not None and script.late[0] == name:
            self.be_late(script.late[1])

    def be_late(self, step: int) -> None:
        """In that step this rank has means that it does not trust: it must fetch all of them."""
        training: Training = self.comm.runs
        finish, fetch = training.finish, training._fetch

        def late_finish() -> bool:
            while training.step == step and not self.members.plane.is_superseded(self.members.current):
                time.sleep(0.001)
            return finish()

        def fetch_all(ahead: list) -> bool:
            if training.step == step:
                for parameter in self.parameters:
                    parameter.grad.zero_()
                buckets = range(len(self.parameters))
                training.session = Untrusting(training.session, list(buckets))
            done = fetch(ahead)
            training.session = getattr(training.session, "real", training.session)
            return done

        training.finish, training._fetch = late_finish, fetch_all
        self.comm.native.use(finish=training.finish, recover=training.recover)

    def backward(self, step: int) -> None:
        """One pass whose gradients are gradient(…)."""
        loss = sum(
            (parameter * gradient(self.name, step, i, tuple(parameter.shape))).sum()
            for i, parameter in enumerate(self.parameters)
        )
        hooks = []
        if self.dies(step, "between"):  # gradients arrive from the last parameter to the first
            hooks.append(self.parameters[0].register_hook(lambda _: self.die()))
        if self.dies(step, "handed"):
            original = self.comm.runs.finish
            self.comm.native.use(finish=lambda: self.die() or original(), recover=self.comm.runs.recover)
        loss.backward()
        for hook in hooks:
            hook.remove()

    def step(self, step: int) -> None:
        if step == self.script.hold.get(self.name):
            wait_for(self.folder / "go")
        self.meet(step)
        if self.dies(step, "before"):
            self.die()
        self.optimizer.zero_grad()
        for left in range(self.members.portion[1], 0, -1):
            with self.comm.no_sync() if left > 1 else contextlib.nullcontext():
                self.backward(step)
        means = [parameter.grad.clone() for parameter in self.parameters]
        self.optimizer.step()
        told = {"means": means, "parameters": [parameter.detach().clone() for parameter in self.parameters]}
        told |= {"view": self.members.view, "size": self.members.size, "portion": self.members.portion}
        self.write(f"step.{step}", told)

    def run(self) -> None:
        while self.members.step < self.script.num_steps:
            self.step(self.members.step)
        changes = [vars(change) for change in self.comm.stats().changes]
        self.write("end", {"changes": changes, "residuals": self.comm.session.synchronizer.residuals()})


class Untrusting:
    """A session whose synchronizer says that it misses all means."""

    def __init__(self, real: Any, missing: list[int]) -> None:
        self.real, self._missing = real, missing
        self.synchronizer, self.weights, self.rank = self, real.weights, real.rank

    def missing_means(self) -> list[int]:
        return self._missing

    def complete_bucket(self, bucket: int, means: torch.Tensor) -> None:
        self.real.synchronizer.complete_bucket(bucket, means)


def main(kind: Callable[..., Any], script: Script, name: str, address: str | None) -> None:
    """The process of a rank."""
    try:
        trainee = kind(script, name, address)
        trainee.run()
        wait_for(Path(script.folder) / "leave")
        trainee.members.leave()
    except BaseException as error:
        kinds = [type(error).__name__]
        Path(script.folder, f"{name}.new").write_text(f"{kinds[0]}: {error}\n{traceback.format_exc()}")
        os.rename(Path(script.folder, f"{name}.new"), Path(script.folder, f"{name}.failed"))
        wait_for(Path(script.folder) / "leave")
    os._exit(0)


def wait_for(path: Path) -> None:
    """Waits until the file exists."""
    waited = threading.Event()
    until = time.monotonic() + HANG_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} did not appear within {HANG_S:g} s")
        waited.wait(0.005)


class Team:
    """The processes of a test. kind: of the ranks; what `Trainee` has."""

    def __init__(self, script: Script, kind: Callable[..., Any] = Trainee) -> None:
        self.script, self.folder, self._kind = script, Path(script.folder), kind
        self.processes = {str(rank): self._start(str(rank), None) for rank in range(script.num_founders)}

    def _start(self, name: str, address: str | None) -> Any:
        process = forkserver().Process(target=main, args=(self._kind, self.script, name, address), daemon=True)
        process.start()
        return process

    def join(self, name: str, of: str) -> None:
        """Starts a rank that joins by the address of another one."""
        self.processes[name] = self._start(name, self.read(of, "ready")["address"])

    def read(self, name: str, what: str) -> Any:
        """Waits until the rank has written it. Raises RuntimeError if the rank has failed."""
        path, failed = self.folder / f"{name}.{what}", self.folder / f"{name}.failed"
        until = time.monotonic() + HANG_S
        while not path.exists():
            if failed.exists():
                raise RuntimeError(failed.read_text())
            if time.monotonic() > until:
                raise TimeoutError(f"rank {name} has not written {what} within {HANG_S:g} s")
            time.sleep(0.005)
        return torch.load(path, weights_only=False)

    def failure(self, name: str) -> str:
        """Waits until the rank has failed; its error."""
        wait_for(self.folder / f"{name}.failed")
        return (self.folder / f"{name}.failed").read_text()

    def close(self) -> None:
        (self.folder / "leave").touch()
        for process in self.processes.values():
            process.join(HANG_S)
            if process.is_alive():
                process.kill()
