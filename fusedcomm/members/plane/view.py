"""Who is in the group: members, views of them, and decisions that lead from one view to the next.

``dataclasses.asdict`` makes the JSON that ``from_json`` reads.
"""

from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Member:
    """A process.

    uid: a random text, different for each process that there has ever been. host, port: where it listens; the host is
    a numeric address. info: JSON that the control plane does not look into.
    """

    uid: str
    host: str
    port: int
    info: dict = field(default_factory=dict, hash=False)

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @staticmethod
    def from_json(value: dict) -> "Member":
        return Member(str(value["uid"]), str(value["host"]), int(value["port"]), dict(value["info"]))


@dataclass(frozen=True)
class View:
    """A numbered group. A member's rank is its index. `step` is the first step that the group ends together."""

    number: int
    members: tuple[Member, ...]
    step: int

    @cached_property
    def uids(self) -> tuple[str, ...]:
        """The members' uids by rank."""
        return tuple(member.uid for member in self.members)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {uid: rank for rank, uid in enumerate(self.uids)}

    def rank_of(self, uid: str) -> int:
        """The member's rank. Raises KeyError if it is no member."""
        return self._ranks[uid]

    def below(self, uid: str, fan_out: int) -> tuple[str, ...]:
        """The uids below a member in a tree of the ranks, in which each has `fan_out` below it."""
        first = fan_out * self.rank_of(uid) + 1
        return self.uids[first : first + fan_out]

    def __contains__(self, uid: str) -> bool:
        return uid in self._ranks

    @staticmethod
    def from_json(value: dict) -> "View":
        members = tuple(Member.from_json(member) for member in value["members"])
        return View(int(value["number"]), members, int(value["step"]))


@dataclass(frozen=True)
class Decision:
    """A view that has been agreed on, and how it differs from the last view that was active.

    finished: the last finished step of each member of that last view that acknowledged the change, by uid.
    lost: its members that are not in `view`. joined: members of `view` that are not in it.
    """

    view: View
    finished: dict[str, int] = field(hash=False)
    lost: tuple[Member, ...]
    joined: tuple[Member, ...]

    @staticmethod
    def from_json(value: dict) -> "Decision":
        lost, joined = (tuple(Member.from_json(member) for member in value[key]) for key in ("lost", "joined"))
        return Decision(View.from_json(value["view"]), dict(value["finished"]), lost, joined)
