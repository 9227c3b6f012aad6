"""Ranks that train with members, each a process that follows a script, and the team of them that a test commands.

A rank's gradients are whole numbers that depend on its name and the step, so a test knows what their mean must be.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import itertools
import json
import os
import signal
import threading
import time
import traceback
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from patience import HANG_S, wait_until
from ranks import forkserver

import fusedcomm
from fusedcomm.members.plane.agreement import Agreement
from fusedcomm.members.training import transfer
from fusedcomm.members.training.passes import Training
from fusedcomm.ranks import channels

SHAPES = ((40, 33), (64, 32), (17, 128))
"""Of the parameters; each has a bucket of its own."""


@dataclass
class Script:
    """What all ranks do. die: by name, (step, moment); see Trainee. Any rank may die "connecting", in place of `step`
    the view whose connections it is about to make: 1 for the first that it connects."""

    folder: str
    config: dict[str, Any] = field(default_factory=lambda: {"wire": "int8"})
    num_founders: int = 3
    num_steps: int = 8
    min_ranks: int = 1
    microbatches: int | None = None
    die: dict[str, tuple[int, str]] = field(default_factory=dict)
    late: tuple[str, int] | None = None  # a rank whose step never counts before the others have finished it
    meets: int = -1  # the step before which the founders wait until a process is about to join
    hold: dict[str, int] = field(default_factory=dict)  # by name: a step before which it waits for the file "go"
    silence: float = 10.0
    hosts: dict[str, tuple[str, str]] = field(default_factory=dict)  # by name: (network namespace, address)


def gradient(name: str, step: int, parameter: int, shape: tuple[int, ...]) -> torch.Tensor:
    """float32 whole numbers of both signs, different for each rank, step and parameter."""
    generator = torch.Generator().manual_seed(1000003 * step + 1009 * parameter + sum(map(ord, name)))
    return torch.randint(-100, 101, shape, generator=generator).float()


def means_of(names: Iterable[str], step: int, config: dict) -> list[torch.Tensor]:
    """The means of the named ranks' gradients, as fusedcomm.simulate has them."""
    exact = fusedcomm.Config(**{**config, "sum": "two-shot"})
    of_ranks = [[gradient(name, step, i, shape) for name in names] for i, shape in enumerate(SHAPES)]
    return [fusedcomm.simulate(gradients, exact) for gradients in of_ranks]


