"""The reducer behind a distributed optimizer: a native GradReducer whose passes are steps."""

import dataclasses
import datetime
import functools
import gc
import itertools
import json
import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.config import Config, LocalOptions
from fusedcomm.horovod.checks import OP_NAMES, Sum
from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.process_sets import ProcessSet, members_of
from fusedcomm.horovod.world import World, world, world_if_any
from fusedcomm.native import _C
from fusedcomm.ranks.errand import Errand
from fusedcomm.ranks.own_group import OwnGroup
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.session.parameters import NamedParameter, bucket_caps, numbered, strides_to_agree
from fusedcomm.session.session import Session

Groups = int | list[list[torch.Tensor]] | None

_MIB = 1 << 20
_NO_TIMEOUT = datetime.timedelta(days=365)
"""A slow rank is no error: watches report stalls, and notice lost ranks."""
_living: "weakref.WeakSet[StepReducer]" = weakref.WeakSet()
_numbers = itertools.count()


def error_of(failure: str) -> HorovodInternalError:
    """The error of a reducer that fails so, with what users of an optimizer are to do."""
    ours, theirs = "Then call detach() and make a new GradReducer", "Then make a new hvd.DistributedOptimizer"
    return HorovodInternalError(failure.replace(ours, theirs))


@dataclasses.dataclass(frozen=True)
class Options:
    """What stays of the arguments of DistributedOptimizer(). All ranks must have them equal."""

    compression: Any
    op: int
    predivide: float
    groups: Groups
    sparse_as_dense: bool
    process_set: ProcessSet


class StepReducer:
    """Reduces the gradients of `named` over the ranks of a process set. It has hooks on the parameters at once, and
    ranks from :meth:`open` on. Between two inits it has none.

    named: names and parameters, floating-point or complex, on one device.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        config: Config,
        options: Options,
        passes: int,
        refuse: Any,
    ) -> None:
        self._config, self._options = config, options
        # Ranks may have them in another order.
        ordered = [NamedParameter(name, tensor, 0) for name, tensor in sorted(named, key=lambda pair: pair[0])]
        self._parameters = numbered(ordered, config)
        self._in_order = [name for name, _ in named]
        first, usual = bucket_caps(max(world().settings.fusion_nbytes, 1) / _MIB)
        self.native = _C.GradReducer(
            synchronizer=None,
            parameters=[(p.tensor, p.name, False) for p in self._parameters],
            first_bucket_nbytes=first,
            bucket_nbytes=usual,
            find_unused=False,
            store=None,
            say=_say,
            steps=_C.ReducerSteps(
                passes=passes,
                sums=options.op == Sum,
                sends_dense=options.sparse_as_dense,
                refuse=refuse,
                failure_of_job=_failure_of_job,
            ),
        )
        # Two threads may open two of them at once; see join_all().
        self.purpose = f"optimizers/{zlib.crc32(json.dumps([p.name for p in self._parameters]).encode())}"
        self.number = next(_numbers)
        self.session: Session | None = None
        self._world: World | None = None
        _living.add(self)

    @property
    def has_ranks(self) -> bool:
        """Whether :meth:`open` has been called since the last hvd.init()."""
        return self._world is not None and self._world is world_if_any()

    def open(self) -> None:
        """Connects the ranks, if they are not connected. A collective call then.

        Raises HorovodInternalError if the ranks do not agree, or the job has failed, and ValueError if the process set
        is not in use.
        """
        found = world()
        if found.order.failure:
            raise HorovodInternalError(found.order.failure)
        if self.has_ranks:
            return
        self.leave("the job has other ranks")
        device = next((p.tensor.device for p in self._parameters), torch.device("cpu"))
        groups = self._options.groups
        if isinstance(groups, list):  # the same parameters have the same names on every rank
            name_of = {id(p.tensor): p.name for p in self._parameters}
            groups = [sorted(name_of[id(each)] for each in members if id(each) in name_of) for members in groups]
        agreed = {
            "op": OP_NAMES[self._options.op],
            "groups": groups,
            "sparse_as_dense": self._options.sparse_as_dense,
            "strides": strides_to_agree([(p.name, p.tensor) for p in self._parameters]),
        }
        session = None
        try:
            session = Session(
                self._config,
                group_for(found, self._options.process_set, device, self.purpose),
                self._parameters,
                LocalOptions(),
                device,
                also_agree={"optimizer": agreed},
            )
            # The order of the set's first rank is that of all.
            in_order = session.gather("order", None if session.rank else self._in_order, "hvd.DistributedOptimizer")[0]
        except RuntimeError as error:
            if session is not None:
                session.stop("the ranks have not agreed on the order of parameters")
            raise HorovodInternalError(str(error)) from error
        if isinstance(groups, int):
            trained = {p.name for p in self._parameters if p.tensor.requires_grad}
            groups = split_list([name for name in in_order if name in trained], groups)
        number_of = {name: i for i, names in enumerate(groups or []) for name in names}
        place_of = {name: i for i, name in enumerate(in_order)}
        # Gradients arrive from the model's end to its beginning.
        order = sorted(range(len(self._parameters)), key=lambda i: -place_of[self._parameters[i].name])
        self.native.set_layout(group_of=[number_of.get(p.name, -1) for p in self._parameters], order=order)
        self.native.set_ranks(session.synchronizer, session.store("optimizer"))
        self.session, self._world = session, found

    def end_step(self) -> None:
        """Ends the step; see reducer.h. Opens, if the ranks are not connected.

        Raises HorovodInternalError if the ranks disagree or one is lost. The ranks are not connected then.
        """
        self.open()
        self._call(self.native.end_step)

    def agree_on_number(self, num_parameters: int) -> None:
        """Call it before this object is replaced by one with as many parameters. Errors: see :meth:`end_step`."""
        if self.has_ranks:
            self._call(lambda: self.native.agree_on_number(num_parameters))

    def join(self) -> None:
        """Takes part in the other ranks' steps, with zeros, until every rank has called this."""
        self.open()
        while self._call(self.native.end_step_without_gradients):
            pass

    def _call(self, function: Any) -> Any:
        try:
            return function()
        except RuntimeError as error:
            self.leave("a step has failed")
            raise error_of(str(error)) from error

    def leave(self, reason: str) -> None:
        """Forgets the step and the ranks; sums under way fail with `reason`. Idempotent."""
        session, self.session, self._world = self.session, None, None
        self.native.leave_ranks()
        if session is not None:
            session.stop(reason)

    def end(self) -> None:
        """Takes the hooks away."""
        self.leave("the optimizer was replaced")
        self.native.detach()
        _living.discard(self)


