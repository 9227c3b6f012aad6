"""``attach(ddp, "off")``: DDP stays as it comes, so that a configuration file can ask for a comparison."""

import contextlib
import os
import weakref

import torch
from torch.nn.parallel import DistributedDataParallel

from fusedcomm import env
from fusedcomm.config import Config, LocalOptions
from fusedcomm.ddp.handle import Handle, handles, let_go, targets
from fusedcomm.ddp.module import bucket_nbytes_caps
from fusedcomm.session.off import agree_on_off
from fusedcomm.session.parameters import NamedParameter, trainable
from fusedcomm.session.plan import Plan, predicted_rows
from fusedcomm.session.state_dict import VERSION, check
from fusedcomm.session.stats import NonFinite, Stats, uncounted

CONFIG = Config("fp32", "exact", hosts=None)
"""Describes DDP's own all-reduce, for the plan."""


class OffHandle(Handle):
    """The handle of a module that keeps DDP's own all-reduce: it has no hook, no engine, and no connections.

    The state is what was loaded: steps go on to be counted when a wire is attached again.
    """

    def __init__(self, ddp: DistributedDataParallel, parameters: list[NamedParameter], device: torch.device) -> None:
        self._ddp = weakref.ref(ddp)
        self._parameters, self._device = parameters, device
        self._group = ddp.process_group
        self._attached = True
        self._is_hooked = ddp in targets  # an earlier attachment's switch goes before the next forward pass
        self._step, self._nonfinite = 0, {}

    @property
    def _runs(self) -> None:
        return None

    def stats(self) -> Stats:
        """All counts are 0, because nothing is counted; `off` is True."""
        return uncounted()

    def plan(self) -> Plan:
        ddp = self._ddp()
        now, caps = trainable(self._parameters), bucket_nbytes_caps(ddp)
        world_size = (self._group if ddp is None else ddp.process_group).size()
        return Plan(
            config=CONFIG,
            world_size=world_size,
            device_type=self._device.type,
            codec="none",
            scratch_nbytes=0,
            exempt=(),
            buckets=() if caps is None else predicted_rows(CONFIG, None, world_size, None, now, caps),
            predicted=True,
            off=True,
            ranks_on_host=env.local_world_size(),
            frozen=not now,
            detached=not self._attached,
        )

    def trace(self, path: str | os.PathLike, all_ranks: bool = False) -> contextlib.AbstractContextManager[None]:
        """Raises RuntimeError: fusedcomm has nothing to trace."""
        self._refuse_detached("there is nothing to trace")
        raise RuntimeError(
            "fusedcomm: config='off' is DDP's own all-reduce, so fusedcomm has nothing to trace. Use torch.profiler, "
            "or attach with the wire that you want to trace, config='bf16' for example"
        )

    def detach(self) -> None:
        ddp = self._ddp()
        if self._attached and ddp is not None:
            handles.pop(ddp, None)
        self._attached = False

    def nonfinite_report(self) -> list[NonFinite]:
        """Empty, because nothing is counted."""
        return []

    def state_dict(self, consolidated: bool = False) -> dict:
        """As with a wire, with the step and the counts that were loaded, and without residuals."""
        rank, world_size = self._group.rank(), self._group.size()
        return {
            "version": VERSION,
            "rank": None if consolidated else rank,
            "world_size": None if consolidated else world_size,
            "step": self._step,
            "nonfinite": dict(self._nonfinite),
            "error_feedback": None,
            "residuals": {},
        }

    def load_state_dict(self, state: dict) -> None:
        self._refuse_detached("no engine would use the state")
        check(state, self._parameters, keeps_residuals=False, is_off=True)
        self._step, self._nonfinite = state["step"], dict(state["nonfinite"])

    def _hook_now(self) -> None:
        self._refuse_detached("no gradients are synchronized")

    def _next_hook(self) -> None:
        return self._hook_now()

    def __repr__(self) -> str:
        state = "off, DDP's own all-reduce" if self._attached else "detached"
        return f"<fusedcomm.Handle: {state}>"

    def _before_forward(self, ddp: DistributedDataParallel) -> None:
        if ddp in targets:
            self._is_hooked = not let_go(ddp)


def attach_off(
    ddp: DistributedDataParallel,
    parameters: list[NamedParameter],
    device: torch.device,
    local: LocalOptions,
    problem: Exception | None,
) -> OffHandle:
    """The handle, once the ranks have agreed that all of them leave DDP as it comes.

    Raises: `problem`, if there is one, once the other ranks have been told; and as :class:`Session`.
    """
    agree_on_off(ddp.process_group, device, local, problem)
    return OffHandle(ddp, parameters, device)