class Rank:
    """A rank that follows a script."""

    script_kind = Script

    def __init__(self, script: Script, name: str, address: str | None) -> None:
        self.script, self.name, self.folder = script, name, Path(script.folder)
        self.joins = address is not None
        torch.set_num_threads(1)
        namespace, host = script.hosts.get(name, (None, None))
        if namespace is not None:
            enter(namespace)
        if address is None:
            place = {"rank": int(name), "world_size": script.num_founders}
            dist.init_process_group("gloo", store=self.store(), **place)
        if script.die.get(name, (0, ""))[1] == "connecting":
            self.die_connecting(script.die[name][0])
        self.write("founding", None)
        if self.dies(0, "founding"):
            for each in range(script.num_founders):  # a rank that is lost earlier ends torch's own call
                wait_for(self.folder / f"{each}.founding")
            self.die()
        options = {"min_ranks": script.min_ranks, "microbatches": script.microbatches, "silence": script.silence}
        self.members = fusedcomm.Members(join=address, host=host, **options)

    def store(self) -> dist.Store:
        return dist.FileStore(str(self.folder / "store"), self.script.num_founders)

    def write(self, what: str, value: Any) -> None:
        """The file appears whole."""
        target = self.folder / f"{self.name}.{what}"
        torch.save(value, target.with_suffix(".new"))
        os.rename(target.with_suffix(".new"), target)

    def die_connecting(self, view: int) -> None:
        connect, numbers = channels.connect_gloo, itertools.count(1)
        channels.connect_gloo = lambda *of_view: self.die() if next(numbers) == view else connect(*of_view)

    def wait_before(self, step: int) -> None:
        """For what the script says; it may be the end."""
        plane = self.members.plane
        if step == self.script.meets and not self.joins:
            wait_until(lambda: plane.barrier._boundary or plane.view.number > 0, "a process is about to join")
        if step == self.script.hold.get(self.name):
            wait_for(self.folder / "go")
        if self.dies(step, "before"):
            self.die()
        if self.dies(step, "leaving"):
            self.members.leave("it has other plans")
            raise SystemExit

    def dies(self, step: int, moment: str) -> bool:
        return self.script.die.get(self.name) == (step, moment)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Trainee(Rank):
    """One rank. Moments to die: "before" the backward pass, or "leaving" in its place, "between" two buckets, "handed"
    over but without means, and in step 0: "made" before it has a reducer; of a rank that joins, "proposed" by a member,
    before it is one, and "receiving", before it has the model."""

    def __init__(self, script: Script, name: str, address: str | None) -> None:
        super().__init__(script, name, address)
        # Whatever a joiner begins with, it gets the others'.
        self.parameters = [torch.nn.Parameter(torch.full(shape, 7.0 if self.joins else 0.0)) for shape in SHAPES]
        if self.dies(0, "made"):
            self.die()
        if self.dies(0, "proposed"):
            Agreement._on_propose = lambda *_: self.die()
        if self.dies(0, "receiving"):
            transfer.Transfer.content = lambda *_: self.die()
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
            while training.step == step and not self.members.plane.barrier.is_superseded(self.members.current.number):
                time.sleep(0.001)
            return finish()

        def fetch_all(ahead: list) -> bool:
            session = training.session
            if training.step == step:
                for parameter in self.parameters:
                    parameter.grad.zero_()
                complete = session.synchronizer.complete_bucket
                untrusting = types.SimpleNamespace(
                    missing_means=lambda: range(len(SHAPES)), complete_bucket=lambda *bucket: complete(*bucket)
                )
                training.session = types.SimpleNamespace(synchronizer=untrusting, weights=session.weights)
            done = fetch(ahead)
            training.session = session
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
        self.wait_before(step)
        self.optimizer.zero_grad()
        for left in range(self.members.portion[1], 0, -1):
            with self.comm.no_sync() if left > 1 else contextlib.nullcontext():
                self.backward(step)
        means = [parameter.grad.clone() for parameter in self.parameters]
        self.optimizer.step()
        self.tell(step, means)

    def tell(self, step: int, means: list[torch.Tensor]) -> None:
        told = {"means": means, "parameters": [parameter.detach().clone() for parameter in self.parameters]}
        told |= {"view": self.members.view, "size": self.members.size, "portion": self.members.portion}
        self.write(f"step.{step}", told)

    def run(self) -> None:
        while self.members.step < self.script.num_steps:
            self.step(self.members.step)
        changes = [vars(change) for change in self.comm.stats().changes]
        self.write("end", {"changes": changes, "residuals": self.comm.session.synchronizer.residuals()})


class Endless(Trainee):
    """Trains until it is killed, and writes a line for each step; see Team.steps()."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.lines = open(self.folder / f"{self.name}.steps", "a", buffering=1)

    def tell(self, step: int, means: list[torch.Tensor]) -> None:
        value = hashlib.sha1(b"".join(parameter.detach().numpy().tobytes() for parameter in self.parameters))
        told = {"step": step, "view": self.members.view, "ranks": self.members.ranks, "value": value.hexdigest()}
        told["at"] = time.monotonic()
        self.lines.write(json.dumps(told) + "\n")

    def run(self) -> None:
        while True:
            self.step(self.members.step)


def enter(namespace: str) -> None:
    """Moves this thread to the network of a host."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"setns({namespace})")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def main(kind: type[Rank], script: Script, name: str, address: str | None) -> None:
    """The process of a rank."""
    folder = Path(script.folder)
    with open(folder / f"{name}.printed", "w", buffering=1) as printed:
        os.dup2(printed.fileno(), 1)
    try:
        kind(script, name, address).run()
    except BaseException as error:
        (folder / f"{name}.new").write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        os.rename(folder / f"{name}.new", folder / f"{name}.failed")
    threading.Event().wait(HANG_S)  # to the others its end would be a loss


def wait_for(path: Path) -> None:
    """Waits until the file exists."""
    wait_until(path.exists, f"{path} appears")


