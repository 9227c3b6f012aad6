"""How members agree on the next view: the rules, without sockets, threads or clocks.

A view is **proposed** to those that take part in it, **committed** when all of these have acknowledged it, and
**active** once all its members are ready for it: only an active view is ever trained in. A change is *immediate*, for a
loss, or at a *boundary*, before a step b, for joiners.

=============  ==================================================  ====================================================
message        sent                                                whoever receives it
=============  ==================================================  ====================================================
state          to all about each second; when it changes to all,   notes it; sends its commit if the sender lacks that
               or in a group above FAN_OUT to the lowest alone
propose        by the lowest live rank to all that take part,      promises its number, unless it has promised as much
               with a number above all that it has seen            or knows a lower live rank; acknowledges, or refuses
acknowledge    with the last finished step                         commits, when all that take part have acknowledged
refuse         with the reason                                     abandons the proposal, and makes another
abort          by a proposer whose proposal does not fit any more  lets its main thread go on, if that waits at b
commit         by the proposer to joiners and those left out, to   is in that view from now on, or expelled
               others in a tree; by others to whoever lacks it
=============  ==================================================  ====================================================

=============  ======================================  ================================================================
a member       meets                                   and is then
=============  ======================================  ================================================================
runs           an immediate proposal                   promised: its step is suspended, and finishes in no earlier view
runs           a proposal at b, which has not begun    promised: its main thread waits at b
runs           a proposal at b, which has begun        running; it refuses
promised       an abort of that boundary               running
promised       a proposal with a higher number         promised that
any            the commit of a view that it is in      committed
committed      its main thread can run in the view     ready, unless it has promised a later number
ready          all members of the view are ready       running: the view is active
any            the commit of a view that it is not in  failed, ExpelledError; before it has run, it joins anew
any            no quorum of the active view            failed, MinorityError, half a second later
any            fewer than `min_ranks` are left         failed, TooFewRanksError
=============  ======================================  ================================================================

A change needs a quorum of the active view, and of each later view that may be active: see quorum.py.
"""

from fusedcomm.members.plane import failures
from fusedcomm.members.plane.barrier import StepBarrier
from fusedcomm.members.plane.effects import Effects
from fusedcomm.members.plane.messages import MemberState, Promise, Proposal, commit_message
from fusedcomm.members.plane.roster import Roster
from fusedcomm.members.plane.view import Decision, Member, View

# Seconds for which a member waits for a change before one is made though nobody is lost.
_WANTED_S = 1.0
# Seconds before a refused proposer tries again, and before a proposal is sent again.
_AGAIN_S = 0.3
# Seconds before a minority stops: all that are silent have been noticed then, and the error names them.
_MINORITY_S = 0.5
# Members to which each passes a commit on. Larger groups have a tree, so that nobody sends a large message to all.
FAN_OUT = 16
# Steps from the latest that has begun to a boundary: at first, and the most. Members that have begun it refuse.
_MARGIN = 2
_MAX_MARGIN = 1 << 12


