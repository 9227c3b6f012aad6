"""How members agree on the next view: the rules, without sockets, threads or clocks.

1. Each member tells all others its **state** when it changes and about each second: what it has committed, promised and
   is ready for, and whom it holds for dead or silent.
2. The lowest live rank **proposes** a view with a number above all that it has seen, to all that take part.
3. A member that has promised no such number yet promises it: it stops for an *immediate* change (a loss), or holds its
   main thread at step b for a *boundary* change (a joiner). It **acknowledges** with its last finished step.
4. When all have acknowledged, the proposer **commits**. Members pass a commit on to whoever lacks it.
5. A member says that it is **ready** for the view, unless it has promised a later number. A view for which all its
   members are ready has *gone*: only such a view is ever trained in.

Why there are never two groups: a change needs a quorum (quorum.py) of the last view known to have gone, and of each
committed view after it that may have gone. Two changes of one view therefore share a member. It acknowledged them one
after the other; once it has promised the later one it never gets ready for the earlier, and once it has committed the
earlier it acknowledges nothing that is based on less.
"""

from . import failures
from .life import Life
from .outlet import Round
from .quorum import may_go_on
from .view import Decision, Member, View

# Seconds for which a member waits for a change before one is made though nobody is lost.
_WANTED_S = 1.0
# Seconds before a refused proposer tries again, and before a proposal is sent again.
_AGAIN_S = 0.3
_MAX_MARGIN = 1 << 12


