"""Where a process finds the members of running training: what FUSEDCOMM_MEMBERS says, and who answers there.

Whether a process begins training or joins is decided by its launcher, never by who answers: two groups could otherwise
begin when a line is cut for a moment.

                            FUSEDCOMM_MEMBERS is addresses    is a file             is not set
started the first time      joins                             begins training       begins training
started again               joins                             joins                 refused

"Started again" is FUSEDCOMM_JOIN=1, or without FUSEDCOMM_JOIN a TORCHELASTIC_RESTART_COUNT above 0. A process that
joins never begins training: if nobody answers, it ends with JoinRefusedError.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fusedcomm import env
from fusedcomm.members.errors import FrameError, JoinRefusedError
from fusedcomm.members.plane.network import say_hello
from fusedcomm.ranks.errand import Errand

ANSWER_S = 2.0
"""Seconds within which a member says that it is one. All addresses are asked at once."""
AGAIN_S = 0.5
"""Seconds between two rounds of questions."""
MAX_ASKED = 256
"""Addresses that are asked in a round: the newest."""
MET = "fusedcomm/members/met"
"""A key of the job's store, with an address: the ranks that begin training have told each other who they are."""
_LINE = re.compile(r"(\S+:\d+) ([0-9a-f]{16}|-)")
_JOINS, _BEGINS, _TRAINS = "joins", "begins", "trains"


class Noted(NamedTuple):
    """An address, and the name of its job; empty if that is not known."""

    address: str
    job: str


def name_of(job: str) -> str:
    """What others may know of a job's text: 16 hexadecimal digits."""
    return hashlib.sha256(job.encode()).hexdigest()[:16]


def split(address: str) -> tuple[str, int]:
    """The host and the port of "host:port". Raises ValueError."""
    host, _, port = address.strip().rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"fusedcomm: {address!r} is no address of a member: use 'host:port', or several with commas")
    return host.strip("[]"), int(port)


def is_path(text: str) -> bool:
    """Whether FUSEDCOMM_MEMBERS names a file; else it has addresses."""
    return "/" in text


def state_of(is_member: bool, is_joining: bool) -> str:
    """What a process answers to ask()."""
    return _TRAINS if is_member else _JOINS if is_joining else _BEGINS