class Agreement:
    """The rules. All methods are to be called on one thread.

    barrier: where the main thread waits.
    """

    def __init__(self, uid: str, min_ranks: int, barrier: StepBarrier, effects: Effects) -> None:
        self._uid, self._min_ranks, self._barrier, self._effects = uid, min_ranks, barrier, effects
        self.roster = Roster(uid, effects)
        self.joiners: dict[str, Member] = {}
        self.proposal: Proposal | None = None
        self.commit: dict = {}
        """The message that commits the view."""
        self.failure: RuntimeError | None = None
        self._promise = Promise()
        self._seen = 0  # the highest number of any proposal, those that were promised included
        self._ready = 0
        self._wants = -1
        self._margin = _MARGIN
        self._now = self._not_before = 0.0
        self._minority_since: float | None = None
        self._wanted_since: float | None = None

    @property
    def view(self) -> View | None:
        """The last committed view; None in a joiner. Any thread may read it."""
        return self.roster.view

    # ---- what happens

    def start(self, view: View) -> None:
        """The founders' view."""
        self.roster.views, self._ready = [view], view.number
        self._promise.number = self._seen = view.number
        self.commit = commit_message(Decision(view, {}, (), ()), True, [])

    def tick(self, now: float) -> None:
        self._now = now
        if self.proposal is not None and now - self.proposal.sent > _AGAIN_S:
            self._send_proposal(self.proposal)
        self._consider()

    def set_lost(self, dead: set[str], silent: set[str], doubtful: set[str]) -> None:
        """What this process's own connections say now; what is dead stays dead. See :class:`Roster`."""
        roster = self.roster
        if dead <= roster.dead and silent == roster.silent and doubtful == roster.doubtful:
            return
        roster.dead |= dead
        roster.silent, roster.doubtful = set(silent), set(doubtful)
        self._changed()

    def set_ready(self, number: int) -> None:
        """The main thread can run in the view of that number."""
        if number > self._ready and self._promise.number <= number and self.view and self.view.number == number:
            self._ready = number
            self._changed()

    def set_wants(self, wants: int) -> None:
        """The main thread waits for a view with a higher number than this; -1: it does not wait."""
        if wants != self._wants:
            self._wants = wants
            self._changed()

    def add_joiner(self, member: Member) -> None:
        self.joiners[member.uid] = member
        self._consider()

    def drop_joiner(self, uid: str) -> None:
        self.joiners.pop(uid, None)
        self._consider()

    def state(self) -> dict:
        """The message that all others hear about each second."""
        return MemberState(
            **self.roster.numbers(),
            promised=self._promise.number,
            ready=self._ready,
            finished=self._barrier.finished,
            entered=self._barrier.entered,
            wants=self._wants,
            dead=self.roster.reasons(),
            silent=sorted(self.roster.silent),
            proposes=self.proposal.number if self.proposal is not None else -1,
        ).to_json()

    def message(self, sender: str, message: dict) -> None:
        """A message of a member or joiner has arrived. KeyError and the like if it lacks something."""
        if self.failure is not None:
            return
        handle = {
            "state": self._on_state,
            "propose": self._on_propose,
            "ack": self._on_ack,
            "refuse": self._on_refuse,
            "abort": self._on_abort,
            "commit": self._on_commit,
        }[message["type"]]
        handle(sender, message)

    def expelled(self, number: int) -> None:
        """A member has said that this process is not in its view of that number."""
        if self.view is None or number <= self.view.number:
            return
        if self._barrier.defer():
            self._effects.join_anew(number)
        elif self._uid in self.roster.active:
            self._fail(failures.expelled(self.view, number, self._effects.reason(self._uid)))

    def _send(self, uid: str, message: dict) -> None:
        """Sends to a process, which may be this one."""
        if uid == self._uid:
            self.message(uid, message)
        else:
            self._effects.send(uid, message)

    def _changed(self) -> None:
        if self.failure is None and self.view is not None:
            self._tell()
            self._see_ready()
            self._consider()

    def _tell(self) -> None:
        """Sends the state after a change: to all others, but of a large group to the proposer alone, which says to all
        that a view is active. The others hear of it within a second."""
        lowest = self.roster.lowest()
        if lowest in ("", self._uid) or len(self.roster.committed.uids) <= FAN_OUT + 1:
            self._effects.broadcast(self.state())
        else:
            self._effects.send(lowest, self.state())

    def _pass_on(self, view: View) -> None:
        """Sends the commit to the members below this one in a tree, whose root has decided."""
        for uid in view.below(self._uid, FAN_OUT):
            self._effects.send(uid, self.commit)

    # ---- who may go on

    def _is_stopped(self, alive: list[str]) -> bool:
        """Whether `alive` may not go on whatever the others say. Then this process fails, at once or soon."""
        established = self.roster.established(alive)
        if not self.roster.may_go_on(established):
            if self._minority_since is None:
                self._minority_since = self._now
            if self._now - self._minority_since >= _MINORITY_S:
                self._stop_as_minority(alive)
            return True
        self._minority_since = None
        if len(established) < self._min_ranks:
            active, reason = self.roster.active, self._effects.reason
            lost = [uid for uid in active.uids if uid not in alive]
            self._fail(failures.too_few(active, lost, reason, len(established), self._min_ranks))
        return self.failure is not None

    def _stop_as_minority(self, alive: list[str]) -> None:
        active, num_alive = self.roster.active, len(self.roster.established(alive))
        silent = [uid for uid in active.uids if uid not in alive and uid not in self.roster.proven_dead]
        self._fail(failures.minority(active, silent, self._effects.reason, num_alive, self._barrier.entered))

    def _fail(self, error: RuntimeError) -> None:
        if self.failure is None:
            self.failure = error
            self._effects.failed(error)

    # ---- the proposer

    def _consider(self) -> None:
        """Proposes what is needed, if that is this process's task."""
        if self.failure is not None or self.view is None or self._is_stopped(self.roster.alive()):
            return
        if self.roster.lowest() != self._uid:
            self._abandon()
            for uid in list(self.joiners):
                del self.joiners[uid]
                self._effects.send_away(uid)
            return
        together = self.roster.together()
        needed = len(together) < len(self.view.members) or self._is_wanted()
        if self.proposal is not None:
            if self.proposal.fits(self.view, together, needed, self.joiners):
                return
            self._abandon()
        if self._now < self._not_before:
            return
        if needed:
            if not self.roster.may_go_on(self.roster.established(together)):
                self._stop_as_minority(together)
            elif self._uid in together:
                left = tuple(m for m in self.view.members if m.uid in together and m.uid in self.roster.active)
                self._propose(True, left, tuple(together), -1)
        elif self.joiners and self.roster.is_settled():
            joiners = tuple(joiner for joiner in self.joiners.values() if joiner.uid not in self.view)
            members = (*self.view.members, *joiners)
            step = max([self._barrier.entered, *(state.entered for state in self.roster.of_others())]) + self._margin
            self._propose(False, members, tuple(member.uid for member in members), step)

    def _is_wanted(self) -> bool:
        """Whether some member has waited for a change for so long that one is made though nobody is lost."""
        if max([self._wants, *(state.wants for state in self.roster.of_others())]) < self.roster.committed.number:
            self._wanted_since = None
            return False
        if self._wanted_since is None:
            self._wanted_since = self._now
        is_under_way = self.proposal is not None and self.proposal.immediate
        return is_under_way or self._now - self._wanted_since > _WANTED_S

    def _propose(self, immediate: bool, members: tuple[Member, ...], participants: tuple[str, ...], step: int) -> None:
        self.proposal = Proposal(self._seen + 1, self.roster.committed.number, immediate, members, participants, step)
        self._send_proposal(self.proposal)

    def _send_proposal(self, proposal: Proposal) -> None:
        proposal.sent = self._now
        message = proposal.to_json(self.roster.reasons())
        for uid in proposal.participants:
            if self.proposal is proposal and uid not in proposal.acks:
                self._send(uid, message)

    def _abandon(self) -> None:
        """Ends this process's proposal. Main threads that wait for its boundary go on; suspended steps wait for the
        next proposal."""
        ended, self.proposal = self.proposal, None
        if ended is not None and not ended.immediate:
            for uid in ended.participants:
                self._send(uid, {"type": "abort", "number": ended.number})

    def _on_ack(self, sender: str, message: dict) -> None:
        proposal = self.proposal
        if proposal is None or message["number"] != proposal.number or sender not in proposal.participants:
            return
        proposal.acks[sender] = message
        if len(proposal.acks) == len(proposal.participants):
            self._decide(proposal)

    def _on_refuse(self, sender: str, message: dict) -> None:
        self._seen = max(self._seen, message["promised"])
        if self.proposal is None or message["number"] != self.proposal.number:
            return
        if message["why"] == "step":
            self._margin = min(_MAX_MARGIN, 2 * self._margin)
            state = self.roster.states.get(sender)
            if state is not None:
                state.entered = max(state.entered, message["entered"])
        elif message["why"] == "lower":
            self._not_before = self._now + _AGAIN_S
        self._abandon()
        self._consider()

    def _decide(self, proposal: Proposal) -> None:
        """All have acknowledged: commits, if the quorum still holds by what they said."""
        roster, acks = self.roster, proposal.acks
        number = max(ack["active"] for ack in acks.values())
        if number > roster.active.number:
            self._see_active(number)
            self._consider()
            return
        if not roster.have_quorum(list(proposal.participants), acks):
            self._fail(failures.may_have_begun(roster.committed))
            return
        decision = proposal.decision(roster.active)
        self.proposal, self._margin = None, _MARGIN
        self._adopt(commit_message(decision, proposal.immediate, roster.may_be_active(acks)))
        self._pass_on(decision.view)
        # The tree does not reach those that are left out, nor joiners, with which only this member is connected yet.
        told, joined = decision.view.below(self._uid, FAN_OUT), {member.uid for member in decision.joined}
        for uid in proposal.participants:
            if uid not in told and (uid not in decision.view or uid in joined):
                self._effects.send(uid, self.commit)

    # ---- the members

    def _on_state(self, sender: str, message: dict) -> None:
        known, told = self.roster.states.get(sender), MemberState.from_json(message)
        self.roster.states[sender] = told
        self._seen = max(self._seen, told.promised)
        if self.view is None:
            return
        if told.committed < self.view.number and (sender in self.view or told.committed >= 0):
            self._effects.send(sender, self.commit)
        self._see_active(told.active)
        if told.ready == self.view.number:
            self._see_ready()
        promise = self._promise
        if promise.to == sender and told.proposes != promise.number > told.committed:
            self._barrier.resume(promise.number)  # its abort was lost with a connection
        self.roster.hear_dead(told.dead)
        is_new = known is None or (known.silent, known.wants) != (told.silent, told.wants)
        is_last = known is not None and known.ready != told.ready and self.roster.are_ready()
        if (is_new or is_last) and self.roster.lowest() == self._uid:
            self._consider()

    def _on_propose(self, sender: str, message: dict) -> None:
        number, base, immediate = message["number"], message["base"], message["immediate"]
        promise = self._promise
        self._seen = max(self._seen, number)
        if self.view is not None and self.view.number > base:
            self._effects.send(sender, self.commit)
            return
        if number < promise.number or (number == promise.number and sender != promise.to):
            self._refuse(sender, number, "promised")
            return
        if number == promise.number:
            if promise.ack is not None:
                self._send(sender, promise.ack)
            return
        self.roster.hear_dead(message["dead"])
        if self.view is None:
            if immediate:
                return  # a joiner's step is none
        elif self.roster.lowest() != sender:
            self._refuse(sender, number, "lower")
            return
        if not immediate and self.view is not None and self.view.number < base:
            return  # the commit of the base is on its way, and the proposal comes again
        if immediate:
            self._make_promise(number, sender)
            self._barrier.suspend(number)
            self._effects.stop_step(lambda: self._suspended(number))
        elif self.view is None or self._barrier.hold(number, message["step"]):
            self._make_promise(number, sender)
            self._acknowledge()
        else:
            self._refuse(sender, number, "step")

    def _make_promise(self, number: int, sender: str) -> None:
        self._promise = Promise(number, sender)
        if self.proposal is not None and self.proposal.number != number:
            self.proposal = None  # another's has a higher number, and supersedes what this one holds or suspends

    def _suspended(self, number: int) -> None:
        if self._promise.number == number and self.failure is None:
            self._acknowledge()

    def _acknowledge(self) -> None:
        number = self._promise.number
        self._promise.ack = {
            "type": "ack",
            "number": number,
            "finished": self._barrier.finished,
            "ready": self._ready,
            **self.roster.numbers(),
        }
        self._send(self._promise.to, self._promise.ack)

    def _refuse(self, sender: str, number: int, why: str) -> None:
        promised, entered = self._promise.number, self._barrier.entered
        told = {"type": "refuse", "number": number, "promised": promised, "why": why, "entered": entered}
        self._send(sender, told)

    def _on_abort(self, sender: str, message: dict) -> None:
        if self._promise.number == message["number"] and self._promise.to == sender:
            self._barrier.resume(message["number"])

    def _on_commit(self, _: str, message: dict) -> None:
        view = View.from_json(message["decision"]["view"])
        if self.view is not None and view.number <= self.view.number:
            return
        if self._uid in view:
            self._adopt(message)
            self._pass_on(view)
        elif self.view is not None:  # a joiner hears of others' changes
            self.expelled(view.number)

    def _adopt(self, message: dict) -> None:
        decision = Decision.from_json(message["decision"])
        number = decision.view.number
        self.roster.views = [*(View.from_json(before) for before in message["before"]), decision.view]
        self.commit = message
        self._barrier.set_active(self.roster.active.number)
        self._promise.number, self._seen = max(self._promise.number, number), max(self._seen, number)
        self._wanted_since = None
        if self.proposal is not None and self.proposal.base != number:
            self.proposal = None
        for uid in decision.view.uids:
            self.joiners.pop(uid, None)
        self._effects.committed(decision)
        self._barrier.commit(decision, bool(message["immediate"]))
        self._tell()
        self._see_ready()
        self._consider()

    def _see_ready(self) -> None:
        """The committed view is active once all its members are ready for it."""
        number = self.roster.committed.number
        if self.roster.active.number != number and self._ready == number and self.roster.are_ready():
            self._see_active(number)

    def _see_active(self, number: int) -> None:
        views = self.roster.views
        if views and views[0].number < number <= views[-1].number:
            self.roster.views = [view for view in views if view.number >= number]
            self._abandon()  # its members are those of a view before, without who has joined since
            self._barrier.set_active(number)
            self._tell()
