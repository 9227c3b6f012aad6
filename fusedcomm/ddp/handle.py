"""What ``fusedcomm.attach`` returns: one attachment of a DDP module, and the modules that have one."""

import contextlib
import dataclasses
import os
import warnings
import weakref

from torch.nn.parallel import DistributedDataParallel

from fusedcomm.autotune.search import Tuning
from fusedcomm.autotune.tuner import Tuner
from fusedcomm.ddp.module import bucket_nbytes_caps, native_hook, options_to_agree
from fusedcomm.native import _C
from fusedcomm.session.plan import Plan
from fusedcomm.session.session import Session
from fusedcomm.session.state_dict import load_state_dict, state_dict, take_over
from fusedcomm.session.stats import NonFinite, Stats

# A reducer keeps its hook for life; detaching and attaching again reuse it.
targets: "weakref.WeakKeyDictionary[DistributedDataParallel, _C.HookSwitch]" = weakref.WeakKeyDictionary()
handles: "weakref.WeakKeyDictionary[DistributedDataParallel, Handle]" = weakref.WeakKeyDictionary()


class Handle:
    """One attachment of fusedcomm to a DDP module; made by :func:`fusedcomm.attach`.

    A copy of it, as in ``copy.deepcopy(trainer)`` or ``torch.save(ddp)`` where one of these holds the handle, is
    attached to nothing, as the copied module is: ``detach()`` does nothing and all else raises RuntimeError. Call
    ``attach`` on the copied module for a handle of its own. The original stays attached.
    """

    def __init__(self, ddp: DistributedDataParallel, runs: Session | Tuner, target: "_C.HookSwitch") -> None:
        self._ddp = weakref.ref(ddp)
        self._runs = runs
        self._target = target
        self._attached = True
        self._is_hooked = True  # the reducer calls the target
        self._run_on(ddp)
        # So that a second registration fails as users expect; see DistributedDataParallel.register_comm_hook.
        self._registered = (native_hook, None)
        ddp._comm_hooks.append(self._registered)
        # Stays when detached, and comes along with a copy.
        if not any(isinstance(hook, _ForwardGuard) for hook in ddp._forward_pre_hooks.values()):
            ddp.register_forward_pre_hook(_ForwardGuard())

    def stats(self) -> Stats:
        """Counts and times of this rank since attach, or since the module moved to another process group.

        On cuda it waits for the kernels under way, whose counts it reads. With wire="auto": since it last changed what
        travels, and nothing while that is DDP's own all-reduce.
        """
        stats = self._session.stats()
        return stats if self._tuner is None else dataclasses.replace(stats, off=self._tuner.is_off)

    def plan(self) -> Plan:
        """What travels how; printable. By DDP's actual buckets once there has been a backward pass."""
        if self._tuner is not None:
            return self._tuner.plan()
        return self._session.plan(bucket_nbytes_caps(self._ddp()))

    def tuning(self) -> Tuning | None:
        """What wire="auto" has found so far; printable, and once finished, saveable. None for other wires."""
        return None if self._tuner is None else self._tuner.tuning()

    def trace(self, path: str | os.PathLike, all_ranks: bool = False) -> contextlib.AbstractContextManager[None]:
        """Records when each stage of each bucket ran, and writes it as a Chrome trace for Perfetto at the end.

        ``with comm.trace("trace-{rank}.json"): …a few steps…``. ``{rank}`` becomes the rank; without it only rank 0
        records. On cuda the times are those of the streams; leaving the block waits for them.

        Args:
            all_ranks: rank 0 writes one trace of all ranks, a process each, their clocks aligned by what the
                collectives tell; its "otherData" says to within how many microseconds. A collective call: every rank
                traces the same steps. Of files with ``{rank}`` the command ``fusedcomm timeline`` makes the same.

        Raises:
            ValueError: all_ranks, and the path has ``{rank}``.
            OSError: when the block begins, on the rank that writes: that file cannot be written.
            RuntimeError: all_ranks, on rank 0, when the block ends: another rank has left it with an error, or not at
                all within the group's timeout. With wire="auto", on every rank: the search has not ended, or it has
                chosen DDP's own all-reduce.
        """
        if self._tuner is not None and self._tuner.is_searching:
            raise RuntimeError(
                "fusedcomm: wire='auto' is still searching, and would change what is traced: wait for "
                "comm.tuning().finished"
            )
        if self._tuner is not None and self._tuner.is_off:
            raise RuntimeError(
                "fusedcomm: DDP's own all-reduce is running: there is nothing of fusedcomm's to trace. Use "
                "torch.profiler, or attach with the wire to be looked at, wire='bf16' for example"
            )
        return self._session.trace(path, all_ranks)

    def detach(self) -> None:
        """Ends the engine and gives the module back DDP's exact all-reduce. Call it on every rank between steps.

        Idempotent. ``attach`` may be called on the module again. Sparse gradients then go through the backend's own
        sparse all-reduce, as under DDP's default; NCCL has none.
        """
        if not self._attached:
            return
        self._attached = False
        ddp = self._ddp()
        if ddp is not None:
            self._target.set(None, ddp.process_group)
            if not self._is_hooked:
                del targets[ddp]
            ddp._comm_hooks.remove(self._registered)
            handles.pop(ddp, None)
        self._runs.stop("fusedcomm was detached")

    def nonfinite_report(self) -> list[NonFinite]:
        """Every rank's NaN and Inf counts by parameter, worst first. A collective call: on every rank.

        Counting costs no host wait; asking waits for the kernels under way.
        """
        return self._session.nonfinite_report()

    def state_dict(self, consolidated: bool = False) -> dict:
        """State by parameter name, for a checkpoint: independent of buckets. Between backward passes.

        Without error feedback it is small and of no consequence. With it, it holds what this rank has left out of its
        gradients so far, so each rank's is another: save all of them, as sharded optimizers do, to go on on as many
        ranks. Nothing is lost; the next steps' bits are not those of an uninterrupted run, since DDP begins with other
        buckets, and what a rank had left out of means is then its own.

        Args:
            consolidated: a collective call, on every rank: the mean over the ranks, the same on each. Save it once and
                load it on any number of ranks; nothing is lost.
        """
        return state_dict(self._session, consolidated)

    def load_state_dict(self, state: dict) -> None:
        """Restores what :meth:`state_dict` gave, between backward passes; on every rank, the wire may be another.

        A residual that another rank saved, or this rank among another number of ranks, is not loaded but forgotten,
        with a warning: at most what one step left out is lost.

        Raises:
            ValueError: another version, a missing key, a value of the wrong kind, a parameter this model does not have
                or of another size, or residuals where this attachment has no error feedback. Nothing has changed then.
        """
        load_state_dict(self._session, state)

    def __reduce__(self) -> tuple:
        # Process groups, threads and connections stay with the original.
        return _CopiedHandle, ()

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        if self._session.process_group is not ddp.process_group:
            self._follow_process_group(ddp)
        self._session.say_notices()
        if self._is_hooked and self._tuner is not None and self._tuner.is_off_for_good:
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
                also_agree=options_to_agree(ddp),  # with ranks that attach only now
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