class Agreement(Life):
    """The rules. All methods are to be called on one thread."""

    # What happens.

    def start(self, view: View) -> None:
        """The founders' view."""
        self.view, self._chain, self._ready = view, [view], view.number
        self._promised = self._seen = view.number
        self.commit_message = self._message_of(Decision(view, {}, (), ()), True)

    def tick(self, now: float) -> None:
        self._now = now
        if self._round is not None and now - self._round.sent > _AGAIN_S:
            self._send_proposal(self._round)
        self._consider()

    def set_lost(self, dead: set[str], silent: set[str], doubtful: set[str]) -> None:
        """What this process's own connections say now; what is dead stays dead.

        doubtful: the dead that may have gone on without this process before they died, together with members that are
        silent now. They count as silent, too.
        """
        if dead <= self.dead and silent == self.silent and doubtful == self._doubtful:
            return
        self.dead |= dead
        self.silent, self._doubtful = set(silent), set(doubtful)
        self._changed()

    def set_ready(self, number: int) -> None:
        """The main thread can run in the view of that number."""
        if number > self._ready and self._promised <= number and self.view is not None and self.view.number == number:
            self._ready = number
            self._changed()

    def set_wants(self, wants: int) -> None:
        """The main thread waits for a view with a higher number than this; -1: it does not wait."""
        if wants != self._wants:
            self._wants = wants
            self._changed()

    def add_joiner(self, member: Member) -> None:
        self._joiners[member.uid] = member
        self._consider()

    def drop_joiner(self, uid: str) -> None:
        self._joiners.pop(uid, None)
        self._consider()

    def state(self) -> dict:
        """What all others hear about each second."""
        finished, entered = self._out.progress()
        return {
            "type": "state",
            "committed": self.view.number if self.view is not None else -1,
            "gone": self._chain[0].number if self._chain else -1,
            "promised": self._promised,
            "ready": self._ready,
            "finished": finished,
            "entered": entered,
            "wants": self._wants,
            "dead": sorted(self.dead),
            "silent": sorted(self.silent),
            "proposes": self._round.number if self._round is not None else -1,
        }

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
        if not self._out.put_off(number) and self._uid in self._chain[0]:
            self._fail(failures.expelled(self.view, number, self._out.reason(self._uid)))

    def _changed(self) -> None:
        if self.failure is None and self.view is not None:
            self._out.broadcast(self.state())
            self._see_ready()
            self._consider()

    # The proposer.

    def _consider(self) -> None:
        """Proposes what is needed, if that is this process's task."""
        if self.failure is not None or self.view is None or self._is_lost(self._alive()):
            return
        if self.lowest() != self._uid:
            self._abandon()
            for uid in list(self._joiners):
                del self._joiners[uid]
                self._out.send_away(uid)
            return
        together = self._together()
        needed = len(together) < len(self.view.members) or self._is_wanted()
        running = self._round
        if running is not None:
            fits = running.base == self.view.number and running.immediate >= needed
            if running.immediate:
                fits = fits and list(running.participants) == together
            else:
                fits = fits and all(uid in together or uid in self._joiners for uid in running.participants)
            if fits:
                return
            self._abandon()
        if self._now < self._not_before:
            return
        if needed:
            if not may_go_on(self._chain[0].uids, self._established(together), self.dead - self._doubtful):
                self._stop_as_minority(together)
            elif self._uid in together:
                kept = tuple(m for m in self.view.members if m.uid in together and m.uid in self._chain[0])
                self._open(True, kept, tuple(together), -1)
        elif self._joiners and self._is_settled():
            joiners = tuple(joiner for joiner in self._joiners.values() if joiner.uid not in self.view)
            members = (*self.view.members, *joiners)
            entered = [self._out.progress()[1], *(self._states[u]["entered"] for u in self.view.uids if u != self._uid)]
            self._open(False, members, tuple(member.uid for member in members), max(entered) + self._margin)

    def _is_settled(self) -> bool:
        """Whether all members have gone into the committed view, and nothing later was promised."""
        assert self.view is not None
        number = self.view.number
        if self._chain[0].number != number:
            return False
        return all(
            uid == self._uid or (uid in self._states and self._states[uid]["ready"] >= number) for uid in self.view.uids
        )

    def _is_wanted(self) -> bool:
        """Whether some member has waited for a change for so long that one is made though nobody is lost."""
        assert self.view is not None
        others = (self._states[uid]["wants"] for uid in self.view.uids if uid in self._states and uid != self._uid)
        if max([self._wants, *others]) < self.view.number:
            self._wanted_since = None
            return False
        if self._wanted_since is None:
            self._wanted_since = self._now
        if self._round is not None and self._round.immediate:
            return True
        return self._now - self._wanted_since > _WANTED_S

    def _open(self, immediate: bool, members: tuple[Member, ...], participants: tuple[str, ...], step: int) -> None:
        assert self.view is not None
        number = max([self._seen, self._promised, *(state["promised"] for state in self._states.values())]) + 1
        self._round = Round(number, self.view.number, immediate, members, participants, step)
        self._send_proposal(self._round)

    def _send_proposal(self, proposed: Round) -> None:
        proposed.sent = self._now
        message = {
            "type": "propose",
            "number": proposed.number,
            "base": proposed.base,
            "immediate": proposed.immediate,
            "step": proposed.step,
            "dead": sorted(self.dead),
        }
        for uid in proposed.participants:
            if self._round is proposed and uid not in proposed.acks:
                if uid == self._uid:
                    self._on_propose(uid, message)
                else:
                    self._out.send(uid, message)

    def _abandon(self) -> None:
        """Ends the round of this process. What it held is released; what it froze waits for the next round."""
        ended, self._round = self._round, None
        if ended is None or ended.immediate:
            return
        message = {"type": "abort", "number": ended.number}
        for uid in ended.participants:
            if uid == self._uid:
                self._on_abort(uid, message)
            else:
                self._out.send(uid, message)

    def _on_ack(self, sender: str, message: dict) -> None:
        running = self._round
        if running is None or message["number"] != running.number or sender not in running.participants:
            return
        running.acks[sender] = message
        if len(running.acks) == len(running.participants):
            self._decide(running)

    def _on_refuse(self, sender: str, message: dict) -> None:
        running = self._round
        self._seen = max(self._seen, message["promised"])
        if running is None or message["number"] != running.number:
            return
        if message["why"] == "step":
            self._margin = min(_MAX_MARGIN, 2 * self._margin)
            if sender in self._states:
                self._states[sender]["entered"] = max(self._states[sender]["entered"], message["entered"])
        elif message["why"] == "lower":
            self._not_before = self._now + _AGAIN_S
        self._abandon()
        self._consider()

    def _decide(self, running: Round) -> None:
        """All have acknowledged: commits, if the quorum still holds by what they said."""
        assert self.view is not None
        gone_number = max(ack["gone"] for ack in running.acks.values())
        if gone_number > self._chain[0].number:
            self._see_gone(gone_number)
            self._consider()
            return
        if not self._has_quorum(list(running.participants), running.acks):
            self._fail(failures.may_have_begun(self.view))
            return
        gone = self._chain[0]
        finished = {
            uid: ack["finished"] for uid, ack in running.acks.items() if uid in gone and ack["finished"] is not None
        }
        step = running.step if not running.immediate else max(finished.values(), default=gone.step - 1) + 1
        view = View(running.number, running.members, step)
        lost = tuple(member for member in gone.members if member.uid not in view)
        joined = tuple(member for member in view.members if member.uid not in gone)
        self._round, self._margin = None, 2
        kept = [v for v in self._may_have_gone(running.acks) if v.number <= self.view.number]
        self._chain = [*kept, view]
        self._adopt(self._message_of(Decision(view, finished, lost, joined), running.immediate))

    def _message_of(self, decision: Decision, immediate: bool) -> dict:
        return {
            "type": "commit",
            "decision": decision.to_json(),
            "immediate": immediate,
            "chain": [view.to_json() for view in self._chain],
        }

    # The members.

    def _on_state(self, sender: str, message: dict) -> None:
        known = self._states.get(sender)
        self._states[sender] = message
        self._seen = max(self._seen, message["promised"])
        if self.view is None:
            return
        if message["committed"] < self.view.number and (sender in self.view or message["committed"] >= 0):
            self._out.send(sender, self.commit_message)
        self._see_gone(message["gone"])
        self._see_ready()
        if self._promised_to == sender and message["proposes"] != self._promised > message["committed"]:
            self._out.release(self._promised)  # its abort was lost with a connection
        self._hear_dead(sender, message)
        if known is None or any(known[key] != message[key] for key in ("silent", "wants", "ready", "gone", "promised")):
            self._consider()

    def _hear_dead(self, sender: str, message: dict) -> None:
        for uid in message["dead"]:
            if uid not in self.dead and uid != self._uid:
                self._out.heard_dead(uid, sender)

    def _on_propose(self, sender: str, message: dict) -> None:
        number, base, immediate = message["number"], message["base"], message["immediate"]
        self._seen = max(self._seen, number)
        if self.view is not None and self.view.number > base:
            self._out.send(sender, self.commit_message)
            return
        if number < self._promised or (number == self._promised and sender != self._promised_to):
            self._refuse(sender, number, "promised")
            return
        if number == self._promised:
            if self._ack is not None:
                self._answer(sender, self._ack)
            return
        self._hear_dead(sender, message)
        if self.view is None:  # a joiner
            if immediate:
                return
        elif self.lowest() != sender:
            self._refuse(sender, number, "lower")
            return
        if not immediate and self.view is not None and self.view.number < base:
            return  # the commit of the base is on its way, and the proposal comes again
        if immediate:
            self._promise(number, sender)
            self._out.freeze(number, lambda finished: self._frozen(number, finished))
        elif self.view is None or self._out.hold(number, message["step"]):
            self._promise(number, sender)
            self._acknowledge(number, self._out.progress()[0])
        else:
            self._refuse(sender, number, "step")

    def _promise(self, number: int, sender: str) -> None:
        self._promised, self._promised_to, self._ack = number, sender, None
        if self._round is not None and self._round.number != number:
            self._round = None  # another's proposal has a higher number, and what it holds or freezes is superseded

    def _frozen(self, number: int, finished: int | None) -> None:
        if self._promised == number and self.failure is None:
            self._acknowledge(number, finished)

    def _acknowledge(self, number: int, finished: int | None) -> None:
        self._ack = {
            "type": "ack",
            "number": number,
            "finished": finished,
            "committed": self.view.number if self.view is not None else -1,
            "gone": self._chain[0].number if self._chain else -1,
            "ready": self._ready,
        }
        self._answer(self._promised_to, self._ack)

    def _refuse(self, sender: str, number: int, why: str) -> None:
        entered = self._out.progress()[1]
        message = {"type": "refuse", "number": number, "promised": self._promised, "why": why, "entered": entered}
        self._answer(sender, message)

    def _answer(self, sender: str, message: dict) -> None:
        if sender != self._uid:
            self._out.send(sender, message)
        elif message["type"] == "ack":
            self._on_ack(sender, message)
        else:
            self._on_refuse(sender, message)

    def _on_abort(self, sender: str, message: dict) -> None:
        if self._promised == message["number"] and self._promised_to == sender:
            self._out.release(message["number"])

    def _on_commit(self, sender: str, message: dict) -> None:
        view = View.from_json(message["decision"]["view"])
        if self.view is not None and view.number <= self.view.number:
            return
        if self.view is None and self._uid not in view:
            return  # a joiner hears of others' changes
        if self._uid in view:
            self._chain = [View.from_json(known) for known in message["chain"]]
            self._out.gone(self._chain[0].number)
            self._adopt(message)
        else:
            self.expelled(view.number)

    def _adopt(self, message: dict) -> None:
        decision = Decision.from_json(message["decision"])
        self.view, self.commit_message = decision.view, message
        self._promised, self._seen = max(self._promised, decision.view.number), max(self._seen, decision.view.number)
        self._wanted_since = None
        if self._round is not None and self._round.base != decision.view.number:
            self._round = None
        for uid in decision.view.uids:
            self._joiners.pop(uid, None)
        self._out.committed(decision, bool(message["immediate"]))
        self._out.broadcast(self.state())
        self._see_ready()
        self._consider()

    def _see_ready(self) -> None:
        """The committed view has gone once all its members are ready for it."""
        assert self.view is not None
        number = self.view.number
        if self._chain[0].number == number or self._ready != number:
            return
        others = (self._states.get(uid, {}) for uid in self.view.uids if uid != self._uid)
        if all(state.get("ready") == number for state in others):
            self._see_gone(number)

    def _see_gone(self, number: int) -> None:
        if self._chain and self._chain[0].number < number <= self._chain[-1].number:
            self._chain = [view for view in self._chain if view.number >= number]
            self._abandon()  # its members are those of a view before, without who has joined since
            self._out.gone(number)
            self._out.broadcast(self.state())
