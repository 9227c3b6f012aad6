"""What a member knows of the agreement, and who lives in its eyes."""

from . import failures
from .outlet import Outlet, Round
from .quorum import clique, may_go_on
from .view import Member, View

# Seconds before a minority stops: all that are silent have been noticed then, and the error names them.
_FEW_S = 0.5


class Life:
    """The state that the rules of agreement.py work on, and what follows from it without a message."""

    def __init__(self, uid: str, min_ranks: int, outlet: Outlet) -> None:
        self._uid, self._min_ranks, self._out = uid, min_ranks, outlet
        self.view: View | None = None
        """The last committed view; None in a joiner."""
        self.commit_message: dict = {}
        """The message that commits it."""
        self._chain: list[View] = []  # from the last view known to have gone to the committed one
        self._promised, self._promised_to = 0, ""
        self._ack: dict | None = None  # the answer to what was promised last
        self._seen = 0
        self._ready = 0
        self._wants = -1
        self._round: Round | None = None
        self._margin = 2
        self._not_before = 0.0
        self._few_since: float | None = None
        self._wanted_since: float | None = None
        self._now = 0.0
        self._states: dict[str, dict] = {}
        self._joiners: dict[str, Member] = {}
        self.dead: set[str] = set()
        self.silent: set[str] = set()
        self._doubtful: set[str] = set()
        self.failure: RuntimeError | None = None

    def _alive(self) -> list[str]:
        """The members of the committed view that this process hears, by rank."""
        assert self.view is not None
        return [uid for uid in self.view.uids if uid not in self.dead and uid not in self.silent]

    def _established(self, uids: list[str]) -> list[str]:
        return [uid for uid in uids if uid in self._chain[0]]

    def _together(self) -> list[str]:
        """The living without one of each pair that does not hear each other."""
        alive = self._alive()
        apart = [(uid, other) for uid in alive for other in self._states.get(uid, {}).get("silent", ()) if uid != other]
        return clique(alive, apart)

    def lowest(self) -> str:
        """The one that proposes, in this process's eyes."""
        return next(iter(self._established(self._alive())), "")

    def _may_have_gone(self, acks: dict[str, dict]) -> list[View]:
        """The views that a change needs a quorum of, by what the acknowledging members say."""
        gone = max([self._chain[0].number, *(ack["gone"] for ack in acks.values())])
        views = [view for view in self._chain if view.number >= gone]
        return [
            view
            for view in views
            if view.number <= gone or all(ack["ready"] >= view.number for uid, ack in acks.items() if uid in view)
        ]

    def _has_quorum(self, alive: list[str], acks: dict[str, dict]) -> bool:
        return all(may_go_on(view.uids, alive, self.dead - self._doubtful) for view in self._may_have_gone(acks))

    def _is_lost(self, alive: list[str]) -> bool:
        """Whether `alive` may not go on whatever the others say. Then this process fails, at once or soon."""
        assert self.view is not None
        established = self._established(alive)
        gone = self._chain[0]
        dead = self.dead - self._doubtful
        if may_go_on(gone.uids, established, dead):
            self._few_since = None
        elif self._few_since is None or self._now - self._few_since < _FEW_S:
            self._few_since = self._now if self._few_since is None else self._few_since
            return True
        if self._few_since is not None:
            self._stop_as_minority(alive)
        elif len(established) < self._min_ranks:
            lost = [uid for uid in gone.uids if uid not in alive]
            self._fail(failures.too_few(gone, lost, self._out.reason, len(established), self._min_ranks))
        return self.failure is not None

    def _stop_as_minority(self, alive: list[str]) -> None:
        gone, step = self._chain[0], self._out.progress()[1]
        silent = [uid for uid in gone.uids if uid not in alive and uid not in self.dead - self._doubtful]
        self._fail(failures.minority(gone, silent, self._out.reason, len(self._established(alive)), step))

    def _fail(self, error: RuntimeError) -> None:
        if self.failure is None:
            self.failure = error
            self._out.failed(error)
