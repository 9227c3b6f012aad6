"""LocalSteps: trains locally, and merges the ranks' parameters every few steps while training goes on."""

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusedcomm import log
from fusedcomm.config import Config, LocalOptions, Wire
from fusedcomm.local_steps import arguments, checkpoint, shards
from fusedcomm.local_steps.merged_state import MergedState, begin_equal, record, refuse_changed
from fusedcomm.local_steps.merges import Merges
from fusedcomm.local_steps.messages import Messages
from fusedcomm.local_steps.plan import LocalPlan, make_plan
from fusedcomm.local_steps.stats import LocalStats, collect
from fusedcomm.local_steps.windows import Window
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

    A snapshot y of the parameters is taken, and its difference from the merged state m, which all ranks share, is sent.
    Training goes on for `delay` steps to z; then the ranks' mean m̄ becomes the merged state, and the parameters are
    z + (m̄ − y), so no step of this rank is lost or counts twice.

    Args:
        model: the module; or, with ranks of a host that average gradients, a DistributedDataParallel or a module of
            FSDP2's over them. What requires gradients now is merged; of a DTensor the rank's own shard.
        optimizer: any torch optimizer that holds these parameters. It is not wrapped; its steps are followed by a hook.
        every: steps from one merge to the next; or a time, "20s": a merge begins at each rank's first
            step after 20 seconds since the last message arrived, so each rank makes the steps that it can, and weighs
            as many in the mean.
        delay: steps from snapshot to merge, below `every`. 0: the step waits for the merge, as local SGD does. None: 5,
            or less where `every` demands it. Where `every` is a time, the next merge ends it earlier.
        config: a wire's name, or a :class:`fusedcomm.Config`. Ranks on several hosts have sums on two levels as in
            Config(hosts=…).
        process_group: the ranks that merge; None: all. With FSDP2 inside hosts those that hold the same shard.
        quiet: whether rank 0 does not report the plan.

    Raises:
        ValueError, TypeError: an argument is not possible, or another front end serves a parameter; the text says it.
        RuntimeError: the ranks do not agree (the same text on every rank), or the engine cannot run.
    """

    _shows: tuple[str, ...] = ("finish", "load_state_dict", "plan", "state_dict", "stats", "trace")
    _kind = serves_as = "LocalSteps"
    _hooks: Sequence[Any] = ()

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int | str,
        *,
        delay: int | None = None,
        config: Config | Wire = "int4",
        process_group: dist.ProcessGroup | None = None,
        quiet: bool = False,
    ) -> None:
        schedule = arguments.schedule(every, delay)
        arguments.refuse_mates(every, model)
        cfg = arguments.configuration(config)
        group = dist.group.WORLD if process_group is None else process_group
        self.place: Place = "across hosts" if isinstance(model, nn.Module) and shards.has_mates(model) else "alone"
        problem: Exception | None = None
        self._model, self._optimizer = model, optimizer
        try:
            found = arguments.merged_parameters(model, optimizer)
            arguments.refuse_same_ranks(model, group)
            shards.refuse_group(found, group)
            refuse_served(found, self.serves_as, self.place, hooks=self.place == "alone")
            cfg.check_patterns(found)
        except (ValueError, TypeError) as error:
            problem, found = error, []  # the other ranks are told
        state = MergedState(found, cfg)
        device, seconds = state.anchor.device, schedule.seconds
        window = None if seconds is None else Window(str(every), seconds)
        self.session = Session(
            cfg,
            group,
            None,
            LocalOptions(),
            device,
            also_agree={**schedule.record(), **record(state)},
            shares_communicator=False,
            problem=problem,
        )
        messages = Messages(self.session, state, window)
        self.merges = Merges(schedule, state, messages, window, self._refuse_changed)
        begin_equal(state, self.session)
        if window is not None:
            window.begin()
        self._hooks = self._hook()
        serve(self)
        self._seal()
        if self.session.rank == 0 and shards.is_first(parameter for _, parameter in found):
            log.report(self.plan, quiet)

    def served(self) -> list[torch.Tensor]:
        """See :class:`fusedcomm.session.served.Server`."""
        return [each.parameter for each in self.merges.state.merged] if self._hooks else []

    @property
    def is_attached(self) -> bool:
        """Whether merges follow the optimizer's steps; False after :meth:`detach`."""
        return bool(self._hooks)

    def _described(self) -> str:
        how = f"wire {self.session.config.wire}, a merge every {self.merges.schedule.period}"
        return f"{how}, {self.session.world_size} ranks, {self.merges.steps} steps"

    def _refuse_changed(self) -> None:
        refuse_changed(self.merges.state, self._model, self._optimizer, self.session.rank)

    def _hook(self) -> list[Any]:
        # The optimizer keeps this object alive, which need not be assigned to anything.
        return [self._optimizer.register_step_post_hook(lambda *_: self._after_step())]

    # ---- steps

    @torch.no_grad()
    def _after_step(self) -> None:
        self._refuse_ended()
        self.merges.after_step()

    # ---- what the user calls

    @torch.no_grad()
    def finish(self) -> None:
        """Ends all merges and averages all parameters: then they are equal on every rank. A collective call.

        Ranks may have made different numbers of steps: those that have ended take part in the merges of the others.
        Training may go on afterwards.
        """
        self._refuse_ended()
        self.merges.finish()

    @torch.no_grad()
    def state_dict(self) -> dict:
        """The state for a checkpoint, beside the model's, the optimizer's and the sampler's, after :meth:`finish`.

        A run that loads it on as many ranks, each its own, has the bits of the one that saved it and went on. On
        another number of ranks each may load any rank's. Raises RuntimeError if steps were made since :meth:`finish`.
        """
        self._refuse_unfinished("saving")
        return checkpoint.save(self.merges, self.session)

    @torch.no_grad()
    def load_state_dict(self, saved: dict) -> None:
        """Restores what :meth:`state_dict` returned. Load the model and the optimizer before it.

        Raises ValueError if the state is of another schedule or wire, or the model is not the one saved with it, and
        RuntimeError if steps were made since :meth:`finish`. Nothing has changed then.
        """
        self._refuse_unfinished("loading a state")
        checkpoint.load(self.merges, self.session, saved)

    def _refuse_unfinished(self, what: str) -> None:
        self._refuse_ended()
        if steps := self.merges.steps - self.merges.finished_at:
            raise RuntimeError(f"fusedcomm: LocalSteps has made {steps} steps: call finish() before {what}")

    def plan(self) -> LocalPlan:
        """What merges send, and the memory that they need. Printable."""
        return make_plan(self.session, self.merges)

    def stats(self) -> LocalStats:
        """Counts and times of this rank."""
        return collect(self.merges, self.session.stats())

    def trace(self, path: str | os.PathLike) -> contextlib.AbstractContextManager[None]:
        """Records the merges' stages; see :meth:`fusedcomm.Handle.trace`."""
        self._refuse_ended()
        return self.session.trace(path)

    @torch.no_grad()
    def detach(self) -> None:
        """Stops merging; what is under way is dropped. Call :meth:`finish` before. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.merges.under_way = None
        self.session.stop("LocalSteps was detached")

    def _refuse_ended(self) -> None:
        self.refuse_detached("nothing is merged")
