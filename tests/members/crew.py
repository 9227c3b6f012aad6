"""Real processes whose main threads train in a very small way, and a checker of what they did.

A step is one datagram to and from every other member of the view. It ends when all have arrived, and hangs as long as
one is missing, like a collective. Its value is a hash of the step before and of the members that took part, so two
groups that both go on have different values for one step.
"""

import contextlib
import ctypes
import hashlib
import itertools
import json
import multiprocessing as mp
import os
import signal
import socket
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from patience import HANG_S
from ranks import forkserver

from fusedcomm.members.control import ControlPlane, new_uid
from fusedcomm.members.view import View

JOB = "the job of the test"


class Stopped(Exception):
    """on_freeze() has ended the step."""


@dataclass(frozen=True)
class Settings:
    """How a process trains. `network`: the name of a network namespace; None: this one's. `first`: its step."""

    folder: str
    num_founders: int
    min_ranks: int = 1
    silence_s: float = 2.0
    step_s: float = 0.002
    host: str = "127.0.0.1"
    network: str | None = None
    pause_in_install_s: float = 0.0
    last_step: int = 1 << 30
    check: dict = field(default_factory=dict)


class Trainee:
    """The main thread of one process."""

    def __init__(self, settings: Settings, name: str) -> None:
        self.settings, self.name = settings, name
        self.log_file = open(Path(settings.folder) / f"{name}.log", "a", buffering=1)
        self.stopped = threading.Event()
        self.data = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.data.bind((settings.host, 0))
        self.data.settimeout(0.01)
        self.latest: dict[tuple[str, int], int] = {}  # by uid and view
        self.values: dict[int, str] = {-1: ""}
        self.last = -1
        self.advanced = threading.Condition()
        self.plane: ControlPlane | None = None

    @property
    def uid(self) -> str:
        return self.plane.member.uid

    def log(self, event: str, **fields) -> None:
        self.log_file.write(json.dumps({"event": event, "t": time.monotonic(), **fields}) + "\n")

    def listen(self, founds: bool) -> ControlPlane:
        s = self.settings
        info = {"port": self.data.getsockname()[1], "name": self.name}
        plane = ControlPlane(
            f"{self.name}-{new_uid()[:6]}",
            info,
            min_ranks=s.min_ranks,
            job=JOB if founds else None,
            silence_s=s.silence_s,
            host=s.host,
        )
        self.plane = plane
        plane.on_freeze = self.stopped.set
        plane.handlers["fetch means"] = self.means
        plane.handlers["fetch state"] = self.state
        plane.check_join = lambda check: check.get("refuse", "")
        (Path(s.folder) / f"{self.name}.address").write_text(plane.address)
        return plane

    def means(self, header: dict):
        if header["step"] not in self.values:
            raise LookupError(f"step {header['step']} is not kept")
        return {"step": header["step"]}, [self.values[header["step"]].encode()]

    def state(self, header: dict):
        with self.advanced:
            if not self.advanced.wait_for(lambda: self.last >= header["step"], 20):
                raise LookupError(f"step {header['step']} does not end")
        return self.means(header)

    def found(self, rank: int) -> View:
        """Meets the other founders, through files."""
        folder, s = Path(self.settings.folder), self.settings
        own = folder / f"member{rank}.json"
        own.with_suffix(".new").write_text(json.dumps(self.plane.member.to_json()))
        own.with_suffix(".new").rename(own)
        paths = [folder / f"member{index}.json" for index in range(s.num_founders)]
        while not all(path.exists() for path in paths):
            time.sleep(0.005)
        members = [json.loads(path.read_text()) for path in paths]
        view = View.from_json({"number": 0, "members": members, "step": 0})
        self.log("view", number=0, uids=view.uids, step=0)
        self.plane.start(view)
        return view

    def step(self, view: View, step: int) -> str:
        others = [member for member in view.members if member.uid != self.uid]
        message = json.dumps([self.uid, view.number, step]).encode()

        def send() -> None:
            for member in others:
                with contextlib.suppress(OSError):
                    self.data.sendto(message, (member.host, member.info["port"]))

        send()
        while any(self.latest.get((member.uid, view.number), -1) < step for member in others):
            if self.stopped.is_set():
                raise Stopped
            try:
                uid, number, at = json.loads(self.data.recv(1024))
                self.latest[uid, number] = max(at, self.latest.get((uid, number), -1))
            except TimeoutError:
                send()
            except OSError:
                time.sleep(0.01)
        time.sleep(self.settings.step_s)
        return hashlib.sha1(f"{self.values[step - 1]} {step} {view.uids}".encode()).hexdigest()

    def finish(self, step: int, value: str, view: View, how: str) -> None:
        with self.advanced:
            self.values[step], self.last = value, step
            self.advanced.notify_all()
        self.values.pop(step - 50, None)
        self.log("step", step=step, value=value, number=view.number, size=len(view.members), how=how)

    def change(self, decision) -> View:
        """Goes from a decision to a view that runs."""
        while True:
            view = decision.view
            self.log(
                "view",
                number=view.number,
                uids=view.uids,
                step=view.step,
                finished=decision.finished,
                lost=[member.uid for member in decision.lost],
                joined=[member.uid for member in decision.joined],
            )
            if self.settings.pause_in_install_s:
                time.sleep(self.settings.pause_in_install_s)
            self.stopped.clear()
            try:
                value = self.catch_up(decision)
                if self.plane.install(view, HANG_S):
                    if value is not None:
                        self.finish(view.step - 1, value, view, "fetched")
                    self.plane.installed(view)
                    self.log("installed", number=view.number)
                    return view
            except (RuntimeError, LookupError) as error:
                if type(error).__name__ not in ("MemberLostError", "LookupError"):
                    raise
                self.log("again", text=str(error))
            decision = self.plane.recover()

    def catch_up(self, decision) -> str | None:
        """Fetches the value that others have finished; None if this process has it. It counts once the view is
        installed: if its owner is lost before, the others add that step up again."""
        view, wanted = decision.view, decision.view.step - 1
        if self.last >= wanted:
            assert self.last == wanted, f"step {self.last} was finished, and the view begins with {wanted + 1}"
            return None
        joins = self.uid in [member.uid for member in decision.joined]
        joined = [member.uid for member in decision.joined]
        sources = [
            member
            for member in view.members
            if member.uid not in joined and (joins or decision.finished.get(member.uid) == wanted)
        ]
        assert sources, f"nobody is left that has finished step {wanted}: {decision}"
        memory = memoryview(bytearray(64))
        kind = "fetch state" if joins else "fetch means"
        _, payload = self.plane.request(sources[wanted % len(sources)], kind, {"step": wanted}, memory)
        return bytes(payload).decode()

    def run(self, founder: int | None, address: str | None) -> None:
        self.listen(founder is not None)
        if founder is not None:
            view = self.found(founder)
        else:
            view = self.change(self.plane.join(address, self.settings.check))
        step = view.step
        while step <= self.settings.last_step:
            if (decision := self.plane.boundary(step)) is not None:
                view = self.change(decision)
                step = view.step
                continue
            try:
                value = self.step(view, step)
                if self.plane.finish_step(step):
                    self.finish(step, value, view, "trained")
                    step += 1
                    continue
            except Stopped:
                pass
            view = self.change(self.plane.recover())
            step = view.step
        self.plane.leave("it is done")
        self.log("done")


