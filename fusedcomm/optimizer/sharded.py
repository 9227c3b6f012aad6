"""``fusedcomm.ShardedOptimizer``: each rank steps the part of the parameters that it owns, and sends the update."""

import json
import weakref
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from fusedcomm import log
from fusedcomm.config import Config
from fusedcomm.devices.late import HostCopy
from fusedcomm.literals import Wire
from fusedcomm.optimizer import arguments, state
from fusedcomm.optimizer.exchange import Exchange, session_of_rows
from fusedcomm.optimizer.owner import Owner, State, StepError
from fusedcomm.optimizer.parts import Target, units
from fusedcomm.optimizer.plan import ShardedPlan, make_plan, warn_of_one_level
from fusedcomm.optimizer.scaler import SumsScaler
from fusedcomm.optimizer.seen import SeenGradients
from fusedcomm.optimizer.trial import changes_in_steps
from fusedcomm.reducer.data_parallel import DataParallel
from fusedcomm.reducer.reducer import GradReducer
from fusedcomm.session.session import Session
from fusedcomm.session.stats import Stats, together
from fusedcomm.session.surface import Spelled

_EPSILON = 1e-6
"""Added to a norm before the division by it, as in torch.nn.utils.clip_grads_with_norm_."""


class ShardedOptimizer(Spelled, torch.optim.Optimizer):
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
        optimizer_class: a torch optimizer. If it treats each element by itself, as AdamW and SGD do, ranks own equal
            numbers of elements; else, as with Muon, whole parameters.
        params: parameters, pairs of names and parameters, or groups of either, which may name another class,
            ``{"params": […], "optimizer_class": torch.optim.Muon, "lr": …}``. None: all of the reducer's in one group.
            Each must be in one group.
        update: the wire of the updates. "fp32" sends new values exactly, and "bf16" those of bf16 parameters. Else a
            difference travels, and what the wire leaves out of it is in the next one: the owner keeps an fp32 copy.
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

    _weight_is = "the GradReducer's: reducer.weight, or DataParallel's"
    _step_supports_amp_scaling = True  # so a scaler calls step() in any case, and says what it has found

    def __init__(
        self,
        reducer: GradReducer | DataParallel,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]] | None = None,
        *,
        update: Wire = "bf16",
        whole: bool | None = None,
        quiet: bool = False,
        **defaults: Any,  # noqa: ANN401  (the optimizer's own)
    ) -> None:
        self._reducer = found = reducer.comm if isinstance(reducer, DataParallel) else reducer
        arguments.check_reducer(found)
        problem: Exception | None = None
        try:
            config = arguments.rows_config(found)
            Config(update)
        except (ValueError, RuntimeError) as error:
            problem = error  # perhaps of this rank alone: the others are told
        try:
            found.meet("making a ShardedOptimizer", str(problem or "").removeprefix("fusedcomm: "))
        except RuntimeError as error:
            raise problem or error from None
        self._update = arguments.update_config(update, config)
        old, counts = found.session, False
        groups: list[dict[str, Any]] = []
        param_names: list[list[str] | None] = []
        self._targets: list[Target] = []
        self._by_reducer: dict[int, int] = {}
        try:
            groups = arguments.groups(found, params, optimizer_class, defaults)
            param_names = [group.pop("param_names", None) for group in groups]
            self._targets, self._by_reducer = arguments.targets(found, groups, self._update, whole)
            counts = changes_in_steps(groups, self._targets, optimizer_class, defaults)
        except Exception as error:
            problem = error  # perhaps of this rank alone: the session tells the others
        self._updates = Session(
            self._update,
            old.process_group,
            None,
            old.local,
            old.device,
            gathers_rows=True,
            also_agree={"sharded": arguments.record(groups, self._targets, update, defaults)},
            problem=problem,
        )
        self._sums = session_of_rows(old, config)
        assert self._sums.synchronizer is not None
        self._synchronizer = self._sums.synchronizer
        self._cut_into_units(found)
        self._make_optimizers(groups, defaults, optimizer_class, counts)
        for group, names in zip(self.param_groups, param_names, strict=True):
            if names is not None:
                group["param_names"] = names
        # torch.distributed.checkpoint makes a step of its own if an optimizer has no state.
        self.state.update({target.tensor: {} for target in self._targets})
        self._gradients = SeenGradients(self._targets)
        self._rates: list[dict[str, Any]] = []
        self._late_rates: list[dict[str, HostCopy]] = [{} for _ in self.param_groups]
        self._num_handed = 0
        self._is_ready = self._is_unscaled = False
        self._used: set[int] = set()
        self._hand_over_to(found)
        if old.rank == 0:
            log.report(self.plan, quiet)
            warn_of_one_level(self.plan(), self._sums)

    # ---- making it

    def _cut_into_units(self, found: GradReducer) -> None:
        buckets = [[self._by_reducer[i] for i in bucket] for bucket in found.native.buckets_now()]
        cut = units(buckets, self._targets, self._sums.world_size, found.bucket_nbytes)
        self.exchanges = [
            Exchange(unit, self._targets, self._sums, self._updates, self._update, i, i + 1 == len(cut))
            for i, unit in enumerate(cut)
        ]
        self._of_bucket = [
            [exchange for exchange in self.exchanges if not set(bucket).isdisjoint(exchange.unit.targets)]
            for bucket in buckets
        ]

    def _make_optimizers(
        self, groups: list[dict], defaults: dict, main: type[torch.optim.Optimizer], counts: bool
    ) -> None:
        """Raises what an optimizer raises, on every rank if one does."""
        self._is_made, problem = False, None
        try:
            self._owner = Owner(self.exchanges, groups, self._targets, defaults, main, counts)
            super().__init__(self._owner.outer_groups(), self._owner.common_defaults())
        except Exception as error:  # perhaps on this rank alone
            problem = error
        try:
            self._updates.confirm(problem)
        except Exception:
            self._sums.stop("a ShardedOptimizer could not be made")
            self._reducer.session.watch()
            raise
        self._is_made = True

    def _hand_over_to(self, reducer: GradReducer) -> None:
        # The native reducer, in which no cycle is found, calls this object without keeping it. The reducer keeps it.
        this: Callable[[], Any] = weakref.ref(self)
        reducer.give_to(
            self._sums,
            begin=lambda: this()._begin(),
            why_unequal=lambda: arguments.why_unequal(this()._sums, this()._rates),
            take=lambda indices, gradients: this()._take(indices, gradients),
            end=lambda used: this()._end(used),
            detach=self._detach,
        )

    def _detach(self) -> None:
        self._updates.stop("the GradReducer was detached")

    # ---- the pass

    def _begin(self) -> int:
        """Returns a checksum of the groups' arguments of their optimizers, which must be equal on all ranks when a pass
        begins. Of those that are tensors on an accelerator it has the values of the pass before."""
        now = [
            {key: group[key] for key in optimizer.defaults if key in group}
            for group, (optimizer, _, _) in zip(self.param_groups, self._owner.made, strict=True)
        ]
        late = [{key: copy.tolist() for key, copy in copies.items()} for copies in self._late_rates]
        self._late_rates = [
            {k: HostCopy(v) for k, v in of_group.items() if arguments.is_on_device(v)} for of_group in now
        ]
        self._rates = [arguments.plain(of_group) | before for of_group, before in zip(now, late, strict=True)]
        return zlib.crc32(json.dumps(self._rates).encode())

    def _take(self, indices: list[int], gradients: list[torch.Tensor]) -> None:
        """On autograd's thread, with a bucket's gradients."""
        if self._is_ready:
            raise RuntimeError(
                "a second backward pass was synchronized before step(): call step() or skip_step() after each, or all "
                "backward passes of a step but the last within no_sync()"
            )
        with torch.no_grad():
            targets = [self._by_reducer[i] for i in indices]
            of_bucket = dict(zip(targets, gradients, strict=True))
            for target in targets:
                self._gradients.see(target)
            for exchange in self._of_bucket[self._num_handed]:
                exchange.take(of_bucket)
                if exchange.unit.last == self._num_handed:
                    exchange.reduce()
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
            raise ValueError("fusedcomm: a ShardedOptimizer's step() calls no closure: leave it out")
        native = self._reducer.native
        native.check()
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and not self._is_unscaled:
            native.refuse(
                "torch.amp.GradScaler cannot unscale the sums of a ShardedOptimizer, which are not in p.grad: use the "
                "scaler that optimizer.grad_scaler() returns"
            )
        if found_inf is not None and found_inf.item() != 0:
            self._end_pass()
            return
        if not self._is_ready:
            native.refuse(
                "ShardedOptimizer.step() was called without a backward pass before it that was synchronized, or a "
                "second time: call it once after each, on every rank"
            )
        if name := self._gradients.changed():
            native.refuse(
                f"the gradient of {name} was changed or removed between backward() and step(). A ShardedOptimizer has "
                "summed it already: clip with optimizer.clip_grad_norm_(), and scale losses with "
                "optimizer.grad_scaler()"
            )
        hyperparameters = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        try:
            self._owner.step(hyperparameters, self._used, self._reducer.note_step)
        except StepError as error:
            native.refuse(str(error))
        for group, inner in zip(self.param_groups, self._owner.groups, strict=True):
            group.update({key: value for key, value in inner.items() if key != "params"})
        self._synchronizer.step += 1
        self._end_pass()

    def _end_pass(self) -> None:
        self._is_ready = self._is_unscaled = False
        self._gradients.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises RuntimeError: who owns what is agreed when the optimizer is made."""
        if getattr(self, "_is_made", False):
            raise RuntimeError("fusedcomm: groups are agreed when a ShardedOptimizer is made: make it anew with them")
        super().add_param_group(param_group)

    # ---- between backward() and step()

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all means together, the same on every rank: float32, without dimensions. A collective call
        between backward() and step()."""
        self._refuse_unready("grad_norm()")
        if norm_type != 2.0:
            raise ValueError(f"fusedcomm: norm_type={norm_type!r} is not possible with a ShardedOptimizer: use 2")
        squares = torch.zeros((), dtype=torch.float64, device=self._sums.device)
        for sums in self._own_sums():
            squares += sums.double().square().sum()
        self._sum_over_ranks(squares, "grad_norm()")
        return squares.sqrt().float()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales the means down to `max_norm` if their norm is greater, and returns the norm before. In place of
        ``torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)``; a collective call.
        Raises RuntimeError if error_if_nonfinite, and the norm is not finite."""
        norm = self.grad_norm(norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"fusedcomm: the norm of the means is {norm.item()}: use error_if_nonfinite=False")
        factor = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
        for sums in self._own_sums():
            sums.mul_(factor)
        return norm

    def grad_scaler(self, device: str = "cuda", **options: Any) -> torch.amp.GradScaler:  # noqa: ANN401  (torch's)
        """A scaler for losses, in place of ``torch.amp.GradScaler(device, …)``: that one looks for Inf in ``p.grad``,
        which is this rank's own gradient. Other optimizers it treats as torch's does."""
        return SumsScaler(device, **options)

    def unscale_sums(self, inv_scale: torch.Tensor) -> dict[torch.device, torch.Tensor]:
        """Multiplies the means, and says whether one is not finite on any rank; for :meth:`grad_scaler`."""
        self._refuse_unready("unscale_()")
        sums = self._own_sums()
        found = torch.zeros(1, dtype=torch.float32, device=self._sums.device)
        torch._amp_foreach_non_finite_check_and_unscale_(sums, found, inv_scale.to(found.device))
        self._sum_over_ranks(found, "unscale_()")
        self._is_unscaled = True
        return {found.device: found.clamp_(max=1.0)}

    def skip_step(self) -> None:
        """Ends a pass without a step, in place of :meth:`step`: after a norm that is not finite, for example. Call it
        on every rank."""
        self._refuse_unready("skip_step()")
        self._end_pass()

    def _own_sums(self) -> list[torch.Tensor]:
        return self._owner.wait_for_sums(self._reducer.native.check)

    def _sum_over_ranks(self, tensor: torch.Tensor, what: str) -> None:
        if tensor.device.type != "cpu":
            self._sums.sum_over_ranks([tensor], what)  # only enqueues, and does not wait
        else:
            self._reducer.wait_for(dist.all_reduce(tensor, group=self._sums.process_group, async_op=True), what, True)

    def _refuse_unready(self, what: str) -> None:
        if not self._is_ready:
            raise RuntimeError(f"fusedcomm: {what} before a backward pass, or after step(): there are no means")

    # ---- state, and what is told

    def state_dict(self) -> State:
        """The state in torch's format. Tensors of a parameter's shape are DTensors, Shard(0) over the ranks, which
        torch.distributed.checkpoint loads on any number of ranks; torch's get_optimizer_state_dict() takes it, too. An
        owner's fp32 copy is "master", beside a checksum of the parameter, "written". A collective call between
        steps. Raises RuntimeError, on every rank, if not all ranks call it."""
        self._reducer.meet("state_dict()", within_step=self._is_ready)
        for exchange in self.exchanges:
            exchange.refresh()
        return state.state_dict(self, self._owner, self.exchanges, self._targets, self._sums)

    def load_state_dict(self, state_dict: State) -> None:
        """Takes :meth:`state_dict`'s, of any number of ranks, or that of a plain optimizer of the same class. Load the
        model first. A collective call between steps. Raises ValueError if it does not fit, and RuntimeError as
        :meth:`state_dict`."""
        self._reducer.meet("load_state_dict()", within_step=self._is_ready)
        state.load_state_dict(self, state_dict, self._owner, self.exchanges, self._targets)

    def join_hook(self, **kwargs: object) -> JoinHook:
        """Raises RuntimeError, for ``torch.distributed.algorithms.join.Join``: every rank has to step what it owns."""
        raise RuntimeError(
            "fusedcomm: Join is not possible with a ShardedOptimizer: let a rank without batches go on with any batch "
            "and comm.weight = 0"
        )

    def stats(self) -> Stats:
        """Counts and times of this rank, of gradients and updates together; times are those of the gradients."""
        return together([self._sums.stats(), self._updates.stats()])

    def plan(self) -> ShardedPlan:
        """The parts that each rank owns, bytes of state and on the wire; printable."""
        return make_plan(self._owner, self.exchanges, self._targets, self._sums, self._update)
