"""``fusedcomm.ShardedOptimizer``: each rank steps the part of the parameters that it owns, and sends the update."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fusedcomm import log
from fusedcomm.config import Config
from fusedcomm.config.options import WITH_FEEDBACK
from fusedcomm.literals import Wire
from fusedcomm.optimizer import arguments, state
from fusedcomm.optimizer.exchange import Exchange
from fusedcomm.optimizer.owner import Owner, State, StepError
from fusedcomm.optimizer.parts import Target, units
from fusedcomm.optimizer.plan import ShardedPlan, make_plan
from fusedcomm.reducer.data_parallel import DataParallel
from fusedcomm.reducer.reducer import GradReducer
from fusedcomm.session.norm import refuse_nonfinite
from fusedcomm.session.session import Session
from fusedcomm.session.stats import Stats, together

_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grads_with_norm_."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps each parameter on the rank that owns it, between the two halves of the gradients' two-shot.

        reducer = fusedcomm.GradReducer(model, "int8")
        optimizer = fusedcomm.ShardedOptimizer(reducer, torch.optim.AdamW, lr=1e-3)
        for batch in batches:
            optimizer.zero_grad()
            loss(model(batch)).backward()
            optimizer.step()  # parameters are equal on every rank, and new

    A rank gets the sum of the gradients of what it owns, in fp32, runs the optimizer on it, and sends the update, which
    every rank writes to its parameters. As many bytes travel as in a two-shot. The optimizer's state and time are
    divided by the number of ranks. Gradients (``p.grad``) stay this rank's own: they are not means.

    Make it on every rank, before the first backward pass. Its ``param_groups`` have the model's parameters, for
    schedulers and ``zero_grad()``.

    Args:
        reducer: a :class:`GradReducer`, or a :class:`DataParallel`. Its wire carries the gradients.
        optimizer_class: a torch optimizer. Of AdamW, SGD and others that treat each element by itself, ranks own equal
            numbers of elements; of others, as Muon, whole parameters.
        params: parameters or groups of them, which may name another class, ``{"params": […], "optimizer_class":
            torch.optim.Muon, "lr": …}``. None: all of the reducer's in one group. Each must be in one group.
        update: the wire of the updates. "fp32" sends new values exactly, and "bf16" those of bf16 parameters. Else a
            difference travels, and what the wire leaves out of it is in the next one: the owner keeps an fp32 copy.
        overlap: whether owners step, and updates travel, while the backward pass goes on. Then nothing can come between
            backward() and step(): no clipping, no GradScaler, no change of hyperparameters. None: if the reducer does
            not look for unused parameters.
        whole: whether a rank owns whole parameters. None: by the class.
        quiet: whether rank 0 does not report the plan.
        defaults: the optimizer's own arguments, ``lr=1e-3`` for example.

    Raises:
        TypeError, ValueError: an argument is not possible, an optimizer reads other parameters than its own, or
            parameters are on two devices, sparse, in no group or in two.
        RuntimeError: the reducer has made a pass, has a ShardedOptimizer already, or the ranks do not agree.

    ``step()`` raises RuntimeError on every rank if there was no backward pass before it, if some ranks do not call it,
    or if gradients were changed since the backward pass.
    """

    _step_supports_amp_scaling = True  # so a GradScaler calls step() in any case, and says what it has found

    def __init__(
        self,
        reducer: GradReducer | DataParallel,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None = None,
        *,
        update: Wire = "bf16",
        overlap: bool | None = None,
        whole: bool | None = None,
        quiet: bool = False,
        **defaults: Any,  # noqa: ANN401  (the optimizer's own)
    ) -> None:
        self._reducer = found = reducer.comm if isinstance(reducer, DataParallel) else reducer
        if not isinstance(found, GradReducer):
            raise TypeError(
                "fusedcomm.ShardedOptimizer takes a fusedcomm.GradReducer or a fusedcomm.DataParallel, not "
                f"{type(found).__name__}"
            )
        config = arguments.rows_config(found)
        if update in WITH_FEEDBACK:
            raise ValueError(f"fusedcomm: update={update!r} needs error feedback at both ends: use 'int8' or 'bf16'")
        self._update = Config(update, sum="two-shot", hosts=None)
        if overlap and found.finds_unused:
            raise ValueError(
                "fusedcomm: overlap=True is not possible with find_unused_parameters=True: which parameters were used "
                "is known when the backward pass ends. Leave one of them out"
            )
        self._overlaps = not found.finds_unused if overlap is None else overlap
        old, problem = found.session, None
        groups: list[dict[str, Any]] = []
        self._targets: list[Target] = []
        self._by_reducer: dict[int, int] = {}
        try:
            groups = arguments.groups(found, params, optimizer_class, defaults)
            self._targets, self._by_reducer = arguments.targets(found, groups, self._update, whole)
        except (TypeError, ValueError) as error:
            problem = error  # perhaps of this rank alone: the session tells the others
        self._updates = Session(
            self._update,
            old.process_group,
            None,
            old.local,
            old.device,
            also_agree={"sharded": self._record(groups, update, defaults)},
            problem=problem,
        )
        self._sums = self._replace_session(old, config)
        assert self._sums.synchronizer is not None
        self._synchronizer = self._sums.synchronizer
        buckets = [[self._by_reducer[i] for i in bucket] for bucket in found.native.buckets_now()]
        cut = units(buckets, self._targets, old.world_size, found.bucket_nbytes)
        self.exchanges = [
            Exchange(unit, self._targets, self._sums, self._updates, self._update, i, i + 1 == len(cut))
            for i, unit in enumerate(cut)
        ]
        self._of_bucket = [
            [i for i, exchange in enumerate(self.exchanges) if not set(bucket).isdisjoint(exchange.unit.targets)]
            for bucket in buckets
        ]
        self._owner = Owner(
            self.exchanges, groups, self._targets, defaults, old.device, self._overlaps, optimizer_class
        )
        self._is_made = False
        super().__init__(self._owner.outer_groups(), dict(self._owner.optimizers[0].defaults))
        self._is_made = True
        # torch.distributed.checkpoint makes a step of its own if an optimizer has no state.
        self.state.update({target.tensor: {} for target in self._targets})
        self._seen: dict[int, tuple[int, int]] = {}  # of each parameter's gradient in the pass: its id and version
        self._num_handed = 0
        self._is_ready = self._is_unscaled = False
        self._used: set[int] = set()
        self._hand_over_to(found)
        if old.rank == 0:
            log.report(self.plan, quiet)

    # ---- making it

    def _record(self, groups: list[dict], update: str, defaults: dict) -> dict:
        """What must be equal on all ranks."""
        names = {id(target.tensor): target.name for target in self._targets}
        return {
            "update": update,
            "overlap": self._overlaps,
            "groups": [
                [group["optimizer_class"].__name__, [names.get(id(p)) for p in group["params"]]] for group in groups
            ],
            "whole": [target.name for target in self._targets if target.whole],
            "arguments": sorted(defaults),
        }

    def _replace_session(self, old: Session, config: Config) -> Session:
        """Gives the reducer a session whose sums are of rows."""
        session = Session(
            config,
            old.process_group,
            old.parameters,
            old.local,
            old.device,
            beside=old,
            reduces_rows=True,
            watched=False,
        )
        old.unwatch()
        session.watch()
        return session

    def _hand_over_to(self, reducer: GradReducer) -> None:
        this = weakref.ref(self)

        def take(indices: list[int], gradients: list[torch.Tensor]) -> None:
            if (optimizer := this()) is not None:
                optimizer._take(indices, gradients)

        def end(used: list[int]) -> None:
            if (optimizer := this()) is not None:
                optimizer._end(used)

        reducer.give_to(self._sums, take, end, self._detach)

    def _detach(self) -> None:
        self._owner.stop()
        self._updates.stop("the GradReducer was detached")

    # ---- the pass

    def _take(self, indices: list[int], gradients: list[torch.Tensor]) -> None:
        """On autograd's thread, with a bucket's gradients."""
        if self._is_ready:
            raise RuntimeError(
                "a second backward pass was synchronized before step(), whose sums would take the place of the first "
                "one's: call step() or skip_step() after each, or all backward passes of a step but the last within "
                "no_sync()"
            )
        if self._num_handed == 0:
            self._owner.begin(self._synchronizer.step, self._hyperparameters())
        with torch.no_grad():
            targets = [self._by_reducer[i] for i in indices]
            of_bucket = dict(zip(targets, gradients, strict=True))
            for target in targets:
                grad = self._targets[target].tensor.grad
                self._seen[target] = (0, 0) if grad is None else (id(grad), grad._version)
            for index in self._of_bucket[self._num_handed]:
                self.exchanges[index].take(of_bucket)
        for index in self._of_bucket[self._num_handed]:
            if self.exchanges[index].unit.last == self._num_handed:
                self._owner.reduce(index)
        self._num_handed += 1

    def _end(self, used: list[int]) -> None:
        """After the last bucket of a pass."""
        self._num_handed = 0
        self._is_ready = True
        self._used = {self._by_reducer[i] for i in used}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Steps what this rank owns, and writes all ranks' updates to the parameters. Raises as the class says."""
        if closure is not None:
            raise ValueError(
                "fusedcomm: a ShardedOptimizer's step() calls no closure, which would be a pass of its own"
            )
        native = self._reducer.native
        native.check()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and not self._is_unscaled:
            native.refuse(
                "torch.amp.GradScaler cannot unscale the sums of a ShardedOptimizer, which are not in p.grad: use "
                "fusedcomm.GradScaler(reducer) in its place"
            )
        if found_inf is not None and found_inf.item() != 0:
            self._end_pass()
            return
        if not self._is_ready:
            native.refuse(
                "ShardedOptimizer.step() was called without a backward pass before it that was synchronized, or a "
                "second time: call it once after each, on every rank"
            )
        for target, seen in self._seen.items():
            grad = self._targets[target].tensor.grad
            if seen != ((0, 0) if grad is None else (id(grad), grad._version)):
                native.refuse(
                    f"the gradient of {self._targets[target].name} was changed or removed between backward() and "
                    "step(). A ShardedOptimizer has summed it already: clip with optimizer.clip_grad_norm_(), and use "
                    "fusedcomm.GradScaler in place of torch's"
                )
        hyperparameters = self._hyperparameters()
        if self._overlaps and hyperparameters != self._owner.hyperparameters:
            native.refuse(
                "hyperparameters of a ShardedOptimizer were changed between backward() and step(), and owners have "
                "stepped already: change them before backward(), or give it overlap=False"
            )
        try:
            self._owner.step(hyperparameters, self._used, native.check)
        except StepError as error:
            native.refuse(str(error))
        for group, given, inner in zip(self.param_groups, hyperparameters, self._owner.groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params" and value is not given[key]})
        self._synchronizer.step += 1
        self._end_pass()

    def _end_pass(self) -> None:
        self._is_ready = self._is_unscaled = False
        self._seen.clear()

    def _hyperparameters(self) -> list[dict[str, Any]]:
        """Of each group. Copies of tensors, which schedulers change in place."""
        return [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            for group in self.param_groups
        ]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: who owns what is agreed when the optimizer is made."""
        if getattr(self, "_is_made", False):
            raise RuntimeError(
                "fusedcomm: who owns what is agreed when a ShardedOptimizer is made: give it all groups then, or make "
                "the GradReducer and it anew"
            )
        super().add_param_group(param_group)

    # ---- between backward() and step()

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all means together, the same on every rank: float32, without dimensions. A collective call
        between backward() and step()."""
        self._refuse_overlap("grad_norm()")
        if norm_type != 2.0:
            raise ValueError(f"fusedcomm: norm_type={norm_type!r} is not possible with a ShardedOptimizer: use 2")
        squares = torch.zeros((), dtype=torch.float64, device=self._sums.device)
        for sums in self._own_sums():
            squares += sums.double().square().sum()
        self._sums.sum_over_ranks([squares], "grad_norm()")
        return squares.sqrt().float()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales the means down to `max_norm` if their norm is greater, and returns the norm before. In place of
        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)``; a collective call, with ``overlap=False``.
        Raises RuntimeError if error_if_nonfinite, and the norm is not finite."""
        norm = self.grad_norm(norm_type)
        if error_if_nonfinite:
            refuse_nonfinite(norm)
        factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
        for sums in self._own_sums():
            sums.mul_(factor)
        return norm

    def unscale_sums(self, inv_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        """Multiplies the means, and says whether one is not finite on any rank; for :class:`fusedcomm.GradScaler`."""
        self._refuse_overlap("GradScaler")
        sums = self._own_sums()
        found = torch.zeros(1, dtype=torch.float32, device=self._sums.device)
        torch._amp_foreach_non_finite_check_and_unscale_(sums, found, inv_scale.to(found.device))
        self._sums.sum_over_ranks([found], "GradScaler.unscale_()")
        self._is_unscaled = True
        return {found.device: found.clamp_(max=1.0)}

    def skip_step(self) -> None:
        """Ends a pass without a step, in place of :meth:`step`: after a norm that is not finite, for example. Call it
        on every rank."""
        self._refuse_overlap("skip_step()")
        self._end_pass()

    def _own_sums(self) -> list[torch.Tensor]:
        return self._owner.wait_for_sums(self._reducer.native.check)

    def _refuse_overlap(self, what: str) -> None:
        if self._overlaps:
            raise RuntimeError(
                f"fusedcomm: {what} comes between backward() and step(), and with overlap owners have stepped already: "
                "give the ShardedOptimizer overlap=False"
            )
        if not self._is_ready:
            raise RuntimeError(f"fusedcomm: {what} before a backward pass, or after step(): there are no means")

    # ---- state, and what is told

    def state_dict(self) -> State:
        """The state in torch's format. Tensors of a parameter's shape are DTensors, Shard(0) over the ranks, which
        torch.distributed.checkpoint loads on any number of ranks; torch's get_optimizer_state_dict() takes it, too. An
        owner's fp32 copy is "master". A collective call between steps."""
        return state.state_dict(self, self._owner, self.exchanges, self._targets, self._sums)

    def load_state_dict(self, state_dict: State) -> None:
        """Takes :meth:`state_dict`'s, of any number of ranks, or that of a plain optimizer of the same class. Load the
        model first. A collective call between steps. Raises ValueError if it does not fit."""
        state.load_state_dict(self, state_dict, self._owner, self.exchanges, self._targets)

    def stats(self) -> Stats:
        """Counts and times of this rank, of gradients and updates together; times are those of the gradients."""
        return together([self._sums.stats(), self._updates.stats()])

    def plan(self) -> ShardedPlan:
        """Who owns what, bytes of state and on the wire; printable."""
        return make_plan(self._owner, self.exchanges, self._targets, self._sums, self._update, self._overlaps)