def enter(network: str) -> None:
    """Moves this thread to a network namespace."""
    with open(f"/run/netns/{network}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), f"setns({network})")


def train(settings: Settings, name: str, founder: int | None, address: str | None) -> None:
    with open(Path(settings.folder) / f"{name}.out", "a") as printed:
        os.dup2(printed.fileno(), 1)
    if settings.network is not None:
        enter(settings.network)
    trainee = Trainee(settings, name)
    try:
        trainee.run(founder, address)
    except BaseException as error:
        trainee.log("error", kind=type(error).__name__, text=str(error), trace=traceback.format_exc())


class Crew:
    """The processes of a test. Use it as a context; at its end all are killed and what they did is checked."""

    def __init__(self, folder: Path, num_founders: int, **settings) -> None:
        self.folder, self.base = folder, {"folder": str(folder), "num_founders": num_founders, **settings}
        self.processes: dict[str, mp.Process] = {}
        self.num_founders = num_founders

    def __enter__(self) -> "Crew":
        for rank in range(self.num_founders):
            self.spawn(f"m{rank}", founder=rank)
        return self

    def __exit__(self, kind, error, trace) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join()
        if error is None:
            self.check()
        else:
            for name in self.processes:
                print(f"--- {name}", *self.events(name)[-12:], sep="\n")

    def spawn(self, name: str, founder: int | None = None, address: str | None = None, **settings) -> None:
        arguments = (Settings(**{**self.base, **self.of(name), **settings}), name, founder, address)
        self.processes[name] = forkserver().Process(target=train, args=arguments, daemon=True)
        self.processes[name].start()

    def of(self, name: str) -> dict:
        """Settings of one process; for subclasses."""
        return {}

    def join(self, name: str, by: str, **settings) -> None:
        """Starts a process that joins by the address of another."""
        self.spawn(name, address=self.address(by), **settings)

    def address(self, name: str) -> str:
        path = self.folder / f"{name}.address"
        self.wait(lambda: path.exists() and path.read_text() != "", f"{name} listens")
        return path.read_text()

    def kill(self, *names: str) -> None:
        for name in names:
            os.kill(self.processes[name].pid, signal.SIGKILL)

    def signal(self, name: str, number: int) -> None:
        os.kill(self.processes[name].pid, number)

    def events(self, name: str, event: str | None = None) -> list[dict]:
        path = self.folder / f"{name}.log"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        found = [json.loads(line) for line in lines]
        return [entry for entry in found if event is None or entry["event"] == event]

    def wait(self, condition, what: str) -> None:
        until = time.monotonic() + float(os.environ.get("CREW_HANG_S", HANG_S))
        while not condition():
            assert time.monotonic() < until, f"did not come to pass: {what}"
            time.sleep(0.01)

    def wait_steps(self, names, size: int, more: int = 5) -> None:
        """Waits until each of `names` has trained `more` further steps in a view of `size` members."""
        begun = {name: len(self.events(name, "step")) for name in names}

        def done(name: str) -> bool:
            new = self.events(name, "step")[begun[name] :]
            errors = self.events(name, "error")
            assert not errors, f"{name} ended with {errors[0]['trace']}"
            return sum(entry["size"] == size and entry["how"] == "trained" for entry in new) >= more

        for name in names:
            self.wait(lambda name=name: done(name), f"{name} trains in a view of {size}")

    def wait_error(self, name: str) -> dict:
        self.wait(lambda: self.events(name, "error"), f"{name} ends with an error")
        return self.events(name, "error")[0]

    def check(self) -> None:
        """One number has one list of members, and one step has one value, whoever says so. The last step of a process
        does not count: it may have finished it alone and been lost, and then the others added it up without it."""
        views: dict[int, tuple] = {}
        values: dict[int, dict] = {}
        for name in self.processes:
            steps = self.events(name, "step")
            for entry in self.events(name, "view"):
                known = views.setdefault(entry["number"], (entry["uids"], entry["step"], name))
                assert known[:2] == (entry["uids"], entry["step"]), (entry, known, name)
            for entry, following in itertools.pairwise(steps):
                assert following["step"] == entry["step"] + 1, f"{name} went from {entry} to {following}"
                known = values.setdefault(entry["step"], {**entry, "name": name})
                assert known["value"] == entry["value"], f"two groups: {entry} of {name}, and {known}"