class _CopiedHandle(Handle):
    """What copying or pickling makes of a handle."""

    def __init__(self) -> None:
        self._attached = False

    @property
    def _runs(self) -> Session | Tuner:
        raise RuntimeError(
            "fusedcomm: this handle is a copy, made with copy or pickle, and is attached to nothing: call "
            "fusedcomm.attach on the copied module, and use the handle that it returns"
        )


class _ForwardGuard:
    """Forward pre-hook: notices, once a step, what a communication hook cannot see. Copied with the module."""

    def __init__(self) -> None:
        self._warned = False
        self._is_detached = False  # and the reducer has no hook of ours any more

    def __call__(self, ddp: DistributedDataParallel, inputs: tuple) -> None:
        handle = handles.get(ddp)
        if handle is None and ddp in targets:  # detached
            if _C.remove_hook(ddp.reducer):
                del targets[ddp]
                self._is_detached = True
            else:
                targets[ddp].set(None, ddp.process_group)  # as DDP's default would, follow its group
        elif handle is None and not self._is_detached:
            self._warn_lost()
        elif handle is not None:
            handle._before_forward(ddp)
            self._is_detached = not handle._is_hooked

    def _warn_lost(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                "this DDP module is a copy of one with fusedcomm attached; copying and pickling rebuild the reducer "
                "without its hook, so gradients are all-reduced exactly. Call fusedcomm.attach on the copy.",
                stacklevel=3,
            )
