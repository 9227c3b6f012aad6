"""What every front end returns: its lifetime, plan, statistics, traces, state and copies."""

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fusedcomm.session.compare import ParameterDifference
from fusedcomm.session.plan import BucketsPlan, Plan, Tuning
from fusedcomm.session.served import Place
from fusedcomm.session.session import Mode, Session
from fusedcomm.session.state_dict import load_state_dict, state_dict
from fusedcomm.session.stats import NonFinite, Stats, nonfinite_of_all, nonfinite_rows
from fusedcomm.session.surface import Surface
from fusedcomm.session.weights import ADDED_MEANS, AddedPasses, give

if TYPE_CHECKING:
    from fusedcomm.native import _C


class Runs(Protocol):
    """What runs behind a handle: a session, or what goes from one session to another."""

    session: Any
    """The session that runs now."""
    weights: Any
    """The engine's weights, to which the rank's weight is given. None without Config(weighted=…)."""

    @property
    def mode(self) -> Mode:
        """What gradients go through now."""

    def stop(self, reason: str) -> None:
        """Stops what runs; buckets under way fail with `reason`. Idempotent."""


class CommHandle(Surface):
    """One attachment of fusedcomm. Front ends derive from it.

    A copy, made with ``copy`` or ``pickle``, as of a trainer or a module that holds the handle, is attached to nothing:
    its ``detach()`` does nothing, and every other method raises RuntimeError. The original stays attached.
    """

    _shows: tuple[str, ...] = (
        "compare_parameters",
        "is_copy",
        "load_state_dict",
        "nonfinite_report",
        "plan",
        "state_dict",
        "stats",
        "trace",
        "tuning",
        "weight",
    )
    _anew = "call fusedcomm.attach again, and use the handle that it returns"
    serves_as = "fusedcomm.attach"
    place: Place = "in hosts"
    _weight: float | None = None
    _added: AddedPasses | None = None
    """None where no pass only adds up."""

    def __init__(self, runs: Runs) -> None:
        self._runs: Runs | None = runs
        self._attached = True

    # ---- what front ends add

    def _let_go(self) -> None:
        """Takes what the front end has registered away from the module. Called once, by detach()."""

    def _caps(self) -> list[int] | None:
        """The caps on the bytes of buckets, for the plan before the first pass; None: no buckets are predicted."""
        return None

    def _described(self) -> str:
        session, search = self.session, "searching, now " if self.mode == "searching" else ""
        return f"{search}wire {session.config.wire}, sum {session.config.sum}, {session.world_size} ranks"

    def _plan(self) -> BucketsPlan:
        """The plan of the session that runs."""
        return dataclasses.replace(self.session.plan(self._caps()), tuning=self.tuning())

    def _compared(self) -> ParameterDifference | None:
        """See :meth:`compare_parameters`."""
        if not self.session.has_engine:
            raise RuntimeError("fusedcomm: config='off' compares no parameters: use Config('fp32', compare_every=…)")
        return self.session.comparison.now()

    def parameters_now(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients are synchronized, and frozen ones."""
        raise NotImplementedError

    def served(self) -> Sequence[torch.Tensor]:
        """See :class:`fusedcomm.session.served.Server`."""
        return self.parameters_now() if self._attached else ()

    # ---- weights of ranks

    @property
    def weight(self) -> float | None:
        """What this rank's gradients weigh in the mean, the number of its tokens for example: 0 or more. Needs
        ``Config(weighted=…)``, and every rank must set it. None: not set yet.

        It is for the backward passes to come until it is set again. Set it before ``backward()``. Where passes add up
        gradients (``no_sync()``), which needs ``weighted="sum"``, their weights add up, too. A rank of weight 0 takes
        part and changes nothing. If all ranks weigh 0, gradients become zero.

        Setting it raises TypeError for what is no number and no tensor, and RuntimeError without ``weighted``. A number
        that is no weight, and a rank that has set none, is an error of every rank in the next backward pass. A tensor
        on a GPU makes the host wait for its value.
        """
        return self._weight

    @weight.setter
    def weight(self, value: float | torch.Tensor) -> None:
        self.refuse_detached("no pass has a weight")
        self._weight = give(self._native_weights(), value)
        if self._added is not None:
            self._added.announce(self.parameters_now())

    def _native_weights(self) -> "_C.PassWeights":
        weights = self.runs.weights
        if weights is None:
            raise RuntimeError(
                f"fusedcomm: ranks weigh equally in this {self._kind}: to set comm.weight give it Config(…, "
                "weighted='mean'), or weighted='sum' where losses are sums, on every rank"
            )
        return weights

    def note_passes(self) -> None:
        """Call before a pass that only adds up gradients, and before each one from then on. Raises RuntimeError where
        the mean of losses is weighted."""
        if self.runs.weights is None:
            return
        if not self.runs.weights.of_sums:
            raise RuntimeError(ADDED_MEANS)
        if self._added is None:
            this = weakref.ref(self)  # hooks keep no handle
            self._added = AddedPasses(lambda: this().runs.weights)
        self._added.announce(self.parameters_now())

    # ---- lifetime

    @property
    def is_copy(self) -> bool:
        """Whether this object was made by ``copy`` or ``pickle``."""
        return self._runs is None

    @property
    def is_attached(self) -> bool:
        """Whether gradients go through this object. False after :meth:`detach`, and for a copy."""
        return self._attached

    @property
    def runs(self) -> Runs:
        """What runs behind this object, for fusedcomm itself. Raises RuntimeError if this object is a copy."""
        if self._runs is None:
            raise RuntimeError(f"fusedcomm: this {self._kind} is a copy: for the copied module {self._anew}")
        return self._runs

    @property
    def mode(self) -> Mode:
        """What gradients go through: the engine, an engine or torch in turns, torch's own sums, or nothing of ours."""
        return self.runs.mode if self._attached else "ended"

    @property
    def session(self) -> Session:
        """The running session, for fusedcomm itself. Raises RuntimeError if this object is a copy."""
        return self.runs.session

    def detach(self) -> None:
        """Stops the engine and restores what sent gradients before. Call it on every rank between steps. Idempotent."""
        if self._attached:
            self._attached = False
            if self._added is not None:
                self._added.remove()
            self._let_go()
            self.runs.stop("fusedcomm was detached")

    def refuse_detached(self, consequence: str) -> None:
        """Raises RuntimeError, with the consequence, if this object is detached or a copy."""
        if self.runs is not None:  # raises for a copy
            super().refuse_detached(consequence)

    def __reduce__(self) -> tuple:
        # Hooks, process groups, threads and connections stay with the original.
        return _copied, (type(self),)

    # ---- what is told

    def stats(self) -> Stats:
        """Counts and times of this rank since attach.

        On cuda this waits for the kernels under way, whose counts it reads. With "auto" the counts begin again at each
        change of candidate, and nothing is counted during DDP's own all-reduce.
        """
        return self.session.stats()

    def plan(self) -> Plan:
        """How each bucket is sent; printable. Shows the actual buckets after the first backward pass."""
        return self._plan()

    def tuning(self) -> Tuning | None:
        """What config="auto" has found so far; printable. None if nothing is searched."""
        found = getattr(self.runs, "tuning", None)  # a search has it
        return None if found is None else found()

    def nonfinite_report(self) -> list[NonFinite]:
        """Every rank's NaN and Inf counts by parameter, worst first. A collective call.

        Counting does not make the host wait, but this call waits for the kernels under way.
        """
        session = self.session
        if not session.has_engine:
            return []
        return nonfinite_of_all(nonfinite_rows(session.synchronizer, session.rank), session.gather)

    def compare_parameters(self) -> ParameterDifference | None:
        """Compares the parameters of all ranks now, bit for bit by checksums; None if they are equal. What is left out
        of synchronization is left out here, too. A collective call, between steps.

        A difference is also told as ``Config(compare=…)`` says; see ``compare_every`` there. A fault that changes the
        parameters of all ranks alike is not found.

        Raises:
            RuntimeError: this object has been detached, or torch's own sums run; with ``compare="raise"`` on every
                rank, if parameters differ.
            DamagedError: with members, this rank's parameters are not those of most ranks.
        """
        self.refuse_detached("its ranks' parameters are not compared")
        return self._compared()

    def trace(self, path: str | os.PathLike) -> contextlib.AbstractContextManager[None]:
        """Records when each stage of each bucket ran. Writes a Chrome trace for Perfetto when the block ends.

        ``with comm.trace("trace-{rank}.json"): …a few steps…``. On cuda the times are taken on the streams, and leaving
        the block waits for them. Of an FSDP2 model the modules on its own mesh are recorded.

        Args:
            path: ``{rank}`` becomes the rank. Without it only rank 0 records.

        Raises:
            OSError: the file cannot be written. Raised when the block begins, on the rank that writes.
            RuntimeError: this object has been detached, a search has not ended, or torch's own sums run; on every rank.
        """
        self.refuse_detached("there is nothing to trace")
        if self.mode == "searching":
            raise RuntimeError("fusedcomm: config='auto' is still searching: trace after comm.tuning().finished")
        if self.mode == "off":
            raise RuntimeError("fusedcomm: torch's own sums run: attach with the wire that is to be traced")
        return self.session.trace(path)

    def __str__(self) -> str:
        """How gradients are sent now, in one line, and the statistics as a table."""
        if not self._attached:
            return repr(self)
        return f"fusedcomm: {self.plan().headline}\n{self.stats()}"

    # ---- state

    def state_dict(self, consolidated: bool = False) -> dict:
        """Returns the state by parameter name, independent of buckets, for a checkpoint. Call it between passes.

        Without error feedback the state has only counts, and training does not depend on it. With error feedback it has
        this rank's residuals, which differ between ranks: save every rank's state, as with sharded optimizers, to go on
        with the same number of ranks. No residual is lost. The next steps have the bits of an uninterrupted run where
        buckets are cut as they were, as GradReducer does; DDP begins with other buckets.

        Args:
            consolidated: whether to return the mean of the residuals over the ranks, equal on every rank. A collective
                call. Save it once and load it on any number of ranks; no residual is lost.
        """
        return state_dict(self.session, consolidated)

    def load_state_dict(self, state: dict) -> None:
        """Restores what :meth:`state_dict` returned. Call it on every rank between backward passes.

        The wire may differ from the wire of the saved state. Residuals that another rank saved, or that were saved with
        another number of ranks, are not loaded; a warning says so. At most the rounding of one step is lost.

        Raises:
            ValueError: the version is another, a key is missing, a value is of the wrong kind, the model does not have
                a parameter or has it in another size, or there are residuals and this attachment has no error feedback.
                Nothing has changed then.
            RuntimeError: this object has been detached.
        """
        self.refuse_detached("no engine would use the state")
        load_state_dict(self.session, state)


def _copied(kind: type[CommHandle]) -> CommHandle:
    copied = kind.__new__(kind)
    copied._runs, copied._attached = None, False
    return copied
