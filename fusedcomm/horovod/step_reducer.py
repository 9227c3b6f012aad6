"""The reducer behind a distributed optimizer: a native GradReducer whose passes are steps."""

import dataclasses
import datetime
import functools
import gc
import itertools
import json
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fusedcomm.config import Config, LocalOptions
from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.process_sets import ProcessSet
from fusedcomm.horovod.world import World, world, world_if_any
from fusedcomm.native import _C
from fusedcomm.ranks import torch_groups
from fusedcomm.ranks.own_group import OwnGroup
from fusedcomm.ranks.peers import warn_alone
from fusedcomm.session.parameters import NamedParameter, bucket_caps, numbered, strides_to_agree
from fusedcomm.session.session import Session
from fusedcomm.session.weights import give

if TYPE_CHECKING:
    from fusedcomm.horovod.reduced_optimizer import Groups

_MIB = 1 << 20
_OF_THE_REDUCER = (
    ("Then call detach() and make a new GradReducer", "Then make a new hvd.DistributedOptimizer"),
    ("comm.weight", "optimizer.weight"),
)
"""What the reducer's errors tell its own users to do, and what they tell those of an optimizer."""
_NO_TIMEOUT = datetime.timedelta(days=365)
"""A slow rank is no error: watches report stalls, and notice lost ranks."""
_living: "weakref.WeakSet[StepReducer]" = weakref.WeakSet()
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Options:
    """What all ranks must have equal, but for `is_checked`; see DistributedOptimizer()."""

    config: Config
    is_sum: bool
    groups: "Groups"
    sparse_as_dense: bool
    is_checked: bool


