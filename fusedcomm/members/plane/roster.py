"""What a member knows of the others: views, their state, and who of them lives."""

from fusedcomm.members.plane.effects import Effects
from fusedcomm.members.plane.messages import MemberState
from fusedcomm.members.plane.quorum import clique, may_go_on
from fusedcomm.members.plane.view import View


class Roster:
    """The members in one process's eyes.

    Attributes:
        views: from the active view to the committed one, oldest first. Each may be active, by what is known here.
        states: what others have said last, by uid.
        dead: proven dead. silent: nothing is heard of them, and they may be training on. doubtful: the dead that count
            as silent, because they may have gone on with such a member before they died.
    """

    def __init__(self, uid: str, effects: Effects) -> None:
        self._uid, self._effects = uid, effects
        self.views: list[View] = []
        self.states: dict[str, MemberState] = {}
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self.doubtful: set[str] = set()
        self._unready: tuple[int, list[str]] = (-1, [])

    @property
    def view(self) -> View | None:
        """The last committed view; None in a joiner."""
        return self.views[-1] if self.views else None

    @property
    def committed(self) -> View:
        """The last committed view, of a member."""
        return self.views[-1]

    @property
    def active(self) -> View:
        """The last view that is known to be active, of a member."""
        return self.views[0]

    def numbers(self) -> dict[str, int]:
        """The numbers of the committed and of the active view; -1 in a joiner."""
        views = self.views
        return {"committed": views[-1].number if views else -1, "active": views[0].number if views else -1}

    def reasons(self) -> dict[str, str]:
        """By uid of the dead: what was seen. A member of no view from the active one on is not named any more: every
        member of the active view has committed it."""
        named = {uid for view in self.views for uid in view.uids} & self.dead
        return {uid: self._effects.reason(uid) for uid in sorted(named)}

    def hear_dead(self, reasons: dict[str, str]) -> None:
        """Another member has said which are dead, and what it has seen of each."""
        for uid, reason in reasons.items():
            if uid not in self.dead and uid != self._uid:
                self._effects.heard_dead(uid, reason)

    @property
    def proven_dead(self) -> set[str]:
        """The dead that have gone on with nobody."""
        return self.dead - self.doubtful

    def of_others(self) -> list[MemberState]:
        """The states of the members of the committed view but this process, without those that have said nothing."""
        return [self.states[uid] for uid in self.committed.uids if uid != self._uid and uid in self.states]

    def are_ready(self) -> bool:
        """Whether all other members of the committed view have said that they are ready for it. Each that has is looked
        at once."""
        number = self.committed.number
        if self._unready[0] != number:
            self._unready = number, [uid for uid in self.committed.uids if uid != self._uid]
        left = self._unready[1]
        while left and left[-1] in self.states and self.states[left[-1]].ready == number:
            left.pop()
        return not left

    def is_settled(self) -> bool:
        """Whether the committed view is active, and all its members know it."""
        number = self.committed.number
        ready = [state for state in self.of_others() if state.ready >= number]
        return self.active.number == number and len(ready) == len(self.committed.uids) - 1

    def alive(self) -> list[str]:
        """The members of the committed view that this process hears, by rank."""
        return [uid for uid in self.committed.uids if uid not in self.dead and uid not in self.silent]

    def established(self, uids: list[str]) -> list[str]:
        """The members of the active view among them."""
        active = self.active
        return [uid for uid in uids if uid in active]

    def together(self) -> list[str]:
        """The living without one of each pair that does not hear each other."""
        alive = self.alive()
        known = [(uid, self.states[uid]) for uid in alive if uid in self.states]
        return clique(alive, [(uid, other) for uid, state in known for other in state.silent if uid != other])

    def lowest(self) -> str:
        """The one that proposes, in this process's eyes; empty if there is none."""
        gone = (self.dead, self.silent)
        active = self.active
        return next((uid for uid in self.committed.uids if uid in active and not any(uid in each for each in gone)), "")

    def may_go_on(self, uids: list[str]) -> bool:
        """Whether they are a quorum of the active view."""
        return may_go_on(self.active.uids, uids, self.proven_dead)

    def may_be_active(self, acks: dict[str, dict]) -> list[View]:
        """The views that a change needs a quorum of, by what the acknowledging members say."""
        active = max([self.active.number, *(ack["active"] for ack in acks.values())])
        return [
            view
            for view in self.views
            if view.number == active
            or (view.number > active and all(ack["ready"] >= view.number for uid, ack in acks.items() if uid in view))
        ]

    def have_quorum(self, uids: list[str], acks: dict[str, dict]) -> bool:
        """Whether they are a quorum of each view that may be active."""
        return all(may_go_on(view.uids, uids, self.proven_dead) for view in self.may_be_active(acks))
