"""LocalSteps: trains locally, and merges the ranks' parameters every few steps while training goes on."""

import collections
import contextlib
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusedcomm import log
from fusedcomm.config import Config, LocalOptions, Wire
from fusedcomm.literals import Merge, MergedState, MergeWeights
from fusedcomm.local_steps import arguments, shards, state
from fusedcomm.local_steps.fragments import Fragment, cut
from fusedcomm.local_steps.messages import Messages, Pending
from fusedcomm.local_steps.plan import LocalPlan, make_plan
from fusedcomm.local_steps.rules import Outer, OuterMaker, average_state, merged, move
from fusedcomm.local_steps.stats import Drift, LocalStats
from fusedcomm.local_steps.weights import Weights
from fusedcomm.native import _C
from fusedcomm.session.session import Session

_KEPT_STEPS = 64


class LocalSteps:
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
        every: steps from one merge of a parameter to the next.
        delay: steps from snapshot to merge, below `every`. 0: the step waits for the merge. None: 5, or less where
            `every` or another argument demands it.
        merge: "corrected": x = z + (m̄ − y), so no step of this rank is lost or counts twice.
            "nesterov": `outer` moves m̄ against the mean difference; then as "corrected". With delay=0 this is DiLoCo.
            "blend": x = alpha·z + (1 − alpha)·m̄.
            "average": x = m̄, with delay=0.
        fragments: parts that have their turns one after another, `every` / fragments steps apart.
        config: a wire's name, or a :class:`fusedcomm.Config`. A wire's name has error feedback with decay 0.95 if it
            has scales; a Config has what it says. Ranks on several hosts have sums on two levels as in Config(hosts=…).
        outer: for "nesterov": a function that makes a torch optimizer of a list of fp32 parameters. None: SGD with
            Nesterov's momentum 0.9 and a learning rate by `every` and the number of ranks.
        alpha: for "blend"; None: 0.5.
        sparse: the fraction of blocks of 1024 elements that a merge has, 1/64 to 0.5; the blocks are dealt at random
            into 1 / sparse groups, which come by turns in random order. What the wire does not round, biases and norms
            with codes, is always merged. None: all.
        seed: of the blocks.
        weights: how ranks count in the mean. None: alike. "steps": by their steps. "given": by :meth:`add_weight`.
        state: the optimizer's state is "local", or its means over the ranks are taken at merges, "average" (delay=0),
            sent exactly.
        warmup: steps at the beginning whose gradients are averaged exactly, as DDP does.
        masters: the optimizer's own fp32 copies by the model's parameter names. They are merged, and the model's
            parameters are refreshed.
        moves: names of optimizer state that lies where the parameters lie, ("z",) of a schedule-free optimizer: a merge
            moves it as it moves the parameter.
        process_group: the ranks that merge; None: all. With FSDP2 inside hosts those that hold the same shard.
        members: for later versions; must be None.
        quiet: whether rank 0 does not report the plan.

    Raises:
        ValueError, TypeError: an argument is not possible; the text says what is.
        RuntimeError: the ranks do not agree (the same text on every rank), or the engine cannot run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        *,
        delay: int | None = None,
        merge: Merge = "corrected",
        fragments: int = 1,
        config: Config | Wire = "int4",
        outer: OuterMaker | None = None,
        alpha: float | None = None,
        sparse: float | None = None,
        seed: int = 0,
        weights: MergeWeights | None = None,
        state: MergedState = "local",
        warmup: int = 0,
        masters: Mapping[str, torch.Tensor] | None = None,
        moves: Sequence[str] = (),
        process_group: dist.ProcessGroup | None = None,
        members: object = None,
        quiet: bool = False,
    ) -> None:
        arguments.refuse_later(members)
        self.schedule = arguments.schedule(every, delay, merge, fragments, alpha, sparse, seed, weights, state, warmup)
        cfg = arguments.configuration(config, self.schedule.groups)
        group = dist.group.WORLD if process_group is None else process_group
        if outer is not None and merge != "nesterov":
            raise ValueError(f"outer=… is for merge='nesterov', not for merge={merge!r}: leave it out")
        problem: Exception | None = None
        self.outer: Outer | None = None
        self.fragments: list[Fragment] = []
        self._model, self._optimizer, self._moves = model, optimizer, tuple(moves)
        try:
            arguments.refuse_same_ranks(model, group)
            found = arguments.targets(model, optimizer, masters)
            shards.refuse_group([(name, target) for name, _, target in found], group)
            cfg.check_patterns([(name, parameter) for name, parameter, _ in found])
            self.fragments = cut(found, cfg, self.schedule)
            if merge == "nesterov":
                self.outer = Outer(self.fragments, outer, every, group.size())
        except (ValueError, TypeError) as error:
            problem = error  # the other ranks are told
        device = self.fragments[0].anchor.device if self.fragments else torch.device("cpu")
        self.session = Session(cfg, group, None, LocalOptions(), device, also_agree=self._record(), problem=problem)
        self._messages = Messages(self.session, {k: v for each in self.fragments for k, v in each.wires().items()})
        self.weights = Weights(weights, every, fragments)
        self.steps = self.turns = 0
        self.merges = [0] * fragments
        self.under_way: list[Pending] = []
        self._drift = Drift(self.session.rank)
        self._intervals: collections.deque[float] = collections.deque(maxlen=_KEPT_STEPS)
        self._last_step_at: float | None = None
        self._begin_equal()
        self._hooks = self._hook()
        if self.session.rank == 0 and shards.is_first(target for _, _, target in found):
            log.report(self.plan, quiet)

    def _record(self) -> dict[str, object]:
        return {
            **self.schedule.record(),
            "outer": None if self.outer is None else self.outer.record(),
            "moves": list(self._moves),
            "shards": {each.name: shards.place(each.target) for fragment in self.fragments for each in fragment.merged},
            "parameters": [
                [each.name, list(each.local.shape), str(each.target.dtype), each.wire, fragment.index]
                for fragment in self.fragments
                for each in fragment.merged
            ],
        }

    @torch.no_grad()
    def _begin_equal(self) -> None:
        """Gives every rank the first rank's parameters, which are the first merged state."""
        for fragment in self.fragments:
            if self.session.world_size > 1:
                dist.broadcast(fragment.anchor, group=self.session.process_group, group_src=0)
            fragment.write(fragment.anchor)

    def _hook(self) -> list[Any]:
        # The optimizer keeps this object alive, which need not be assigned to anything.
        hooks = [self._optimizer.register_step_post_hook(lambda *_: self._after_step())]
        if self.schedule.warmup:
            hooks.append(self._optimizer.register_step_pre_hook(lambda *_: self._before_step()))
        return hooks

    # ---- steps

    @torch.no_grad()
    def _before_step(self) -> None:
        if self.steps >= self.schedule.warmup:
            return
        for fragment in self.fragments:
            flat = torch.zeros_like(fragment.anchor)
            for each, view in zip(fragment.merged, fragment.views(flat), strict=True):
                if each.target.grad is not None:
                    view.copy_(shards.local(each.target.grad))
            self._messages.mean_of({f"gradients of fragment {fragment.index}": flat})
            for each, view in zip(fragment.merged, fragment.views(flat), strict=True):
                shards.set_gradient(each.target, view)

    @torch.no_grad()
    def _after_step(self) -> None:
        waited_s = self._messages.waited_s
        self.steps += 1
        after = self.steps - self.schedule.warmup
        if after <= 0:
            if after == 0:
                for fragment in self.fragments:
                    fragment.anchor.copy_(fragment.read())
            return
        self.weights.step()
        self._end_due()
        fragment, turn = self.schedule.turn(self.turns)
        if turn <= after:
            self._begin(self.fragments[fragment])
            self._end_due()
        self._time(waited_s)

    def _time(self, waited_s: float) -> None:
        now = time.perf_counter()
        if self._last_step_at is not None:
            self._intervals.append(now - self._last_step_at)
        # What was waited for in this step belongs to no interval.
        self._last_step_at = now
        if self._intervals:
            self._intervals[-1] -= self._messages.waited_s - waited_s

    def _end_due(self) -> None:
        while self.under_way and self.under_way[0].due <= self.steps:
            self._end(self.under_way[0])

    def _begin(self, fragment: Fragment, *, weight: float | None = None, is_finishing: bool = False) -> None:
        """Takes a fragment's snapshot, and hands its message to the engine. weight: None: as `weights` has it."""
        self._refuse_changed(fragment)
        number = self.merges[fragment.index]
        group = fragment.next_group(number, self.schedule.seed)
        own = fragment.gather(fragment.read().sub_(fragment.anchor), group)
        pending = Pending(
            fragment=fragment,
            group=group,
            number=number,
            began=self.steps,
            due=self.steps + self.schedule.delay,
            own=own,
            mean=own.clone(),
            future=None,
            control=torch.empty(0, dtype=torch.float32),
            checksum=fragment.checksum(),
        )
        if weight is None:
            weight = self.weights.take(fragment.index, self.session)
        self._messages.send(pending, weight, is_finishing)
        self.merges[fragment.index] += 1
        self.turns += 1
        self.under_way.append(pending)

    def _end(self, pending: Pending, is_final: bool = False) -> bool:
        """Waits for a message, and merges. Returns whether all ranks were in finish() when they sent theirs.

        is_final: the parameters become the merged state, whatever the rule.
        """
        fragment, group = pending.fragment, pending.group
        self._refuse_changed(fragment)
        self._arrive(pending)
        self.under_way.remove(pending)
        now, moved = move(fragment, group, pending.mean, self.outer)
        alpha = self.schedule.alpha if self.schedule.merge == "blend" else None
        flat = fragment.read()
        before = flat.clone() if self._moves else None
        if not is_final and (alpha is not None or pending.began != self.steps):
            # With no step since the snapshot, z is y: the corrected rule gives the merged state itself.
            now = merged(fragment.gather(flat, group), now, moved, pending.own, alpha)
        fragment.scatter(now, flat, group)
        fragment.write(flat)
        if before is not None:
            self._move_state(fragment, flat - before)
        if self.schedule.state == "average":
            self._average_state(fragment)
        return pending.all_finish

    def _arrive(self, pending: Pending) -> None:
        spread = self._messages.arrive(pending)
        if spread is not None:
            self._drift.add(pending.fragment.index, spread)

    def _move_state(self, fragment: Fragment, by: torch.Tensor) -> None:
        for each, view in zip(fragment.merged, fragment.views(by), strict=True):
            for key in self._moves:
                value = self._optimizer.state.get(each.target, {}).get(key)
                value = shards.local(value) if torch.is_tensor(value) else None
                if value is None or value.shape != view.shape:
                    raise ValueError(
                        f"fusedcomm: moves={self._moves!r}, and the optimizer's state of {each.name} has no {key!r} of "
                        f"its shape: it has {sorted(self._optimizer.state.get(each.target, {}))}"
                    )
                value.add_(view)

    def _average_state(self, fragment: Fragment) -> None:
        found = dict(average_state(self._optimizer, fragment))
        copies = {name: value.to(torch.float32, copy=True).contiguous() for name, value in found.items()}
        self._messages.mean_of(copies)
        for name, value in found.items():
            value.copy_(copies[name])

    def _refuse_changed(self, fragment: Fragment) -> None:
        shards.reshard(self._model)
        named = dict(self._model.named_parameters())
        held = {id(each) for group in self._optimizer.param_groups for each in group["params"]}
        cure = ": detach() this LocalSteps on every rank, and make another. No merge has been applied in part"
        for each in fragment.merged:
            found = named.get(each.name)
            what = (
                "is no longer in the model"
                if found is None
                else "has been replaced"
                if found is not each.parameter
                else "has been frozen"
                if not found.requires_grad
                else f"has become {each.target.dtype}"
                if each.target.dtype not in _C.GRAD_DTYPES
                else "is no longer in the optimizer"
                if id(each.target) not in held
                else ""
            )
            if what:
                raise RuntimeError(f"fusedcomm: rank {self.session.rank}: {each.name} {what}" + cure)
        known = {id(each.parameter) for other in self.fragments for each in other.merged}
        for name, parameter in named.items():
            if parameter.requires_grad and id(parameter) not in known:
                raise RuntimeError(
                    f"fusedcomm: rank {self.session.rank}: {name} has been added or thawed, and no merge has it" + cure
                )

    # ---- what the user calls

    def add_weight(self, amount: float) -> None:
        """Counts what this rank has done, tokens for example. For weights="given", before each step."""
        self.weights.add(amount)

    @torch.no_grad()
    def finish(self) -> None:
        """Ends all merges and makes a last one of all parameters: then they are equal on every rank. A collective call.

        Ranks may have made different numbers of steps: those that have ended take part in the merges of the others.
        Training may go on afterwards. Within the warm-up parameters are equal already, and this does nothing.
        """
        self._refuse_detached()
        if self.steps < self.schedule.warmup:
            return
        self._drain()
        all_finish = False
        while not all_finish:  # a message tells every rank alike, so all leave after the same one
            self._begin(self.fragments[self.schedule.turn(self.turns)[0]], is_finishing=True)
            all_finish = self._end(self.under_way[-1])
        turns = self.turns
        for fragment in self.fragments:
            weight = self.weights.take(fragment.index, self.session)
            for _ in range(fragment.num_groups):
                self._begin(fragment, weight=weight)
                self._end(self.under_way[-1], is_final=True)
        self.turns = turns

    def _drain(self) -> None:
        while self.under_way:
            self._end(self.under_way[0])

    @torch.no_grad()
    def state_dict(self) -> dict:
        """The state of this rank for a checkpoint, beside the model's, the optimizer's and the sampler's.

        Waits for messages under way, which are part of the state; so training goes on as if it had not been
        interrupted. Every rank saves its own, after the same step. To go on with another number of ranks, call
        :meth:`finish` first: each rank may then load any rank's.
        """
        self._refuse_detached()
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
        self._refuse_detached()
        for pending in self.under_way:
            self._messages.arrive(pending)
        state.load(self, saved)

    def plan(self, bits_s: float | None = None, step_s: float | None = None) -> LocalPlan:
        """What merges send, how long it takes, the smallest `every` and `delay` that hide it, and memory. Printable.

        Args:
            bits_s: of the line, in bits a second. None: as timed when this object was made.
            step_s: seconds of a step. None: as measured, if there were two.
        """
        if step_s is None and self._intervals:
            step_s = statistics.median(self._intervals)
        outer_nbytes = 0 if self.outer is None else self.outer.nbytes
        return make_plan(self.session, self.schedule, self.fragments, outer_nbytes, bits_s, step_s)

    def stats(self) -> LocalStats:
        """Counts and times of this rank."""
        counts, last = self.session.stats(), self._drift.last
        return LocalStats(
            steps=self.steps,
            merges=sum(self.merges) - len(self.under_way),
            under_way=len(self.under_way),
            sent_nbytes=counts.sent_nbytes,
            sent_between_hosts_nbytes=counts.sent_between_hosts_nbytes,
            waited_ms=1e3 * self._messages.waited_s,
            step_ms=1e3 * statistics.median(self._intervals) if self._intervals else None,
            drift=None if last is None else last.drift,
            agreement=None if last is None else last.agreement,
            nonfinite=counts.nonfinite,
        )

    def trace(self, path: str | os.PathLike, all_ranks: bool = False) -> contextlib.AbstractContextManager[None]:
        """Records the model's passes and the merges' stages; see :meth:`fusedcomm.Handle.trace`."""
        self._refuse_detached()
        return self.session.recorder.record(path, all_ranks, self._model)

    def detach(self) -> None:
        """Stops merging; what is under way is dropped. Call :meth:`finish` before. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.under_way.clear()
        self.session.stop("LocalSteps was detached")

    def _refuse_detached(self) -> None:
        if not self._hooks:
            raise RuntimeError("fusedcomm: this LocalSteps is detached: make another one")
