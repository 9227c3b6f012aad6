"""``fusedcomm run --members`` and ``--elastic``: ranks that come and go. Lost ones start again, as ranks that join.

Each worker's script has ``fusedcomm.Members(join="auto")``; with --elastic, ``hvd.init()`` makes them. The first
workers begin training together; they are given the variables of ``init_process_group("env://")``. A worker that is lost
is started again with FUSEDCOMM_JOIN=1, and without MASTER_ADDR. All note their addresses in the file FUSEDCOMM_MEMBERS,
by which the others are found.

The launcher takes no part in training: when it is lost, the workers of all launchers train on.
"""

import argparse
import contextlib
import heapq
import secrets
import tempfile
import time
from pathlib import Path

from fusedcomm import env
from fusedcomm.tools.errors import UsageError
from fusedcomm.tools.workers import POLL_S, Worker, Workers, end_of, is_here, status_of

FIRST_PAUSE_S = 1.0
"""Seconds before the second restart in a row of one worker. The first is at once, and each further pause twice as
long, so that a worker that is refused does not load the machine."""
LONGEST_PAUSE_S = 60.0
"""No pause is longer. A worker that has lived for so long begins a new row."""


def pause_before(restart: int) -> float:
    """Seconds before the `restart`th restart in a row, which counts from 1."""
    return 0.0 if restart <= 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (restart - 2))


class MembersJob(Workers):
    """The workers of this launcher, and the file in which members note their addresses."""

    def __init__(self, args: argparse.Namespace, slots: list[str]) -> None:
        from fusedcomm.members.plane import addresses

        self.met_key = addresses.MET
        self.joins, self.option = args.join is not None, "--elastic" if args.elastic else "--members"
        _refuse(args, slots)
        file, is_own = self._file(args.join)
        super().__init__(args, slots, args.address)
        if args.elastic:
            from fusedcomm.horovod import membership

            self.where |= {"HOROVOD_ELASTIC": "1", membership.MIN_RANKS: str(args.min_np or 1)}
            if args.reset_limit is not None:
                self.where[membership.RESET_LIMIT] = str(args.reset_limit)
        self.file, self._is_own_file = file, is_own
        try:
            if self.joins and not addresses.is_path(args.join):
                self.file.note(args.join.split(","), "")
            elif any(map(is_here, slots)):
                self.file.note([], "")
        except RuntimeError as error:
            raise UsageError(str(error)) from None
        self._restarts_left = args.max_restarts
        self._in_a_row = [0] * len(slots)
        self._began = [0.0] * len(slots)
        self._due: list[tuple[float, int]] = []  # (time of a restart, slot), the next first
        self._has_met = self.joins

    def members(self) -> int:
        """Starts the workers, and each that is lost again, until all have ended. Returns the exit status."""

        for slot in range(len(self.slots)):
            self._start(slot, self.joins)
        has_finished, last_lost = False, 0
        while self.workers or self._due:
            if not self._has_met and self.server.check([self.met_key]):
                self._has_met = True
                first = self.server.get(self.met_key).decode()
                self.say(
                    f"the members have met. To add ranks: fusedcomm run {self.option} --join {first} -np 1 COMMAND"
                )
            for worker in self.ended():
                if worker.process.returncode == 0:
                    has_finished = True
                    continue
                last_lost = status_of(worker)
                said = f"worker {worker.name} on {worker.host} {end_of(worker)}"
                if not self._has_met and not self.server.check([self.met_key]):
                    self.say(f"{said}, before all workers had met; the others are ended")
                    return last_lost
                self._lost(worker, said)
            if has_finished and not self.workers:
                return 0  # training has ended, so nobody can be joined
            while self._due and self._due[0][0] <= time.monotonic():
                self._start(heapq.heappop(self._due)[1], True)
            time.sleep(POLL_S)
        return 0 if has_finished else last_lost

    def end(self) -> None:
        super().end()
        if self._is_own_file:
            with contextlib.suppress(OSError):
                self.file.path.unlink()

    def _start(self, slot: int, joins: bool) -> None:
        host = self.slots[slot]
        variables = {
            **self.place(slot),
            env.MEMBERS: str(self.file.path),
            env.JOIN: "1" if joins else "0",
        }
        if not joins:
            variables |= {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}
        self._began[slot] = time.monotonic()
        self.start(host, variables, str(slot))

    def _lost(self, worker: Worker, said: str) -> None:
        """Plans the restart of a worker, unless none is left."""
        if not self._restarts_left:
            self.say(f"{said}; it is not started again, since --max-restarts {self.args.max_restarts} are used up")
            return
        self._restarts_left -= 1
        slot, now = int(worker.name), time.monotonic()
        if now - self._began[slot] > LONGEST_PAUSE_S:
            self._in_a_row[slot] = 0
        self._in_a_row[slot] += 1
        pause_s = pause_before(self._in_a_row[slot])
        heapq.heappush(self._due, (now + pause_s, slot))
        self.say(f"{said}; it is started again{f' in {pause_s:g} s' if pause_s else ''}, and joins the others")

    def _file(self, join: str | None) -> tuple:
        """(the file in which members note their addresses, whether it ends with this launcher)."""
        from fusedcomm.members.plane.addresses import MembersFile, is_path

        if join is not None and is_path(join):
            return MembersFile(join), False
        own = env.members()
        if own is not None and join is None:
            if not is_path(own):
                raise UsageError(
                    f"{env.MEMBERS}={own} has addresses of members, to join: write --join {own}, or unset it"
                )
            return MembersFile(own), False
        # The same path on other hosts, where workers make the file.
        return MembersFile(Path(tempfile.gettempdir(), f"fusedcomm-members-{secrets.token_hex(16)}")), True


def _refuse(args: argparse.Namespace, slots: list[str]) -> None:
    """Raises UsageError for arguments that do not fit."""
    from fusedcomm.members.plane import addresses

    if args.join is None:
        return
    if not addresses.is_path(args.join):
        try:
            for each in args.join.split(","):
                addresses.split(each)
        except ValueError:
            raise UsageError(
                f"--join {args.join} is not possible: use host:port, several with commas, or the path of a members file"
            ) from None
    elsewhere = [host for host in slots if not is_here(host)]
    if elsewhere:
        raise UsageError(f"--join adds ranks of this host, not of {elsewhere[0]}: start `fusedcomm run` there")
