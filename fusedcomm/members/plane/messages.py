"""What members tell each other, and what they remember of it: states, proposals, promises."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass, field

from fusedcomm.members.plane.view import Decision, Member, View


@dataclass
class MemberState:
    """What a member tells all others.

    committed, active: numbers of views; -1 in a joiner. promised: the highest number of a view that it has promised.
    ready: of the view that its main thread can run in. finished: its last step; None before the first view. entered:
    the step under way. wants: its main thread waits for a view above that number; -1: it does not wait. dead: by
    uid, what was seen. silent: uids. proposes: the number of its own proposal; -1: there is none.
    """

    committed: int = -1
    active: int = -1
    promised: int = 0
    ready: int = 0
    finished: int | None = None
    entered: int = -1
    wants: int = -1
    dead: dict[str, str] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)
    proposes: int = -1

    def to_json(self) -> dict:
        return {"type": "state", **vars(self)}

    @staticmethod
    def from_json(message: dict) -> "MemberState":
        return MemberState(**{each.name: message[each.name] for each in dataclasses.fields(MemberState)})


@dataclass
class Proposal:
    """A view that this process proposes.

    base: the number of the view that it follows. immediate: without waiting for a boundary. step: the boundary; -1 if
    immediate. acks: the acknowledgements, by uid. sent: when it was sent last.
    """

    number: int
    base: int
    immediate: bool
    members: tuple[Member, ...]
    participants: tuple[str, ...]
    step: int
    acks: dict[str, dict] = field(default_factory=dict)
    sent: float = 0.0

    def to_json(self, dead: dict[str, str]) -> dict:
        """What those that take part are sent. dead: by uid, what was seen."""
        fields = ("number", "base", "immediate", "step")
        return {"type": "propose", **{name: getattr(self, name) for name in fields}, "dead": dead}

    def decision(self, active: View) -> Decision:
        """What is decided once all have acknowledged. active: the view that it changes."""
        finished = {uid: ack["finished"] for uid, ack in self.acks.items() if uid in active}
        finished = {uid: step for uid, step in finished.items() if step is not None}
        step = max(finished.values(), default=active.step - 1) + 1 if self.immediate else self.step
        view = View(self.number, self.members, step)
        lost = tuple(member for member in active.members if member.uid not in view)
        joined = tuple(member for member in view.members if member.uid not in active)
        return Decision(view, finished, lost, joined)

    def fits(self, view: View, together: list[str], needed: bool, joiners: Collection[str]) -> bool:
        """Whether it is still what is to be proposed after `view`. needed: whether an immediate change is."""
        if self.base != view.number or self.immediate < needed:
            return False
        if self.immediate:
            return list(self.participants) == together
        return all(uid in together or uid in joiners for uid in self.participants)


@dataclass
class Promise:
    """The change that a member has promised last. ack: its acknowledgement; None until its step is suspended."""

    number: int = 0
    to: str = ""
    ack: dict | None = None


def commit_message(decision: Decision, immediate: bool, before: list[View]) -> dict:
    """before: the views from the active one on, without the decision's."""
    return {
        "type": "commit",
        "decision": dataclasses.asdict(decision),
        "immediate": immediate,
        "before": [dataclasses.asdict(view) for view in before],
    }