class Team:
    """The processes of a test. Use it as a context; at its end all are killed."""

    def __init__(self, kind: type[Rank], script: Script) -> None:
        self.script, self.folder, self._kind = script, Path(script.folder), kind
        self._steps: dict[str, list[dict]] = {}  # what has been read of the files of an Endless
        self._read: dict[str, int] = {}  # and how many bytes that is
        self.processes = {str(rank): self._start(str(rank), None, {}) for rank in range(script.num_founders)}

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join()

    def _start(self, name: str, address: str | None, changes: dict) -> Any:
        script = dataclasses.replace(self.script, **changes)
        process = forkserver().Process(target=main, args=(self._kind, script, name, address), daemon=True)
        process.start()
        return process

    def join(self, name: str, of: str, **changes: Any) -> None:
        """Starts a rank that joins by the address of another one. `changes`: of the script, for this rank."""
        self.processes[name] = self._start(name, self.read(of, "ready")["address"], changes)

    def go(self) -> None:
        """Lets those go on that the script holds."""
        (self.folder / "go").touch()

    def signal(self, number: int, *names: str) -> None:
        for name in names:
            os.kill(self.processes[name].pid, number)

    def read(self, name: str, what: str) -> Any:
        """Waits until the rank has written it. Raises AssertionError if the rank has failed."""
        path = self.folder / f"{name}.{what}"
        wait_until(lambda: path.exists() or self.check_lives(name), f"rank {name} has written {what}")
        return torch.load(path, weights_only=False)

    def check_lives(self, name: str) -> None:
        failed = self.folder / f"{name}.failed"
        assert not failed.exists(), failed.read_text()

    def failure(self, name: str) -> str:
        """Waits until the rank has failed; its error."""
        wait_for(self.folder / f"{name}.failed")
        return (self.folder / f"{name}.failed").read_text()

    def check_means(self, steps: range, of: Sequence[str], names: Sequence[str] | None = None) -> None:
        """Each of `names`, which are those of `of` if None, has in every step the means of the ranks `of`, and all have
        the same parameters."""
        names = names or of
        for step in steps:
            wanted = means_of(of, step, self.script.config)
            told = {name: self.read(name, f"step.{step}") for name in names}
            for name in names:
                for mean, want in zip(told[name]["means"], wanted, strict=True):
                    assert torch.equal(mean, want), f"rank {name}, step {step}, view {told[name]['view']}"
                for mine, first in zip(told[name]["parameters"], told[names[0]]["parameters"], strict=True):
                    assert torch.equal(mine, first), f"rank {name} and rank {names[0]} differ after step {step}"

    # ---- of an Endless

    def steps(self, name: str) -> list[dict]:
        """What an Endless has told of its steps."""
        path, told = self.folder / f"{name}.steps", self._steps.setdefault(name, [])
        if path.exists():
            with open(path) as file:
                file.seek(self._read.get(name, 0))
                whole = file.read().rpartition("\n")[0]
            told += map(json.loads, whole.splitlines())
            self._read[name] = self._read.get(name, 0) + len(whole) + bool(whole)
        return told

    def wait_steps(self, *names: str, more: int = 5) -> None:
        """Waits until each of `names` has made `more` further steps with the others of `names` and with nobody else."""
        begun = {name: len(self.steps(name)) for name in names}

        def trains(name: str) -> bool:
            self.check_lives(name)
            return sum(len(told["ranks"]) == len(names) for told in self.steps(name)[begun[name] :]) >= more

        for name in names:
            wait_until(lambda name=name: trains(name), f"{name} trains in a view of {len(names)}")

    def check_steps(self) -> None:
        """One view has one list of ranks, and one step has one value, whoever says so. The last step of a rank does not
        count: it may have finished it alone and been lost, and then the others added it up without it."""
        views: dict[int, list] = {}
        values: dict[int, str] = {}
        for name in self.processes:
            for told, following in itertools.pairwise(self.steps(name)):
                assert following["step"] == told["step"] + 1, f"{name} went from {told} to {following}"
                assert views.setdefault(told["view"], told["ranks"]) == told["ranks"], (name, told)
                assert values.setdefault(told["step"], told["value"]) == told["value"], f"two groups: {name}, {told}"
