"""The handle that ``fusedcomm.attach`` returns, and the tables of attached modules."""

import contextlib
import dataclasses
import os
import warnings
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedcomm.autotune.search import Tuning
from fusedcomm.autotune.tuner import Tuner
from fusedcomm.ddp.module import (
    SameParameters,
    bucket_nbytes_caps,
    forget_refused_hooks,
    native_hook,
    options_to_agree,
    refuse_join,
    synchronised_tensors,
)
from fusedcomm.native import _C
from fusedcomm.session.norm import GradientNorms
from fusedcomm.session.plan import Plan
from fusedcomm.session.session import Session
from fusedcomm.session.state_dict import load_state_dict, state_dict, take_over
from fusedcomm.session.stats import NonFinite, Stats

# The switch that each module's reducer calls. A reducer keeps its hook, so attaching again reuses the switch.
targets: "weakref.WeakKeyDictionary[DistributedDataParallel, _C.HookSwitch]" = weakref.WeakKeyDictionary()
# The handle of each attached module.
handles: "weakref.WeakKeyDictionary[DistributedDataParallel, Handle]" = weakref.WeakKeyDictionary()


class Handle(GradientNorms):
    """One attachment of fusedcomm to a DDP module; made by :func:`fusedcomm.attach`.

    A copy of a handle is attached to nothing, like the copied module. ``copy.deepcopy(trainer)`` and
    ``torch.save(ddp)`` make one if the trainer or module holds the handle. The copy's ``detach()`` does nothing; every
    other method raises RuntimeError. Call ``attach`` on the copied module for a handle of its own. The original stays
    attached.
    """

    def __init__(self, ddp: DistributedDataParallel, runs: Session | Tuner, target: "_C.HookSwitch") -> None:
        self._ddp = weakref.ref(ddp)
        self._runs = runs
        self._target = target
        self._attached = True
        self._is_hooked = True  # whether the reducer calls the target
        self._run_on(ddp)
        # With this entry DDP refuses a second hook as usual; see DistributedDataParallel.register_comm_hook.
        self._registered = (native_hook, None)
        ddp._comm_hooks.append(self._registered)
        _guard_of(ddp).parameters = SameParameters(ddp, self._session.parameters)

    def stats(self) -> Stats:
        """Counts and times of this rank since attach, or since the module moved to another process group.

        On cuda this waits for the kernels under way, whose counts it reads. With "auto" the counts begin again at
        each change of candidate, and nothing is counted during DDP's own all-reduce.
        """
        stats = self._session.stats()
        return stats if self._tuner is None else dataclasses.replace(stats, off=self._tuner.is_off)

    def plan(self) -> Plan:
        """How each bucket is sent; printable. Shows DDP's actual buckets after the first backward pass.

        After detach() it shows DDP's own all-reduce.
        """
        if not self._attached:
            return dataclasses.replace(self._session.plan(bucket_nbytes_caps(self._ddp()), off=True), detached=True)
        if self._tuner is not None:
            return self._tuner.plan()
        return self._session.plan(bucket_nbytes_caps(self._ddp()))

    def tuning(self) -> Tuning | None:
        """What config="auto" has found so far; printable. Can be saved once it is finished. None for other wires."""
        return None if self._tuner is None else self._tuner.tuning()

    def trace(self, path: str | os.PathLike, all_ranks: bool = False) -> contextlib.AbstractContextManager[None]:
        """Records when the module's passes, each stage of each bucket and the optimizer ran. Writes a Chrome trace for
        Perfetto when the block ends.

        ``with comm.trace("trace-{rank}.json"): …a few steps…``. On cuda the times are taken on the streams, and leaving
        the block waits for them. Within the block the module and torch's optimizers have hooks.

        Args:
            path: ``{rank}`` becomes the rank. Without it only rank 0 records.
            all_ranks: rank 0 writes one trace, in which each rank is a process. The collectives align the ranks'
                clocks; "otherData" has the precision in microseconds. A collective call: every rank traces the same
                steps. The command ``fusedcomm timeline`` makes the same trace of files with ``{rank}``.

        Raises:
            ValueError: all_ranks is set and the path has ``{rank}``.
            OSError: the file cannot be written. Raised when the block begins, on the rank that writes.
            RuntimeError: the handle has been detached. With "auto", on every rank: the search has not ended, or it
                has chosen DDP's own all-reduce. With all_ranks, on rank 0, when the block ends: another rank left the
                block with an error, or did not leave it within the group's timeout.
        """
        self._refuse_detached("there is nothing to trace")
        if self._tuner is not None and self._tuner.is_searching:
            raise RuntimeError(
                "fusedcomm: config='auto' is still searching, and would change what is traced: wait for "
                "comm.tuning().finished"
            )
        if self._tuner is not None and self._tuner.is_off:
            raise RuntimeError(
                "fusedcomm: DDP's own all-reduce is running, so fusedcomm has nothing to trace. Use "
                "torch.profiler, or attach with the wire that you want to trace, config='bf16' for example"
            )
        return self._session.recorder.record(path, all_ranks, self._ddp())

    def detach(self) -> None:
        """Stops the engine and restores DDP's exact all-reduce. Call it on every rank between steps. Idempotent.

        ``attach`` may be called on the module again. After detach(), sparse gradients go through the backend's own
        sparse all-reduce, as DDP's default does; NCCL has none.
        """
        if not self._attached:
            return
        self._attached = False
        ddp = self._ddp()
        if ddp is not None:
            self._target.set(None, ddp.process_group)
            if self._is_hooked:
                forget_refused_hooks(ddp)
            else:
                del targets[ddp]
            ddp._comm_hooks.remove(self._registered)
            _guard_of(ddp).parameters = None
            handles.pop(ddp, None)
        self._runs.stop("fusedcomm was detached")

    def nonfinite_report(self) -> list[NonFinite]:
        """Every rank's NaN and Inf counts by parameter, worst first. A collective call.

        Counting does not make the host wait, but this call waits for the kernels under way.
        """
        return self._session.nonfinite_report()

    def state_dict(self, consolidated: bool = False) -> dict:
        """Returns the state by parameter name, independent of buckets, for a checkpoint. Call it between passes.

        Without error feedback the state has only counts, and training does not depend on it. With error feedback it has
        this rank's residuals, which differ between ranks: save every rank's state, as with sharded optimizers, to go on
        with the same number of ranks. No residual is lost. The bits of the next steps differ from an uninterrupted run,
        because DDP begins with other buckets, and because a rank's residuals of means become residuals of its own.

        Args:
            consolidated: whether to return the mean of the residuals over the ranks, equal on every rank. A collective
                call. Save it once and load it on any number of ranks; no residual is lost.
        """
        return state_dict(self._session, consolidated)

    def load_state_dict(self, state: dict) -> None:
        """Restores what :meth:`state_dict` returned. Call it on every rank between backward passes.

        The wire may differ from the wire of the saved state. Residuals that another rank saved, or that were saved with
        another number of ranks, are not loaded; a warning says so. At most the rounding of one step is lost.

        Raises:
            ValueError: the version is another, a key is missing, a value is of the wrong kind, the model does not have
                a parameter or has it in another size, or there are residuals and this attachment has no error feedback.
                Nothing has changed then.
            RuntimeError: the handle has been detached.
        """
        self._refuse_detached("no engine would use the state")
        load_state_dict(self._session, state)

    def __repr__(self) -> str:
        """One line, which waits for nothing: ``<fusedcomm.Handle: wire int8, sum auto, 2 ranks>``."""
        if not self._attached:
            return "<fusedcomm.Handle: detached>"
        if self._tuner is not None and self._tuner.is_off:
            return f"<fusedcomm.Handle: off, DDP's own all-reduce, {self._session.world_size} ranks>"
        config = self._session.config
        search = "searching, now " if self._tuner is not None and self._tuner.is_searching else ""
        return f"<fusedcomm.Handle: {search}wire {config.wire}, sum {config.sum}, {self._session.world_size} ranks>"

    def __str__(self) -> str:
        """How gradients are sent now, in one line, and the statistics as a table."""
        if not self._attached:
            return repr(self)
        return f"fusedcomm: {self.plan().headline}\n{self.stats()}"

    def __enter__(self) -> "Handle":
        """``with fusedcomm.attach(ddp) as comm:`` detaches when the block ends, also if it ends with an error.

        As :meth:`detach`, every rank must leave the block between steps.
        """
        self._refuse_detached("a block cannot detach it")
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def _hook_now(self) -> "_C.Synchroniser | None":
        self._refuse_detached("no gradients are synchronized")
        return None if self._tuner is not None and not self._tuner.uses_engine else self._session.hook

    def _next_hook(self) -> "_C.Synchroniser | None":
        self._refuse_detached("no gradients are synchronized")
        return self._session.hook

    def _want_squares(self) -> None:
        hook, ddp = self._next_hook(), self._ddp()
        if hook is not None:
            # DDP leaves the gradient of a parameter that no rank has used as it was, whatever its bucket holds.
            hook.epilogue.want_squares(in_unpack=ddp is not None and not ddp.find_unused_parameters)

    def _parameters_now(self) -> list[torch.Tensor]:
        self._refuse_detached("no gradients are synchronized")
        ddp = self._ddp()
        return [] if ddp is None else synchronised_tensors(ddp)

    def _refuse_detached(self, consequence: str) -> None:
        """Raises RuntimeError if this handle is detached or a copy."""
        self._session  # noqa: B018  (raises if this handle is a copy)
        if not self._attached:
            raise RuntimeError(
                f"fusedcomm: this handle is detached, so {consequence}: call fusedcomm.attach again, and use the "
                "handle that it returns"
            )

    def __reduce__(self) -> tuple:
        # Process groups, threads and connections stay with the original.
        return _CopiedHandle, ()

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        if self._session.process_group is not ddp.process_group:
            self._follow_process_group(ddp)
        if self._is_hooked:
            refuse_join(ddp)
        self._session.say_notices()
        if self._is_hooked and self._tuner is not None and self._tuner.is_off_for_good:
            forget_refused_hooks(ddp)
            self._is_hooked = not _C.remove_hook(ddp.reducer)

    def _follow_process_group(self, ddp: DistributedDataParallel) -> None:
        """After ``DistributedDataParallel._update_process_group``: the same configuration on the new group."""
        old = self._runs
        if isinstance(old, Tuner):
            self._runs = old.moved(ddp.process_group)
        else:
            self._runs = Session(
                old.config,
                ddp.process_group,
                old.parameters,
                old.local,
                old.device,
                also_agree=options_to_agree(ddp),  # ranks that attach only now compare it
            )
            take_over(self._runs, old)
        old.stop("the module moved to another process group")
        self._run_on(ddp)

    @property
    def _tuner(self) -> Tuner | None:
        return self._runs if isinstance(self._runs, Tuner) else None

    @property
    def _session(self) -> Session:
        return self._runs.session if isinstance(self._runs, Tuner) else self._runs

    def _run_on(self, ddp: DistributedDataParallel) -> None:
        if not self._is_hooked:
            _C.register_ddp_hook(ddp.reducer, self._target)
            self._is_hooked = True
        if self._tuner is not None:
            self._tuner.start(self._target)
        else:
            self._target.set(self._session.hook, ddp.process_group)


def let_go(ddp: DistributedDataParallel) -> bool:
    """Takes a detached switch from the module's reducer. Returns whether it is gone: some versions of torch keep it."""
    forget_refused_hooks(ddp)
    if _C.remove_hook(ddp.reducer):
        del targets[ddp]
        return True
    targets[ddp].set(None, ddp.process_group)  # follows DDP's group, as DDP's default does
    return False


class _CopiedHandle(Handle):
    """The result of copying or pickling a handle."""

    def __init__(self) -> None:
        self._attached = False

    def __repr__(self) -> str:
        return "<fusedcomm.Handle: a copy, attached to nothing>"

    @property
    def _runs(self) -> Session | Tuner:
        raise RuntimeError(
            "fusedcomm: this handle is a copy, made with copy or pickle, and is attached to nothing: call "
            "fusedcomm.attach on the copied module, and use the handle that it returns"
        )


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
