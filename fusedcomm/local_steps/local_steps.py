"""LocalSteps: trains locally, and merges the ranks' parameters every few steps while training goes on."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusedcomm import log
from fusedcomm.config import Config, LocalOptions, Wire
from fusedcomm.literals import Merge, MergeWeights
from fusedcomm.local_steps import arguments, rules, shards, state
from fusedcomm.local_steps.fragments import Fragment, begin_equal, cut, record, refuse_changed
from fusedcomm.local_steps.merging import SOME_RANKS, Merging, fitting
from fusedcomm.local_steps.messages import Messages, Pending, Spread
from fusedcomm.local_steps.plan import LocalPlan, make_plan
from fusedcomm.local_steps.rules import Outer, OuterMaker
from fusedcomm.local_steps.stats import LocalStats, StepTimer, collect
from fusedcomm.local_steps.weights import Weights
from fusedcomm.local_steps.windows import Window
from fusedcomm.members.members import Members
from fusedcomm.session.served import Place, refuse_served, serve
from fusedcomm.session.session import Session
from fusedcomm.session.surface import Surface


class LocalSteps(Surface):
    """Merges the ranks' parameters every few optimizer steps, instead of their gradients in every step.

        comm = fusedcomm.LocalSteps(model, optimizer, every=30)
        for batch in batches:
            …; optimizer.step()  # a merge begins, or ends, in some of these
        comm.finish()            # all ranks have equal parameters

    It is another algorithm than averaging gradients, with another loss curve. Make it on every rank. All ranks begin
    with the parameters of the group's first rank; buffers stay each rank's own.

    At a fragment's turn a snapshot y of its parameters is taken, and its difference from the merged state m, which all
    ranks share, is sent. Training goes on for `delay` steps to z; then the ranks' mean m̄ becomes the merged state.

    Args:
        model: the module; or, with ranks of a host that average gradients, a DistributedDataParallel or a module of
            FSDP2's over them. What requires gradients now is merged; of a DTensor the rank's own shard.
        optimizer: any torch optimizer that holds these parameters. It is not wrapped; its steps are followed by a hook.
        every: steps from one merge of a parameter to the next; or a time, "20s": a merge begins at each rank's first
            step after 20 seconds since the last message arrived, so each rank makes the steps that it can.
        delay: steps from snapshot to merge, below `every`. 0: the step waits for the merge. None: 5, or less where
            `every` or another argument demands it. Where `every` is a time, the next merge of the same parameters
            ends it earlier.
        merge: "corrected": x = z + (m̄ − y), so no step of this rank is lost or counts twice.
            "nesterov": `outer` moves m̄ against the mean difference; then as "corrected". With delay=0 this is DiLoCo.
            "average": x = m̄, with delay=0.
        fragments: parts that have their turns one after another, `every` / fragments apart.
        config: a wire's name, or a :class:`fusedcomm.Config`. A wire's name has error feedback with decay 0.95 if it
            has scales; a Config has what it says. Ranks on several hosts have sums on two levels as in Config(hosts=…).
        outer: for "nesterov": a function that makes a torch optimizer of a list of fp32 parameters. None: SGD with
            Nesterov's momentum 0.9 and a learning rate by `every`, in steps, and the number of ranks.
        weights: how ranks count in the mean. None: alike. "steps": by their steps since the last snapshot.
        masters: the optimizer's own fp32 copies by the model's parameter names. They are merged, and the model's
            parameters are refreshed.
        process_group: the ranks that merge; None: all. With FSDP2 inside hosts those that hold the same shard.
        members: a :class:`fusedcomm.Members`: ranks may be lost and may join; takes the place of `process_group`.
            A lost rank is not in the merges that nobody had received yet. A rank that joins begins with the merged
            state; ``members.carry(optimizer=optimizer)`` gives it the optimizer's state of one member, too.
        quiet: whether rank 0 does not report the plan.

    Raises:
        ValueError, TypeError: an argument is not possible, or another front end serves a parameter; the text says it.
        RuntimeError: the ranks do not agree (the same text on every rank), or the engine cannot run.
    """

    _shows: tuple[str, ...] = ("finish", "load_state_dict", "plan", "state_dict", "stats", "trace")
    _kind = serves_as = "LocalSteps"
    steps = turns = num_messages = _finished_at = 0
    merging: Merging | None = None
    window: Window | None = None
    """Where `every` is a time."""
    spread: Spread | None = None
    """Of the last merge."""
    _hooks: Sequence[Any] = ()

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int | str,
        *,
        delay: int | None = None,
        merge: Merge = "corrected",
        fragments: int = 1,
        config: Config | Wire = "int4",
        outer: OuterMaker | None = None,
        weights: MergeWeights | None = None,
        masters: Mapping[str, torch.Tensor] | None = None,
        process_group: dist.ProcessGroup | None = None,
        members: Members | None = None,
        quiet: bool = False,
    ) -> None:
        self.schedule = arguments.schedule(every, delay, merge, fragments, weights, outer is not None)
        arguments.refuse_mates(every, model)
        cfg = arguments.configuration(config)
        if members is not None:
            cfg = fitting(members, cfg, model, process_group)
        group = dist.group.WORLD if process_group is None else process_group
        # The outer learning rate must not depend on how many members there are when this rank joins.
        num_ranks = group.size() if members is None else SOME_RANKS
        self.place: Place = "across hosts" if isinstance(model, nn.Module) and shards.has_mates(model) else "alone"
        problem: Exception | None = None
        self.outer: Outer | None = None
        self.fragments: list[Fragment] = []
        self.model, self._optimizer = model, optimizer
        try:
            found = arguments.targets(model, optimizer, masters)
            if members is None:
                arguments.refuse_same_ranks(model, group)
                shards.refuse_group([(name, target) for name, _, target in found], group)
            refuse_served([pair[:2] for pair in found], self.serves_as, self.place, hooks=self.place == "alone")
            cfg.check_patterns([(name, parameter) for name, parameter, _ in found])
            self.fragments = cut(found, cfg, fragments)
            if merge == "nesterov":
                self.outer = Outer(self.fragments, outer, every, num_ranks)
        except (ValueError, TypeError) as error:
            problem = error  # the other ranks are told
        device = self.fragments[0].anchor.device if self.fragments else torch.device("cpu")
        self.merges = [0] * fragments
        self.under_way: list[Pending] = []
        self.rest: list[int] = []
        """The fragments of the last messages of finish() that are still to be sent."""
        if members is None:
            self.session = Session(cfg, group, None, LocalOptions(), device, also_agree=self._record(), problem=problem)
        else:
            self.merging = Merging(self, members, cfg, device, self._record(), problem)
            self.session = self.merging.session
        wires = {name: wire for fragment in self.fragments for name, wire in fragment.wires().items()}
        seconds = self.schedule.seconds
        if seconds is not None:
            self.window = Window(str(every), seconds / fragments, self.session.rank)
        keeps = members is not None and cfg.feedback is not None
        self.messages = Messages(self.session, wires, keeps, self.window)
        self.weights = Weights(weights, float(every) if seconds is None else seconds, fragments)
        self.timer = StepTimer()
        if self.merging is not None and self.merging.members.joins is not None:
            self.merging.take_state()
        else:
            if self.merging is not None:
                self.merging.take_first_anchors()
            begin_equal(self.fragments, self.session, is_equal=self.merging is not None)
            if self.window is not None:
                self.window.begin()
        self._hooks = self._hook()
        serve(self)
        self._seal()
        if self.session.rank == 0 and shards.is_first(target for _, _, target in found):
            log.report(self.plan, quiet)

    def served(self) -> list[torch.Tensor]:
        """See :class:`fusedcomm.session.served.Server`."""
        return [each.parameter for fragment in self.fragments for each in fragment.merged] if self._hooks else []

    def _record(self) -> dict[str, object]:
        outer = None if self.outer is None else self.outer.record()
        return {**self.schedule.record(), "outer": outer, **record(self.fragments)}

    @property
    def is_attached(self) -> bool:
        """Whether merges follow the optimizer's steps; False after :meth:`detach`."""
        return bool(self._hooks)

    def _described(self) -> str:
        how = f"wire {self.session.config.wire}, merge {self.schedule.merge!r} every {self.schedule.period}"
        return f"{how}, {self.session.world_size} ranks, {self.steps} steps"

    def use(self, session: Session) -> None:
        """Goes on over this session, of other ranks."""
        self.session = session
        self.messages.use(session)

    def _hook(self) -> list[Any]:
        # The optimizer keeps this object alive, which need not be assigned to anything.
        return [self._optimizer.register_step_post_hook(lambda *_: self._after_step())]

    # ---- steps

    @torch.no_grad()
    def _after_step(self) -> None:
        self._refuse_ended()
        waited_s = self.messages.waited_s
        self.steps += 1
        self.weights.step()
        if self.merging is not None:
            self.merging.look()
        self._end_due()
        if self.window.is_over() if self.window is not None else self.schedule.step_of(self.turns) <= self.steps:
            self._take_turn()
        self.timer.step(self.messages.waited_s - waited_s)

    def _take_turn(self, weight: float | None = None) -> None:
        fragment = self._next_fragment
        while any(pending.fragment is fragment for pending in self.under_way):
            self._end(self.under_way[0])  # a window of time was shorter than the delay; the message has arrived
        self._begin(fragment, weight=weight)
        self.turns += 1
        self._end_due()

    @property
    def _next_fragment(self) -> Fragment:
        return self.fragments[self.schedule.fragment_of(self.turns)]

    @torch.no_grad()
    def take_first_turn(self) -> None:
        """Takes part in what the others are doing, on a rank that has joined and has done nothing yet."""
        if self.rest:
            self._merge_rest(0.0)
        else:
            self._take_turn(weight=0.0)

    def _end_due(self) -> None:
        while self.under_way and self.under_way[0].due <= self.steps:
            self._end(self.under_way[0])

    def _begin(self, fragment: Fragment, *, weight: float | None = None, is_finishing: bool = False) -> None:
        """Takes a fragment's snapshot, and hands its message to the engine. weight: None: as `weights` has it."""
        refuse_changed(fragment, self.fragments, self.model, self._optimizer, self.session.rank)
        if self.merging is not None:
            self.merging.before(self.num_messages)
        own = fragment.read().sub_(fragment.anchor)
        pending = Pending(
            fragment=fragment,
            number=self.merges[fragment.index],
            began=self.steps,
            due=self.steps + self.schedule.delay,
            own=own,
            mean=own,
            checksum=fragment.checksum(),
            message=self.num_messages,
            weight=self.weights.take(fragment.index) if weight is None else weight,
            is_finishing=is_finishing,
        )
        self.messages.send(pending)
        self.merges[fragment.index] += 1
        self.num_messages += 1
        self.under_way.append(pending)

    def _end(self, pending: Pending, is_final: bool = False) -> bool:
        """Waits for a message, and merges. Returns whether all ranks were in finish() when they sent theirs.

        is_final: the parameters become the merged state, whatever the rule.
        """
        fragment = pending.fragment
        refuse_changed(fragment, self.fragments, self.model, self._optimizer, self.session.rank)
        self._arrive(pending)
        self.under_way.remove(pending)
        # The last merges average: an outer step would go on by momentum alone, and no later merge corrects it.
        moved = rules.move(fragment, pending.mean, None if pending.all_finish else self.outer)
        if is_final or pending.began == self.steps:
            # With no step since the snapshot, z is y: the corrected rule gives the merged state itself.
            fragment.write(fragment.anchor)
        else:
            fragment.write(rules.corrected(fragment.read(), moved, pending.own))
        return pending.all_finish

    def _arrive(self, pending: Pending) -> None:
        if pending.is_read:
            return
        if self.merging is None:
            self.messages.wait(pending)
        else:
            self.merging.arrive(pending)
        self.spread = self.messages.read(pending)

    # ---- what the user calls

    @torch.no_grad()
    def finish(self) -> None:
        """Ends all merges and averages all parameters: then they are equal on every rank. A collective call.

        Ranks may have made different numbers of steps: those that have ended take part in the merges of the others.
        Training may go on afterwards.
        """
        self._refuse_ended()
        self.drain()
        all_finish = False
        while not all_finish:  # a message tells every rank alike, so all leave after the same one
            self._begin(self._next_fragment, is_finishing=True)
            self.turns += 1
            all_finish = self._end(self.under_way[-1])
        self.rest = [fragment.index for fragment in self.fragments]
        self._merge_rest()
        self._finished_at = self.num_messages

    def _merge_rest(self, weight: float | None = None) -> None:
        """The last messages of finish(). weight: None: as `weights` has it."""
        while self.rest:
            self._begin(self.fragments[self.rest[0]], weight=weight, is_finishing=True)
            self._end(self.under_way[-1], is_final=True)
            del self.rest[0]

    def drain(self) -> None:
        """Ends all merges under way."""
        while self.under_way:
            self._end(self.under_way[0])

    @torch.no_grad()
    def state_dict(self) -> dict:
        """The state of this rank for a checkpoint, beside the model's, the optimizer's and the sampler's.

        Waits for messages under way, which are part of the state; so training goes on as if it had not been
        interrupted. Every rank saves its own, after the same step; where `every` is a time, after :meth:`finish`. To go
        on with another number of ranks, call :meth:`finish` first, too: each rank may then load any rank's.
        """
        self._refuse_ended()
        if self.window is not None and self.num_messages != self._finished_at:
            raise RuntimeError(
                f"fusedcomm: with every={self.schedule.every!r} a rank may have begun a merge that another has not: "
                "call finish() before saving"
            )
        for pending in self.under_way:
            self._arrive(pending)
        return state.save(self)

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Restores what :meth:`state_dict` returned. Load the model and the optimizer before it, and after LocalSteps
        was made, which gives every rank the first rank's parameters.

        Raises ValueError if the state is of another schedule, wire or model, or the model is not the one saved with it.
        Nothing has changed then.
        """
        self._refuse_ended()
        for pending in self.under_way:
            self._arrive(pending)
        state.load(self, saved)

    def plan(self, bits_s: float | None = None, step_s: float | None = None) -> LocalPlan:
        """What merges send, how long it takes, the smallest `every` and `delay` that hide it, and memory. Printable.

        Args:
            bits_s: of the line, in bits a second. None: as timed when this object was made.
            step_s: seconds of a step. None: as measured, if there were two.
        """
        step_s = self.timer.step_s if step_s is None else step_s
        outer_nbytes = 0 if self.outer is None else self.outer.nbytes
        return make_plan(self.session, self.schedule, self.fragments, outer_nbytes, bits_s, step_s)

    def stats(self) -> LocalStats:
        """Counts and times of this rank."""
        return collect(self)

    def trace(self, path: str | os.PathLike, all_ranks: bool = False) -> contextlib.AbstractContextManager[None]:
        """Records the model's passes and the merges' stages; see :meth:`fusedcomm.Handle.trace`."""
        self._refuse_ended()
        return self.session.recorder.record(path, all_ranks, self.model)

    @torch.no_grad()
    def detach(self) -> None:
        """Stops merging; what is under way is dropped. Call :meth:`finish` before. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.under_way.clear()
        (self.session if self.merging is None else self.merging).stop("LocalSteps was detached")

    def _refuse_ended(self) -> None:
        self.refuse_detached("nothing is merged")