class MembersFile:
    """The file that FUSEDCOMM_MEMBERS names: a line for each member, "host:port job". Lines are only ever added.

    Lines of processes that have ended are harmless, and so is a line that is not whole.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)

    @staticmethod
    def of_environment() -> "MembersFile | None":
        """The file; None if FUSEDCOMM_MEMBERS is not set or has addresses."""
        text = env.members()
        return MembersFile(text) if text is not None and is_path(text) else None

    def read(self) -> list[Noted]:
        """What is noted, the newest first; of the newest job, where jobs are known. Empty without a file.

        Raises RuntimeError if it cannot be read, as a folder.
        """
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RuntimeError(
                f"fusedcomm: the members' addresses cannot be read from {env.MEMBERS}={str(self.path)!r}: {error}. "
                "Name a file in a folder in which the ranks can write"
            ) from error
        found = [Noted(match[1], match[2].strip("-")) for line in lines if (match := _LINE.fullmatch(line))]
        newest = next((noted.job for noted in reversed(found) if noted.job), "")
        return list(dict.fromkeys(noted for noted in reversed(found) if noted.job in ("", newest)))

    def note(self, addresses: Iterable[str], job: str) -> None:
        """Adds those addresses of a job that are missing. job: its name; empty if it is not known.

        Raises RuntimeError if the file cannot be written.
        """
        known = set(self.read())
        new = [f"{address} {job or '-'}\n" for address in addresses if Noted(address, job) not in known]
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            with open(os.open(self.path, flags, 0o600), "wb", buffering=0) as file:
                with contextlib.suppress(OSError):  # a file system without locks: one write is whole on most
                    fcntl.flock(file, fcntl.LOCK_EX)
                if new:
                    is_whole = self.path.read_bytes()[-1:] in (b"", b"\n")
                    file.write("".join([*([] if is_whole else ["\n"]), *new]).encode())
        except OSError as error:
            raise RuntimeError(
                f"fusedcomm: members cannot note their addresses in {env.MEMBERS}={str(self.path)!r}: {error}. Name a "
                "file in a folder in which the ranks can write"
            ) from error


class Answer(NamedTuple):
    """What a process says of itself. state: trains, begins or joins."""

    state: str
    job: str

    @property
    def is_member(self) -> bool:
        """Whether one can join there. Training may be about to begin."""
        return self.state in (_TRAINS, _BEGINS)


def ask(addresses: Iterable[str]) -> dict[str, Answer]:
    """Asks all at once who they are. An address that does not answer within ANSWER_S is missing."""
    found: dict[str, Answer] = {}

    async def ask_one(address: str) -> None:
        with contextlib.suppress(OSError, EOFError, FrameError, ValueError, KeyError, asyncio.TimeoutError):
            connection, reply = await say_hello(*split(address), {"role": "who", "uid": ""}, ANSWER_S)
            connection.close()
            found[address] = Answer(str(reply["state"]), str(reply["name"]))

    async def ask_all() -> None:
        await asyncio.gather(*map(ask_one, addresses))

    # On a thread, because the caller's may run a loop already, and the name of a host may take long to look up.
    Errand(lambda: asyncio.run(ask_all())).has_ended_within(2 * ANSWER_S)
    return dict(found)


def to_join(patience_s: float) -> str | None:
    """What Members(join="auto") does here: the addresses of members, with commas between; None: it begins training.

    patience_s: for so long nobody may answer.

    Raises RuntimeError or ValueError if the variables do not say it, JoinRefusedError if nobody answers, or members of
    two jobs do.
    """
    text, joins = env.members(), env.joins()
    if text is not None and not is_path(text):
        for address in text.split(","):
            split(address)
        if joins is False:
            raise ValueError(
                f"fusedcomm: {env.JOIN}=0 does not go with {env.MEMBERS}={text}, an address to join: leave out one, or "
                "name a file by a path with a / in it"
            )
    elif not joins:
        return None
    elif text is None:
        raise RuntimeError(
            f"fusedcomm: this process was started again, so it joins, and {env.MEMBERS} does not say where. Set it to "
            "a file for the members' addresses before the first start (a path with a / in it, on a disk that all hosts "
            f"share), or to the address of a member. {env.JOIN}=0 begins training anew"
        )
    until = time.monotonic() + patience_s
    while True:
        noted = _noted(text)
        answers = ask(each.address for each in noted[:MAX_ASKED])
        there = [each for each in noted if each.address in answers and answers[each.address].is_member]
        there = [each for each in there if each.job in ("", answers[each.address].job)]
        if there:
            return _of_one_job(text, {each.address: answers[each.address].job for each in there})
        if time.monotonic() > until:
            raise JoinRefusedError(_nobody(text, [each.address for each in noted], patience_s))
        time.sleep(AGAIN_S)


def refuse_a_running_job(file: MembersFile) -> None:
    """Raises RuntimeError if members of training answer at addresses that the file has."""
    answers = ask(noted.address for noted in file.read()[:MAX_ASKED])
    there = sorted(address for address, answer in answers.items() if answer.is_member)
    if there:
        raise RuntimeError(
            f"fusedcomm: {env.MEMBERS}={str(file.path)!r} is the file of training that runs: {', '.join(there)} "
            f"answer. To add ranks to it set {env.JOIN}=1; to begin another training name another file"
        )


def _noted(text: str) -> list[Noted]:
    if is_path(text):
        return MembersFile(text).read()
    return [Noted(address.strip(), "") for address in text.split(",")]


def _of_one_job(text: str, jobs: dict[str, str]) -> str:
    if len(set(jobs.values())) > 1:
        told = ", ".join(f"{address} of job {job}" for address, job in jobs.items())
        raise JoinRefusedError(
            f"fusedcomm: members of several trainings answer at {env.MEMBERS}={text}: {told}. Name those of one"
        )
    return ",".join(jobs)


def _nobody(text: str, tried: list[str], patience_s: float) -> str:
    where = ", ".join(tried[:8]) + (f" and {len(tried) - 8} more" if len(tried) > 8 else "")
    return (
        f"fusedcomm: no member of running training has answered within {patience_s:g} s; {env.MEMBERS}={text}, asked: "
        f"{where or 'none, since no address is noted'}. A process that was started again only joins. If all ranks are "
        f"lost, start the whole job again, with {env.JOIN}=0 under torchrun, from a checkpoint"
    )
