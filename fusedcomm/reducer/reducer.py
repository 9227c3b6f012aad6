"""``fusedcomm.GradReducer``: averages gradients over the ranks, without DistributedDataParallel."""

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fusedcomm import env, log
from fusedcomm.autotune.auto import ConfigLike, chosen
from fusedcomm.autotune.tuner import EXACT, Tuner
from fusedcomm.config import AUTO, Config, LocalOptions, check, combinations, local_options
from fusedcomm.members.members import Members
from fusedcomm.members.training.passes import Training
from fusedcomm.native import _C
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.reducer.before_step import ignore_steps, watch_steps
from fusedcomm.reducer.parameters import (
    USUAL_BUCKET_MIB,
    ids_of_sparse,
    ignored_names,
    named_tensors,
    refuse,
    refuse_with_members,
    tensors_of,
)
from fusedcomm.session.compare import ParameterDifference
from fusedcomm.session.handle import CommHandle
from fusedcomm.session.parameters import (
    ParameterWatch,
    bucket_caps,
    device_of,
    strides_to_agree,
    synchronized_parameters,
)
from fusedcomm.session.plan import BucketsPlan
from fusedcomm.session.served import Place, serve
from fusedcomm.session.session import Session
from fusedcomm.session.state_dict import take_over
from fusedcomm.session.stats import Stats

_FIRST_PAUSE_S, _PAUSE_S = 1e-4, 0.5
"""Seconds between two looks of :meth:`GradReducer.wait_for`, at first and later. Only the later ones ask the store."""

_of_modules: "weakref.WeakKeyDictionary[nn.Module, GradReducer]" = weakref.WeakKeyDictionary()
"""A module keeps its reducer alive."""


