"""The handle that ``fusedcomm.attach`` returns for a DDP module, and the tables of attached modules."""

import dataclasses
import warnings
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.autotune.tuner import Tuner
from fusedcomm.ddp.module import (
    ACTIVE_RANKS,
    SameParameters,
    bucket_nbytes_caps,
    forget_refused_hooks,
    join_of,
    native_hook,
    refuse_join,
    synchronized_tensors,
)
from fusedcomm.native import _C
from fusedcomm.session.handle import CommHandle
from fusedcomm.session.plan import BucketsPlan
from fusedcomm.session.served import serve
from fusedcomm.session.session import Session

# The switch that each module's reducer calls. A reducer keeps its hook, so attaching again reuses the switch.
targets: "weakref.WeakKeyDictionary[DistributedDataParallel, _C.HookSwitch]" = weakref.WeakKeyDictionary()
# The handle of each attached module.
handles: "weakref.WeakKeyDictionary[DistributedDataParallel, Handle]" = weakref.WeakKeyDictionary()


class Handle(CommHandle):
    """One attachment of fusedcomm to a DDP module; made by :func:`fusedcomm.attach`.

    With config="off" DDP stays as it comes: it has no hook and no engine, nothing is counted or traced, and the state
    is what was loaded.
    """

    _runs: Session | Tuner | None

    def __init__(self, ddp: DistributedDataParallel, runs: Session | Tuner, target: "_C.HookSwitch | None") -> None:
        """target: what the module's reducer calls; None with config="off"."""
        super().__init__(runs)
        self._ddp = weakref.ref(ddp)
        self._target = target
        # Whether the reducer calls a target, perhaps that of an attachment before.
        self._is_hooked = target is not None or ddp in targets
        # With this entry DDP refuses a second hook as usual; see DistributedDataParallel.register_comm_hook.
        self._registered = (native_hook, None)
        if target is not None:
            self._run_on(ddp)
            ddp._comm_hooks.append(self._registered)
            _guard_of(ddp).parameters = SameParameters(ddp, self.session.parameters)
        handles[ddp] = self
        serve(self)
        self._seal()

    def plan(self) -> BucketsPlan:
        """How each bucket is sent; printable. Shows DDP's actual buckets after the first backward pass.

        After detach() it shows DDP's own all-reduce.
        """
        if self._attached:
            return self._plan()
        return dataclasses.replace(self.session.plan(self._caps(), off=True), detached=True)

    def _let_go(self) -> None:
        ddp = self._ddp()
        if ddp is None:
            return
        handles.pop(ddp, None)
        if self._target is None:
            return
        # Sparse gradients then go through the backend's own sparse all-reduce, as DDP's default does; NCCL has none.
        self._target.set(None, ddp.process_group)
        if self._is_hooked:
            forget_refused_hooks(ddp)
        else:
            del targets[ddp]
        ddp._comm_hooks.remove(self._registered)
        _guard_of(ddp).parameters = None

    def _caps(self) -> list[int] | None:
        return bucket_nbytes_caps(self._ddp())

    def _described(self) -> str:
        if self.mode == "off":
            return f"off, DDP's own all-reduce, {self.session.world_size} ranks"
        return super()._described()

    def parameters_now(self) -> list[torch.Tensor]:
        """The parameters that DDP synchronizes, and frozen ones."""
        self.refuse_detached("no gradients are synchronized")
        ddp = self._ddp()
        return [] if ddp is None else synchronized_tensors(ddp)

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        if self.session.process_group is not ddp.process_group:
            raise RuntimeError(
                "fusedcomm: DistributedDataParallel has another process group than at attach: call detach() before "
                "_update_process_group, and fusedcomm.attach again after it, on every rank"
            )
        if self._target is None:
            self._is_hooked = ddp in targets and not let_go(ddp)
            return
        if isinstance(self._runs, Tuner):
            refuse_join(ddp)
        else:
            self.session.synchronizer.weights.count_active(join_of(ddp) == ACTIVE_RANKS)
        if torch.is_grad_enabled() and (self._added is not None or not ddp.require_backward_grad_sync):
            self.note_passes()
        self.session.say_notices()
        if self._is_hooked and isinstance(self._runs, Tuner) and self._runs.is_off_for_good:
            forget_refused_hooks(ddp)
            self._is_hooked = not _C.remove_hook(ddp.reducer)

    def _run_on(self, ddp: DistributedDataParallel) -> None:
        if not self._is_hooked:
            _C.register_ddp_hook(ddp.reducer, self._target)
            self._is_hooked = True
        if isinstance(self._runs, Tuner):
            self._runs.start(self._target)
        else:
            module = weakref.ref(ddp)
            # A rank that has had no input under Join has had no forward pass that could tell.
            self._target.ask(lambda: join_of(module()))
            self._target.set(self.session.synchronizer, ddp.process_group)


def let_go(ddp: DistributedDataParallel) -> bool:
    """Takes a detached switch from the module's reducer. Returns whether it is gone: some versions of torch keep it."""
    forget_refused_hooks(ddp)
    if _C.remove_hook(ddp.reducer):
        del targets[ddp]
        return True
    targets[ddp].set(None, ddp.process_group)  # follows DDP's group, as DDP's default does
    return False


def _guard_of(ddp: DistributedDataParallel) -> "_ForwardGuard":
    """The module's guard, which is registered if it has none. It stays after detach() and is copied with the module."""
    for hook in ddp._forward_pre_hooks.values():
        if isinstance(hook, _ForwardGuard):
            return hook
    guard = _ForwardGuard()
    ddp.register_forward_pre_hook(guard)
    return guard


class _ForwardGuard:
    """Forward pre-hook: once a step, handles what a communication hook cannot see. It is copied with the module."""

    # Of the attached module. Kept here, because the table of handles must not hold a module, which may hold its DDP.
    parameters: SameParameters | None = None

    def __init__(self) -> None:
        self._warned = False
        self._is_detached = False  # whether the reducer no longer has fusedcomm's hook

    @torch._disable_dynamo  # torch.compile would guard every parameter, and break its graph at each native call
    def __call__(self, ddp: DistributedDataParallel, inputs: tuple) -> None:
        handle = handles.get(ddp)
        if self.parameters is not None and torch.is_grad_enabled():
            self.parameters.refuse_changes()
        if handle is None and ddp in targets:  # detached
            self._is_detached = let_go(ddp)
        elif handle is None and not self._is_detached:
            self._warn_lost()
        elif handle is not None:
            handle._before_forward(ddp)
            self._is_detached = not handle._is_hooked

    def __getstate__(self) -> dict:
        return {**self.__dict__, "parameters": None}

    def _warn_lost(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "fusedcomm: this DDP module is a copy of one with fusedcomm attached; copying and pickling rebuild the "
                "reducer without its hook, so gradients are all-reduced exactly. Call fusedcomm.attach on the copy.",
                stacklevel=3,
            )