def group_for(found: World, process_set: ProcessSet, device: torch.device, purpose: str) -> OwnGroup:
    """The ranks of a process set, for sessions of one purpose. Every member makes them in the same order. Raises
    ValueError if the set is not in use or this rank is not in it."""
    members = members_of(process_set)
    backends = {each.type: members.backend(each, purpose, _NO_TIMEOUT) for each in (torch.device("cpu"), device)}
    store = dist.PrefixStore(f"{purpose}/{process_set.process_set_id}", found.store)
    return OwnGroup(store, members.rank, members.size, _NO_TIMEOUT, backends, found.rank)


def split_list(values: list, num_parts: int) -> list[list]:
    """Parts as equal as possible, the first ones longer."""
    short, num_longer = divmod(len(values), num_parts)
    bounds = [i * short + min(i, num_longer) for i in range(num_parts + 1)]
    return [values[begin:end] for begin, end in itertools.pairwise(bounds)]


def leave_all(reason: str) -> None:
    """The job has ended: no optimizer has ranks."""
    for each in list(_living):
        each.leave(reason)


def join_all() -> None:
    """Takes part in the steps of every optimizer until all ranks have called this. Raises the first error."""
    gc.collect()  # an optimizer that nothing refers to may be gone on another rank
    of_purpose: dict[str, list[StepReducer]] = {}
    for each in sorted(_living, key=lambda each: each.number):
        if each.native.is_on:
            of_purpose.setdefault(each.purpose, []).append(each)
    if not of_purpose:
        return

    def join(alike: list[StepReducer]) -> None:
        """Those of one purpose connect in the order in which they were made, as they do where they step."""
        joined = []
        for each in alike:
            each.open()
            joined.append(Errand(each.join))
        for each in joined:
            each.future.result()

    # Other ranks may step with any of them next, so each has a thread.
    for each in [Errand(functools.partial(join, alike)) for alike in of_purpose.values()]:
        each.future.result()


def _failure_of_job() -> str:
    found = world_if_any()
    return "" if found is None else found.order.failure


def _say(notices: Sequence[str]) -> None:
    for text in notices:
        warn_alone(text, stacklevel=3)