class GradReducer(CommHandle):
    """Averages the gradients of parameters over the ranks while the backward pass runs.

    ::

        reducer = fusedcomm.GradReducer(model, "bf16")
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()  # returns when the gradients are means over the ranks
            optimizer.step()

    Make it on every rank, when the model has its dtype and its device. It does not change parameters: begin with equal
    ones on every rank.

    Gradients are packed where they lie, and the means are written to the same place, so no copy of them is kept. A
    gradient is copied only if its memory has gaps or another order than the parameter's, if something else uses its
    memory, too, or if this rank has not used a parameter that another rank may have used.

    Args:
        module_or_named_parameters: a module that is not wrapped in DistributedDataParallel, or pairs of names and
            parameters. A module keeps this object alive; otherwise keep it, because its hooks end with it. Sparse
            gradients need the module. What its ``_ddp_params_and_buffers_to_ignore`` names is left out, as in DDP.
        config: a wire's name, a :class:`fusedcomm.Config`, or "auto"; see
            :func:`fusedcomm.autotune.auto.chosen`.
        bucket_mib: a bucket is complete when it has this many MiB of gradients. The first has 1 MiB if that is less.
        process_group: None: the default group. Over gloo for parameters on cpu, over NCCL on one cuda device.
        find_unused_parameters: whether backward passes may leave out parameters. If no rank has used a parameter, its
            gradient stays as it was. If some have, the others count as zeros, and all get the mean. Costs one small
            message at the end of each backward pass.
        local: a :class:`fusedcomm.LocalOptions`: options that may differ from rank to rank.
        quiet: whether rank 0 does not report the plan; see :func:`fusedcomm.attach`.
        members: a :class:`fusedcomm.Members`: ranks may be lost and may join while training runs. Takes the place of
            `process_group`.

    Raises:
        TypeError: the first argument is neither a module nor pairs of names and parameters, or is a
            DistributedDataParallel, or `config` is of another type.
        ValueError: an argument is out of range, or something else synchronizes one of the parameters.
        RuntimeError: the gradients are on several devices, fusedcomm has no path for the device or backend, or the
            ranks do not agree (the same text on every rank).

    An optimizer's step raises RuntimeError on every rank if parameters were replaced, or given another dtype or device,
    since this object was made. ``backward()`` raises it on every rank if a rank cannot go on: the text names the
    rank and the reason, for example the parameters that got no gradient. The gradients are not valid then. Call
    :meth:`detach`, and make a new object to go on.

    Attributes:
        native: the native reducer, for fusedcomm itself.
    """

    _kind = "GradReducer"
    _anew = "make a new GradReducer"
    _shows: tuple[str, ...] = ("no_sync",)
    serves_as = "a fusedcomm.GradReducer"
    place: Place = "alone"
    was_taken_over = False
    """Whether a newer DataParallel has the parameters."""

    def __init__(
        self,
        module_or_named_parameters: nn.Module | Iterable[tuple[str, torch.Tensor]],
        config: ConfigLike | None = None,
        *,
        bucket_mib: float = USUAL_BUCKET_MIB,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        local: LocalOptions | None = None,
        quiet: bool = False,
        members: Members | None = None,
        _also_agree: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        if members is None and process_group is None and not dist.is_initialized():
            chosen(config, "GradReducer")  # a configuration that is not possible is said first: ranks would not help
            raise RuntimeError("fusedcomm.GradReducer needs ranks: call torch.distributed.init_process_group first")
        cfg = EXACT
        options, more, problem = LocalOptions(), {}, None
        is_search, named, sparse, parameters, caps = False, [], set(), [], [0]
        try:
            more = _also_agree()  # of a DataParallel: its checks, and what else must be equal on all ranks
            check.positive("bucket_mib", bucket_mib, "a number of MiB greater than 0")
            caps = bucket_caps(bucket_mib)
            check.flag("find_unused_parameters", find_unused_parameters)
            wanted, options = chosen(config, "GradReducer"), local_options(local)
            is_search, cfg = wanted == AUTO, wanted if isinstance(wanted, Config) else EXACT
            named, sparse = named_tensors(module_or_named_parameters), ids_of_sparse(module_or_named_parameters)
            if members is not None:
                given = {"members": members, "process_group": process_group, "config": AUTO if is_search else None}
                combinations.refuse("Members", {**given, "find_unused_parameters": find_unused_parameters})
                refuse_with_members(named, sparse, members)
        except (TypeError, ValueError, RuntimeError) as error:  # perhaps of this rank alone: the session tells others
            if members is not None:
                raise
            problem = error
        try:
            refuse(named)
            parameters = synchronized_parameters(named, cfg)
        except (RuntimeError, ValueError) as error:
            problem = problem or error
        quiet = quiet or env.quiet()
        agreed: dict[str, object] = {
            "reducer": {
                "bucket_mib": bucket_mib,
                "find_unused_parameters": find_unused_parameters,
                "sparse": sorted(name for name, tensor in named if id(tensor) in sparse),
                "strides": strides_to_agree(named),
            },
            **more,
        }
        device = device_of(named)
        runs: Session | Tuner | Training
        if members is not None:
            model = tensors_of(module_or_named_parameters, named)
            runs = Training(members, cfg, parameters, options, device, agreed, model)
            runs.begin(problem)
        else:
            on = process_group or dist.group.WORLD, parameters, options, device, not quiet
            how: dict[str, Any] = {"also_agree": agreed, "problem": problem}
            if is_search:
                runs = Tuner(*on, **how, has_off=False, caps=lambda: caps)
            else:
                runs = Session(cfg, *on, **how)
        super().__init__(runs)
        self._bucket_caps = caps
        self._store, self._num_meetings = self.session.store("reducer"), 0
        # Gradients arrive from the model's end to its beginning.
        backwards = [(p.tensor, p.name, id(p.tensor) in sparse) for p in reversed(parameters)]
        self.native = self._made_native(backwards, find_unused_parameters)
        if not isinstance(runs, Session):
            runs.start(self.native)
        self._sparse = sparse
        self._end_owner: Callable[[], None] | None = None
        self._prepared = False  # whether prepare_for_backward() announced a pass; see DdpReducer
        watch_steps(self)
        self._keep_with(module_or_named_parameters)
        serve(self)
        self._seal()
        if self.session.rank == 0:
            log.report(self.plan, quiet)

    def _made_native(self, backwards: list[tuple], find_unused: bool) -> "_C.GradReducer":
        return _C.GradReducer(
            synchronizer=self.session.synchronizer,
            parameters=backwards,
            first_bucket_nbytes=self._bucket_caps[0],
            bucket_nbytes=self._bucket_caps[1],
            find_unused=find_unused,
            store=self._store,
            say=_say,
        )

    def _keep_with(self, module: object) -> None:
        """A module keeps this object alive, and is asked for its parameters."""
        self._module_of: Callable[[], nn.Module | None] = lambda: None
        self._watch: ParameterWatch | None = None
        if isinstance(module, nn.Module):
            _of_modules[module] = self
            self._module_of = weakref.ref(module)
            self._watch, self._ignored = ParameterWatch(module), ignored_names(module)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes add up gradients on this rank.

        The next backward pass outside synchronizes the sums. Only ``backward()`` needs to be within the block. Enter it
        on every rank.
        """
        self.refuse_detached("nothing is synchronized")
        self.note_passes()
        before, self.native.is_on = self.native.is_on, False
        try:
            yield
        finally:
            self.native.is_on = before and self._attached

    def plan(self) -> BucketsPlan:
        """How each bucket is sent; see :meth:`fusedcomm.Handle.plan`. Raises RuntimeError after detach()."""
        self.refuse_detached("nothing is sent")
        return self._plan()

    def stats(self) -> Stats:
        """Counts and times of this rank; see :meth:`fusedcomm.Handle.stats`."""
        runs = self.runs
        return dataclasses.replace(super().stats(), changes=runs.changes if isinstance(runs, Training) else ())

    def _compared(self) -> ParameterDifference | None:
        runs = self.runs
        return runs.compare_parameters() if isinstance(runs, Training) else super()._compared()

    # ---- for a ShardedOptimizer

    @property
    def has_owner(self) -> bool:
        """Whether a ShardedOptimizer takes the gradients."""
        return self._end_owner is not None

    @property
    def bucket_nbytes(self) -> int:
        """At so many bytes of gradients a bucket is complete, the first one perhaps before."""
        return self._bucket_caps[-1]

    def meet(self, what: str, problem: str = "", within_step: bool = False) -> None:
        """Returns once every rank has called this between the same backward passes. A collective call.

        Raises RuntimeError, with the same text on every rank, if a rank has a `problem`, or as :meth:`wait_for`, also
        if a rank is in torch.distributed's barrier() in place of this call. Arguments as there.
        """
        session = self.session
        self._num_meetings += 1
        meeting = f"meeting/{self._num_meetings}"
        self._store.set(f"{meeting}/{session.rank}", problem)
        # It also ends if another rank's barrier is the user's.
        self.wait_for(dist.barrier(session.process_group, async_op=True), what, within_step)
        problems = {}
        for rank in range(session.world_size):
            if not self._store.check([f"{meeting}/{rank}"]):
                self._refuse_alone(what, f"{rank}, which called torch.distributed.barrier() in its place")
            problems[rank] = _text(self._store, f"{meeting}/{rank}")
        for rank, text in problems.items():
            if text:
                raise RuntimeError(f"fusedcomm: {what} on rank {rank}: {text}")

    def wait_for(self, work: dist.Work, what: str, within_step: bool) -> None:
        """Waits for a collective of the reducer's group. Raises RuntimeError, with the same text on every rank, if a
        rank waits in the next backward pass instead, or in the step that this rank is within.

        Args:
            what: the user's call that needs all ranks, for reports.
            within_step: whether an optimizer's step must follow before the next backward pass.
        """
        own = self.native.num_passes
        places = [("pass", own, "backward pass")]
        places += [("step", own - 1, "step() after backward pass")] if within_step else []

        def wait() -> None:
            pause_s = _FIRST_PAUSE_S
            while not work.is_completed():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S)
                if pause_s == _PAUSE_S:
                    self.native.check()
                    look()
            work.wait()

        def look() -> None:
            for rank in range(self.session.world_size):
                for key, first, where in places:
                    at = int(_text(self._store, f"{key}/{rank}") or -1)
                    if at >= first and not work.is_completed():
                        self._refuse_alone(what, f"{rank}, which waits in {where} {at}")

        with self.session.calling(what):
            self.session.peers.call(wait, f"in {what}", is_watched=True)

    def note_step(self) -> None:
        """Call it while an optimizer's step waits for other ranks: those in :meth:`wait_for` then know where it is."""
        self._store.set(f"step/{self.session.rank}", str(self.native.num_passes - 1))
        self.native.check()

    def _refuse_alone(self, what: str, where: str) -> None:
        """As native.refuse(), with the same text on all ranks that find a problem at once."""
        why = (
            f"fusedcomm: rank {self.session.rank} of {self.session.world_size}: {what}, a collective call, was made "
            f"here and not on rank {where}. Call it on every rank, between the same backward passes; what it returns "
            "may be saved on one rank"
        )
        first = self._store.compare_set("problem", "", why).decode()
        self.native.check()
        raise RuntimeError(first)

    def has_sparse_gradient(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter's gradient is sparse."""
        return id(parameter) in self._sparse

    def give_to(
        self,
        session: Session,
        begin: Callable[[], int],
        why_unequal: Callable[[], str],
        take: Callable[[list[int], list[torch.Tensor]], None],
        end: Callable[[list[int]], None],
        detach: Callable[[], None],
    ) -> None:
        """Gives gradients to an optimizer, which sums them with `session`; see Taker in reducer.h. `session` takes over
        what the reducer's session was given."""
        take_over(session, self.session)
        self.native.give_to(begin=begin, why_unequal=why_unequal, take=take, end=end)
        self.native.set(session.synchronizer)
        self._runs, self._end_owner = session, detach

    def _let_go(self) -> None:
        if self._end_owner is not None:
            end, self._end_owner = self._end_owner, lambda: None  # the optimizer is not kept
            end()
        # Backward passes leave gradients as they are on each rank from now on.
        ignore_steps(self)
        self.native.detach()
        for module in [module for module, reducer in _of_modules.items() if reducer is self]:
            del _of_modules[module]

    def _caps(self) -> list[int] | None:
        return None if self.has_owner else self._bucket_caps

    def _described(self) -> str:
        session = self.session
        return (
            f"wire {session.config.wire}, {session.world_size} ranks, {len(session.parameters)} parameters, "
            f"{session.synchronizer.step} steps"
        )

    def parameters_now(self) -> list[torch.Tensor]:
        """The parameters that this object was given."""
        return [p.tensor for p in self.session.parameters]

    # ---- for DataParallel and optimizers' steps

    def prepare(self) -> None:
        """Announces a synchronized backward pass; the gradients must then come to this object."""
        self._prepared = True
        self.native.turn_on_once()

    def why_local(self) -> str:
        """Why gradients of this rank are not synchronized although they should be; empty if all is well."""
        unknown = {} if self._watch is None else self._watch.unknown()
        for name in unknown:
            if name in self._ignored:
                continue
            return (
                f"the parameter {name} is not the one that the reducer was given, so its gradient would not be "
                "synchronized: load_state_dict(assign=True) puts others in the place of parameters, and a module may "
                "have been replaced or added. Make the GradReducer or DataParallel again, on every rank"
            )
        if self._prepared and self.native.waits_for_pass():
            return (
                "the last backward pass was prepared with prepare_for_backward() and brought no gradients to the "
                "reducer, so they are those of this rank. Schedules that compute the gradients of weights apart, as "
                "zero-bubble schedules do, bypass it, as they bypass DDP: take GPipe, 1F1B or Interleaved1F1B"
            )
        self._prepared = False
        return self.native.lost_parameter()

    def parameters_of_module(self) -> list[torch.Tensor]:
        """Those of the module as it is now; without a module, those that were given."""
        module = self._module_of()
        return self.parameters_now() if module is None else list(module.parameters())


def _text(store: dist.Store, key: str) -> str:
    """The text of a key; empty if the key is not set."""
    return store.get(key).decode() if store.check([key]) else ""


def release(module: nn.Module) -> None:
    """Makes the module's GradReducer live only as long as its other owners."""
    _of_modules.pop(module, None)


def _say(notices: list[str]) -> None:
    """Warns. The native reducer calls it at the end of a backward pass that has something to say."""
    for text in notices:
        warn_alone(text, stacklevel=3)
