"""Processes of a training job that tell their steps, and are killed at random moments."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

POLL_S = 0.2
"""Seconds between two looks whether a process has ended by itself."""


class JobError(RuntimeError):
    """A process failed, told something wrong, or told nothing for too long."""


class Teller:
    """A rank's end: tells the job what it has done. A step is told with the fields `step`, the number of steps that its
    parameters have taken; `size`, of ranks that took part; `passes`, backward passes that it has begun; and `digest` of
    the parameters after it."""

    def __init__(self, pipe: str) -> None:
        self._pipe = os.open(pipe, os.O_WRONLY)

    def say(self, **told: Any) -> None:
        """One line. It is short enough that lines of several processes do not mix."""
        line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **told}) + "\n"
        os.write(self._pipe, line.encode())


class Job:
    """A job's side: starts processes, reads what they tell, kills some.

    Args:
        folder: for the pipe, and the processes' output.
        hang_s: seconds after which silence is an error.
        choose: picks whom to kill, and when.
    """

    def __init__(self, folder: Path, hang_s: float, choose: random.Random) -> None:
        self.folder, self.hang_s, self.choose = folder, hang_s, choose
        self.pipe = str(folder / "told")
        os.mkfifo(self.pipe)
        self._read_end = os.open(self.pipe, os.O_RDWR)  # also for writing, so that reading never meets an end
        self._unread = b""
        self.processes: list[subprocess.Popen] = []
        self.steps: dict[int, list[dict]] = {}
        """By pid, what was told of steps, oldest first."""
        self.told: list[dict] = []
        """All else that was told."""
        self.alive: set[int] = set()
        """Processes that have told a step and were not killed."""
        self._killed: set[int] = set()
        self._digests: dict[int, str] = {}

    def start(self, command: Sequence[str], environment: dict[str, str] | None = None) -> subprocess.Popen:
        """Starts Python, with a pipe as its input. What it prints is in the folder."""
        output = open(self.folder / f"output.{len(self.processes)}", "wb")
        self.processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        output.close()
        return self.processes[-1]

    def output(self) -> str:
        """The last lines that the processes have printed."""
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("output.*"))]
        return "\n".join(line for text in texts for line in text.splitlines()[-8:])

    def read(self, timeout_s: float) -> bool:
        """Takes what has been told; False if that was nothing within the time."""
        if not select.select([self._read_end], [], [], timeout_s)[0]:
            return False
        *lines, self._unread = (self._unread + os.read(self._read_end, 1 << 16)).split(b"\n")
        for line in lines:
            self._take(json.loads(line))
        return True

    def _take(self, told: dict) -> None:
        pid = told["pid"]
        if "digest" not in told:
            self.told.append(told)
            return
        known = self._digests.setdefault(told["step"], told["digest"])
        if known != told["digest"]:
            raise JobError(f"after step {told['step']} process {pid} has other parameters than another rank")
        self.steps.setdefault(pid, []).append(told)
        if pid not in self._killed:
            self.alive.add(pid)

    def forget_digests(self) -> None:
        """Steps that were told may be taken again, with other ranks: other parameters are right then."""
        self._digests.clear()

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Waits until condition() holds. Raises JobError if a process fails, or nothing is told for `hang_s`."""
        last = time.monotonic()
        while not condition():
            if self.read(POLL_S):
                last = time.monotonic()
                continue
            statuses = [process.poll() for process in self.processes]
            failed = [status for status in statuses if status not in (None, 0, -signal.SIGKILL)]
            if failed or time.monotonic() - last > self.hang_s:
                why = f"a process ended with {failed[0]}" if failed else f"silence for {self.hang_s:g} s"
                raise JobError(f"{why}, waiting for {what}\n{self.output()}")

    def kill_one(self, within_s: float) -> tuple[int, float]:
        """Kills a rank, any one, at a random moment of the next `within_s` seconds: (pid, when)."""
        time.sleep(self.choose.random() * within_s)
        while self.read(0):
            pass
        victim = self.choose.choice(sorted(self.alive))
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        self._killed.add(victim)
        self.alive.discard(victim)
        return victim, killed

    def end(self) -> None:
        """Kills all processes that belong to the job."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdin.close()
        for pid in self.alive:  # those of a launcher that was killed itself
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.close(self._read_end)
