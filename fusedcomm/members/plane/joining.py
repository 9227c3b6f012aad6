"""How a process that wants to join finds the member that proposes it."""

import asyncio
import time

from fusedcomm.members.errors import FrameError, JoinRefusedError
from fusedcomm.members.plane.network import Connection, say_hello
from fusedcomm.members.plane.view import Member

# Seconds between two attempts, and how long one may take.
_AGAIN_S = 0.2
_ATTEMPT_S = 5.0

Address = tuple[str, int]


class Joining:
    """Asks members, one after the other, until one has accepted or refused. Only the control thread uses it.

    addresses: (numeric host, port) of members; the first one is asked first. check: what the members' `check_join` is
    given. patience_s: for so long members may be unreachable.
    """

    def __init__(self, addresses: list[Address], check: dict, patience_s: float) -> None:
        self._addresses, self._check, self._patience_s = addresses, check, patience_s

    async def find(self, me: Member, first: list[Address]) -> tuple[Member, Connection, str]:
        """(the member that proposes this process; the connection over which it says the rest; the job).

        first: addresses to ask before those that are known. Raises JoinRefusedError.
        """
        self._addresses = first + [known for known in self._addresses if known not in first]
        hello = {"role": "join", "uid": me.uid, "member": vars(me), "check": self._check}
        heard, last = time.monotonic(), "no attempt was made"
        while time.monotonic() - heard <= self._patience_s:
            host, port = self._addresses[0]
            self._addresses.append(self._addresses.pop(0))
            try:
                connection, reply = await say_hello(host, port, hello, _ATTEMPT_S)
            except (OSError, EOFError, FrameError, asyncio.TimeoutError) as error:
                last = str(error) or "it did not answer"
            else:
                answer = reply.get("answer")
                if answer == "welcome":
                    self._learn(reply)
                    return Member.from_json(reply["member"]), connection, str(reply["job"])
                connection.close()
                if answer == "refused":
                    raise JoinRefusedError(
                        f"fusedcomm: the member at {host}:{port} refuses this process: {reply['why']}"
                    )
                last = f"its answer is {answer!r}"
                if answer in ("later", "ask"):
                    heard, last = time.monotonic(), "it is not ready"
                    self._learn(reply)
                if answer == "ask":
                    first = [tuple(reply["ask"])]
                    self._addresses = first + [known for known in self._addresses if known not in first]
            await asyncio.sleep(_AGAIN_S)
        tried = ", ".join(f"{host}:{port}" for host, port in self._addresses)
        raise JoinRefusedError(
            f"fusedcomm: no member could be reached to join, tried: {tried}; why the last attempt failed: {last}. Give "
            "the address of a member that trains, as its `address` says"
        )

    def _learn(self, reply: dict) -> None:
        for host, port in reply.get("others", ()):
            if (host, port) not in self._addresses:
                self._addresses.append((str(host), int(port)))