class StepReducer:
    """Reduces the gradients of `named` over the ranks of a process set. It has hooks on the parameters at once, and
    ranks from :meth:`open` on. Between two inits it has none.

    named: names and parameters, floating-point or complex, on one device.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        options: Options,
        process_set: ProcessSet,
        every: int,
        refuse: Any,
    ) -> None:
        self._options, self._set = options, process_set
        # Ranks may have them in another order.
        ordered = [NamedParameter(name, tensor, 0) for name, tensor in sorted(named, key=lambda pair: pair[0])]
        self._parameters = numbered(ordered, options.config)
        self._in_order = [name for name, _ in named]
        first, usual = bucket_caps(max(world().settings.fusion_nbytes, 1) / _MIB)
        self.native = _C.GradReducer(
            synchronizer=None,
            parameters=[(p.tensor, p.name, False) for p in self._parameters],
            first_bucket_nbytes=first,
            bucket_nbytes=usual,
            find_unused=False,
            every=every,
            store=None,
            say=_say,
            steps=_C.ReducerSteps(
                sums=options.is_sum,
                sends_dense=options.sparse_as_dense,
                checks_changes=options.is_checked,
                refuse=refuse,
                failure_of_job=_failure_of_job,
            ),
        )
        # Two threads may open two of them at once; see join_all().
        self.purpose = f"optimizers/{zlib.crc32(json.dumps([p.name for p in self._parameters]).encode())}"
        self.number = next(_numbers)
        self.session: Session | None = None
        self.weight: float | None = None  # of this rank, also with other ranks
        self._world: World | None = None
        _living.add(self)

    @property
    def has_ranks(self) -> bool:
        """Whether :meth:`open` has been called since the last hvd.init()."""
        return self._world is not None and self._world is world_if_any()

    def open(self) -> None:
        """Connects the ranks, if they are not connected. A collective call then.

        Raises HorovodInternalError if the ranks do not agree, or the job has failed.
        """
        found = world()
        if found.order.failure:
            raise HorovodInternalError(found.order.failure)
        if self.has_ranks:
            return
        self.leave("the job has other ranks")
        device = next((p.tensor.device for p in self._parameters), torch.device("cpu"))
        group = group_for(found, self._set, device, self.purpose)
        of_first = self._order_of_first(group)
        groups = self._groups_of_all(of_first)
        agreed = {
            "op": "Sum" if self._options.is_sum else "Average",
            "groups": groups,
            "sparse_as_dense": self._options.sparse_as_dense,
            "strides": strides_to_agree([(p.name, p.tensor) for p in self._parameters]),
        }
        try:
            session = Session(
                self._options.config,
                group,
                self._parameters,
                LocalOptions(),
                device,
                also_agree={"optimizer": agreed},
            )
        except RuntimeError as error:
            raise HorovodInternalError(str(error)) from error
        number_of = {name: i for i, names in enumerate(groups) for name in names}
        place_of = {name: i for i, name in enumerate(of_first)}
        # Gradients arrive from the model's end to its beginning.
        order = sorted(range(len(self._parameters)), key=lambda i: -place_of[self._parameters[i].name])
        self.native.set_layout(group_of=[number_of.get(p.name, -1) for p in self._parameters], order=order)
        self.native.set_ranks(session.synchronizer, session.store("optimizer"))
        self.session, self._world = session, found
        if self.weight is not None:
            give(session.weights, self.weight)

    def _order_of_first(self, group: OwnGroup) -> list[str]:
        """The names in the order of the set's first rank."""
        key = f"order/{group.store.add(f'orders/{group.rank()}', 1)}"
        if group.rank() == 0:
            group.store.set(key, json.dumps(self._in_order))
        return json.loads(group.store.get(key))

    def _groups_of_all(self, order: list[str]) -> list[list[str]]:
        """The groups by names. A number of groups divides the parameters in this order."""
        groups = self._options.groups
        if groups is None:
            return []
        if isinstance(groups, list):
            name_of = {id(p.tensor): p.name for p in self._parameters}
            named = [sorted(name_of[id(each)] for each in members if id(each) in name_of) for members in groups]
            return [names for names in named if names]
        trained = {p.name for p in self._parameters if p.tensor.requires_grad}
        return [part for part in split_list([name for name in order if name in trained], groups) if part]

    def end_step(self) -> None:
        """Ends the step; see reducer.h. Opens, if the ranks are not connected.

        Raises HorovodInternalError if the ranks disagree or one is lost, and RuntimeError if one has no weight. The
        ranks are not connected then.
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
        assert self.session is not None
        weights = self.session.weights
        try:
            return function()
        except RuntimeError as error:
            text = str(error)
            for ours, theirs in _OF_THE_REDUCER:
                text = text.replace(ours, theirs)
            is_refused = weights is not None and weights.is_refused
            self.leave("a step has failed")
            raise (RuntimeError if is_refused else HorovodInternalError)(text) from error

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
    """The ranks of a process set, for sessions of one purpose. Every member makes them in the same order."""
    set_id, ranks = process_set.process_set_id or 0, process_set.ranks
    name, rank = f"{purpose}/{set_id}", ranks.index(found.rank)
    backends = {"cpu": found.members[set_id].group.backends["cpu"]}
    if device.type != "cpu":
        if name not in found.nccl:
            found.nccl[name] = torch_groups.own_nccl(found.store, f"nccl/{name}", rank, len(ranks), _NO_TIMEOUT, device)
        backends[device.type] = found.nccl[name]
    return OwnGroup(dist.PrefixStore(name, found.store), rank, len(ranks), _NO_TIMEOUT, backends, found.rank)


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
    errors: list[Exception] = []

    def run(functions: Sequence[Callable[[], None]]) -> None:
        threads = [threading.Thread(target=function, daemon=True) for function in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def join(alike: list[StepReducer]) -> None:
        """Those of one purpose connect in the order in which they were made, as they do where they step."""
        try:
            alike[0].open()
            rest = [lambda: join(alike[1:])] if alike[1:] else []
            run([lambda: joined(alike[0]), *rest])
        except Exception as error:
            errors.append(error)

    def joined(each: StepReducer) -> None:
        try:
            each.join()
        except Exception as error:
            errors.append(error)

    gc.collect()  # an optimizer that nothing refers to may be gone on another rank
    of_purpose: dict[str, list[StepReducer]] = {}
    for each in sorted(_living, key=lambda each: each.number):
        if each.native.is_on:
            of_purpose.setdefault(each.purpose, []).append(each)
    # Other ranks may step with any of them next.
    run([functools.partial(join, alike) for alike in of_purpose.values()])
    if errors:
        raise errors[0]


def _failure_of_job() -> str:
    found = world_if_any()
    return "" if found is None else found.order.failure


def _say(notices: Sequence[str]) -> None:
    for text in notices:
        warn_alone(text, stacklevel=3)
