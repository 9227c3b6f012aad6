"""The rules by which members agree, in a simulated network in which everything may happen in any order.

The rules and the step barrier are the product's; connections, main threads and time are simulated here. Tests and
bench/scale.py use it.
"""

import collections
import random
from collections.abc import Callable

from fusedcomm.members.plane.agreement import Agreement
from fusedcomm.members.plane.barrier import StepBarrier
from fusedcomm.members.plane.view import Member, View

INFO = {"store": ["10.0.0.1", 40000], "process": "10.0.0.1/12345/123456789", "timeout_s": 1800.0}
"""What a member says of itself, as long as a real one's."""


class Blocked(Exception):
    """The main thread would wait."""


class NoWait:
    """Stands for the step barrier's condition: what waits is tried again later."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def notify_all(self):
        pass

    def wait(self, timeout=None):
        raise Blocked


class Process:
    """A member or joiner: the effects of its rules, and its main thread as a state machine."""

    def __init__(self, world: "World", uid: str) -> None:
        self.world, self.uid, self.member = world, uid, Member(uid, "10.0.0.1", 40000, INFO)
        self.barrier = StepBarrier()
        self.barrier._changed = NoWait()
        self.rules = Agreement(uid, 1, self.barrier, self)
        self.mode, self.step, self.view, self.decision = "join", -1, None, None
        self.values = {}
        self.staged = {}  # by view: the value that it begins with
        self.dead, self.silent, self.doubts, self.past = set(), set(), {}, set()
        self.stops = []
        self.ended = False
        self.error = None
        self.waits_to_join = True

    # Effects.

    def send(self, uid, message):
        assert uid != self.uid
        self.world.send(self.uid, uid, message)

    def broadcast(self, message):
        if self.rules.view is None:
            others = {process.uid for process in self.world.alive() if process.knows(self.uid)}
        else:
            others = set(self.rules.view.uids)
        for uid in sorted((others | set(self.rules.joiners)) - {self.uid}):
            self.send(uid, message)

    def knows(self, uid):
        return self.rules.view is not None and (uid in self.rules.view or uid in self.rules.joiners)

    def stop_step(self, then):
        self.stops.append(then)

    def committed(self, decision):
        self.past |= set(decision.view.uids)
        self.world.committed(self, decision)

    def join_anew(self, number):
        self.world.rename(self, f"{self.uid}+")

    def send_away(self, uid):
        pass

    def heard_dead(self, uid, reason):
        self.prove(uid)

    def failed(self, error):
        self.barrier.fail(error)

    def reason(self, uid):
        return "Connection refused" if uid in self.dead else ""

    # What the connections say.

    def quiet(self):
        return {uid for pair in self.world.cuts if self.uid in pair for uid in pair if uid != self.uid}

    def perceive(self):
        quiet = self.quiet()
        doubtful = {uid for uid, then in self.doubts.items() if then & (quiet | self.silent)}
        self.rules.set_lost(set(self.dead), set(self.silent), doubtful)

    def prove(self, uid):
        if uid not in self.dead:
            self.dead.add(uid)
            self.silent.discard(uid)
            self.doubts[uid] = self.quiet() - self.dead
            self.perceive()

    # The main thread.

    def poll(self):
        if self.ended:
            return
        try:
            getattr(self, f"poll_{self.mode}")()
        except Blocked:
            pass
        except RuntimeError as error:
            self.ended, self.error = True, error

    def poll_join(self):
        self.decision = self.barrier.recover()
        self.mode = "install"

    def poll_run(self):
        if self.barrier.is_stopped:
            self.mode = "recover"
            return
        at = (self.view.number, self.step)
        if self.world.begun.get(self.uid) != at:
            if not self.barrier.begin(self.step):
                decision = self.barrier.boundary(self.step)
                if decision is not None:
                    self.decision, self.mode = decision, "install"
                    return
                if self.barrier.is_stopped:
                    return
            self.world.begun[self.uid] = at
            self.world.took_part.setdefault(at, set()).add(self.uid)
        # A collective: all have begun this step in this view. What was sent before a death still arrives.
        if self.world.took_part[at] >= set(self.view.uids):
            if not any(self.world.is_cut(self.uid, uid) for uid in self.view.uids):
                if self.barrier.finish_step(self.step):
                    before = self.values[self.step - 1]
                    self.values[self.step] = hash((before, self.step, self.view.uids))
                    self.step += 1

    def poll_recover(self):
        self.rules.set_wants(self.barrier.wanted())
        self.decision = self.barrier.recover()
        self.rules.set_wants(-1)
        self.mode = "install"

    def poll_install(self):
        view, wanted = self.decision.view, self.decision.view.step - 1
        joined = [member.uid for member in self.decision.joined]
        staged = self.values.get(wanted, self.staged.get(view.number))
        if staged is None:
            for uid in view.uids:
                other = self.world.processes[uid]
                reachable = not other.ended and not self.world.is_cut(self.uid, uid)
                if reachable and wanted in other.values and (uid not in joined):
                    staged = other.values[wanted]
        if staged is not None:
            self.staged[view.number] = staged
            assert not self.values or max(self.values) <= wanted, (
                f"{self.uid} finished {max(self.values)}: {self.decision}"
            )
            self.rules.set_ready(view.number)
        if self.barrier.wait_active(view.number, 1e9):
            self.values[wanted] = staged
            self.barrier.install(view)
            self.view, self.step, self.mode = view, view.step, "run"
        else:
            self.mode = "recover"


class World:
    """uid_of: of the process of a number."""

    def __init__(
        self, seed: int, num_founders: int, kinds: str = "", uid_of: Callable[[int], str] = "p{}".format
    ) -> None:
        self.random, self.kinds, self.uid_of = random.Random(seed), kinds, uid_of
        self.processes: dict[str, Process] = {}
        self.links = collections.defaultdict(collections.deque)
        self.cuts: set[frozenset[str]] = set()
        self.begun: dict[str, tuple[int, int]] = {}
        self.took_part: dict[tuple[int, int], set[str]] = {}
        self.views: dict[int, tuple] = {}
        self.now = 0.0
        view = View(0, tuple(self.add().member for _ in range(num_founders)), 0)
        for process in self.processes.values():
            process.barrier.start(view)
            process.rules.start(view)
            process.values[-1] = 0
            process.past = set(view.uids)
            process.view, process.step, process.mode, process.waits_to_join = view, 0, "run", False

    def add(self) -> Process:
        process = Process(self, self.uid_of(len(self.processes)))
        self.processes[process.uid] = process
        return process

    def act(self, process: Process, do: Callable[[], object]) -> None:
        """Has a process do something."""
        do()

    def rename(self, process: Process, uid: str) -> None:
        """The process joins anew by this uid; to the others the old one has ended."""
        old, fresh = process.uid, Process(self, uid)
        self.processes[old], self.processes[uid] = Process(self, old), process
        self.processes[old].ended = True
        process.uid, process.member, process.waits_to_join = uid, fresh.member, True
        process.rules = Agreement(uid, 1, process.barrier, process)
        self.cuts |= {frozenset({uid, *pair} - {old}) for pair in self.cuts if old in pair}

    def is_cut(self, a: str, b: str) -> bool:
        return frozenset((a, b)) in self.cuts

    def send(self, source: str, target: str, message: dict) -> None:
        if not self.is_cut(source, target) and target in self.processes:
            self.links[source, target].append(message)

    def committed(self, process: Process, decision) -> None:
        view = decision.view
        known = self.views.setdefault(view.number, (view.uids, view.step))
        assert known == (view.uids, view.step), f"two views {view.number}: {known} and {view}"

    def check_groups(self) -> None:
        """One step has one value among all that went on after it. A process may have finished a step alone, and then
        have been lost: the others add that step up again without it."""
        for step in range(max((max(p.values, default=0) for p in self.processes.values()), default=0)):
            found = {
                p.values[step]: p.uid for p in self.processes.values() if step in p.values and step + 1 in p.values
            }
            assert len(found) <= 1, f"several groups went on from step {step}: {found}"

    def alive(self) -> list[Process]:
        return [process for process in self.processes.values() if not process.ended]

    # What may happen.

    def deliver(self) -> None:
        waiting = [key for key, queue in self.links.items() if queue]
        if waiting:
            self.pass_on(*self.random.choice(waiting))

    def pass_on(self, source: str, target: str) -> None:
        message = self.links[source, target].popleft()
        process = self.processes[target]
        if process.ended or source in process.dead or self.is_cut(source, target):
            return
        if source in process.silent:
            process.silent.discard(source)
            process.perceive()
        self.act(process, lambda: process.rules.message(source, message))

    def flow(self, *without: tuple[str, str]) -> None:
        """Delivers all messages but those of the links `without`, and stops steps where that is asked."""
        while True:
            for process in self.alive():
                while process.stops:
                    self.act(process, process.stops.pop(0))
            waiting = [link for link, queue in self.links.items() if queue and link not in without]
            if not waiting:
                return
            for link in waiting:
                while self.links[link]:
                    self.pass_on(*link)
                del self.links[link]

    def make_ready(self, *without: tuple[str, str]) -> None:
        """All main threads can run in their views. without: as for flow()."""
        for process in self.alive():
            self.act(process, lambda process=process: process.rules.set_ready(process.rules.view.number))
        self.flow(*without)

    def tell_states(self) -> None:
        """What a second brings."""
        for process in self.alive():
            process.broadcast(process.rules.state())
            self.flow()

    def lose(self, uid: str, *noticed_by: str) -> None:
        """A process ends, which these notice; all others without names."""
        self.processes[uid].ended = True
        for process in self.alive():
            if not noticed_by or process.uid in noticed_by:
                self.act(process, lambda process=process: process.prove(uid))

    def propose_joiner(self) -> Process:
        """A new process asks the one that proposes."""
        joiner = self.add()
        joiner.waits_to_join = False
        first = next(process for process in self.alive() if process.rules.roster.lowest() == process.uid)
        self.act(first, lambda: first.rules.add_joiner(joiner.member))
        return joiner

    def tick(self) -> None:
        self.now += 0.05
        if not self.alive():
            return
        process = self.random.choice(self.alive())
        process.rules.tick(self.now)
        process.perceive()
        process.broadcast(process.rules.state())
        view = process.rules.view
        for other in self.alive():
            if view is not None and other.rules.view is not None and other.uid in view.uids:
                if process.uid in other.past and process.uid not in other.rules.view:
                    if not self.is_cut(process.uid, other.uid):
                        process.rules.expelled(other.rules.view.number)
                        return

    def poll(self) -> None:
        if self.alive():
            self.random.choice(self.alive()).poll()

    def stop(self) -> None:
        waiting = [process for process in self.alive() if process.stops]
        if waiting:
            process = self.random.choice(waiting)
            process.stops.pop(0)()

    def notice(self) -> None:
        """A process notices that another is dead, or silent."""
        found = [
            (a, b)
            for a in self.alive()
            for b in self.processes.values()
            if a is not b and a.rules.view is not None and b.uid in a.rules.view.uids and b.uid not in a.dead | a.silent
        ]
        found = [(a, b) for a, b in found if b.ended or self.is_cut(a.uid, b.uid)]
        if not found:
            return
        a, b = self.random.choice(found)
        if self.is_cut(a.uid, b.uid):
            a.silent.add(b.uid)
            a.perceive()
        else:
            a.prove(b.uid)

    def lose_joiner(self) -> None:
        for process in self.alive():
            for uid in list(process.rules.joiners):
                if self.processes[uid].ended or self.is_cut(process.uid, uid):
                    process.rules.drop_joiner(uid)
        for joiner in self.alive():
            if joiner.rules.view is None and not any(joiner.uid in p.rules.joiners for p in self.alive()):
                joiner.waits_to_join = True

    def kill(self) -> None:
        alive = self.alive()
        victim = self.random.choice(alive) if alive else None
        with_state = [process for process in alive if process.values and process is not victim]
        if with_state:
            victim.ended = True

    def break_link(self) -> None:
        if self.links:
            a, b = self.random.choice(list(self.links))
            self.links[a, b].clear()
            self.links[b, a].clear()

    def cut(self) -> None:
        if len(self.processes) > 1:
            self.cuts.add(frozenset(self.random.sample(sorted(self.processes), 2)))

    def heal(self) -> None:
        if self.cuts:
            self.cuts.discard(self.random.choice(sorted(self.cuts, key=sorted)))

    def arrive(self) -> None:
        if len(self.processes) < 9:
            self.add()

    def join(self) -> None:
        for joiner in self.alive():
            if joiner.waits_to_join:
                for member in self.alive():
                    if member.rules.view is not None and member.rules.failure is None:
                        if member.rules.roster.lowest() == member.uid and joiner.uid not in member.rules.view:
                            if not self.is_cut(member.uid, joiner.uid):
                                joiner.waits_to_join = False
                                member.rules.add_joiner(joiner.member)
                                return

    def run(self, num_actions: int) -> None:
        weights = {"deliver": 40, "tick": 12, "poll": 40, "stop": 8, "notice": 6, "break_link": 1}
        extra = {"k": {"kill": 0.25}, "c": {"cut": 0.4, "heal": 0.3}, "j": {"arrive": 0.4, "join": 2}}
        for kind in self.kinds:
            weights |= extra[kind]
        weights["lose_joiner"] = 2
        for action in self.random.choices(list(weights), list(weights.values()), k=num_actions):
            getattr(self, action)()

    def settle(self) -> None:
        """Nothing fails any more; everybody notices everything."""
        self.kinds = ""
        self.cuts.clear()
        for _ in range(60):
            self.run(300)
            for _ in range(200):
                self.notice()
            self.join()
            self.lose_joiner()
