"""The attachment that the trainers' modules share, whose state can be loaded before it is made."""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from fusedcomm import log
from fusedcomm.attaching import attach, unwrapped
from fusedcomm.autotune.auto import ConfigLike, chosen
from fusedcomm.config import LocalOptions, combinations
from fusedcomm.ddp.handle import Handle
from fusedcomm.session.objects import everybodys

if TYPE_CHECKING:
    from fusedcomm.fsdp.handle import FsdpHandle

# The key of the states of every rank, in rank order.
RANKS = "ranks"


class Attachment:
    """``fusedcomm.attach`` for a trainer that makes the model later, and may attach again in its next fit.

    Args:
        config, local, quiet: as for :func:`fusedcomm.attach`.
        every_rank: what :meth:`state_dict` returns with error feedback. False: the mean of the residuals, which any
            number of ranks can load. True: every rank's, with which training goes on bit by bit; the file then has the
            size of a model in fp32 for each rank. FSDP2 has the mean alone, and refuses True.
    """

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        local: LocalOptions | None = None,
        quiet: bool = False,
        every_rank: bool = False,
    ) -> None:
        self._options = {"config": chosen(config), "local": local, "quiet": quiet}
        self._every_rank = every_rank
        self._group: dist.ProcessGroup | None = None
        self._loaded: dict | None = None  # a state to load once there is a handle
        self.handle: Handle | FsdpHandle | None = None

    def attach(self, model: nn.Module, world_size: int, how: str, *, asked_for_fsdp: str = "") -> None:
        """Attaches to the model that the trainer has wrapped, and loads the state that it has restored.

        Args:
            world_size: the trainer's number of ranks. With one rank and no DDP there is nothing to send: this is
                reported, and nothing is attached.
            how: how to have the trainer wrap the model, for errors.
            asked_for_fsdp: how the trainer was asked for FSDP, and when it uses DDP instead without a word; empty if it
                was not asked. If it has used DDP, this warns.

        Raises:
            ValueError: every_rank=True, and the model is sharded by FSDP2. Also as :func:`fusedcomm.attach`.
        """
        self.detach()
        inner = unwrapped(model)
        group = getattr(inner, "process_group", None)  # DDP's
        if group is None and world_size == 1:
            self._loaded = None
            quiet = self._options["quiet"]
            log.report(lambda: "fusedcomm: one rank sends no gradients, so nothing is attached", quiet)
            return
        try:
            self.handle = attach(inner, **self._options)
        except TypeError as error:
            raise TypeError(f"{error}. {how}") from error
        self._group = group
        if self._every_rank and not isinstance(self.handle, Handle):
            self.detach()
            combinations.refuse("FSDP2", {"every_rank": True})
        if asked_for_fsdp and isinstance(self.handle, Handle):
            warnings.warn(
                f"fusedcomm: {asked_for_fsdp}. The model is not sharded, and fusedcomm is attached to DDP", stacklevel=3
            )
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            self.load_state_dict(state)

    def detach(self) -> None:
        """Idempotent."""
        if self.handle is not None:
            self.handle.detach()
        self.handle = self._group = None

    def state_dict(self) -> dict:
        """The state for a checkpoint that one file holds. If nothing is attached what was loaded, or an empty one.

        With error feedback a collective call. Rank 0's state is complete; save that one.
        """
        if self.handle is None:
            return self._loaded or {}
        if not isinstance(self.handle, Handle):
            return self.handle.state_dict(consolidated=True)
        mine = self.own_state()
        if mine["error_feedback"] is None:
            return mine
        if not self._every_rank:
            return self.handle.state_dict(consolidated=True)
        is_first = mine["rank"] == 0
        states = [state if is_first else None for state in everybodys(mine, self.handle.session, "state_dict()")]
        return {RANKS: states if is_first else [mine]}

    def own_state(self) -> dict:
        """With DDP this rank's state, without a collective; empty if nothing is attached."""
        return {} if self.handle is None else self.handle.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Loads what :meth:`state_dict` returned on rank 0. Before :meth:`attach` it only keeps `state`.

        States of every rank are loaded as their mean if the number of ranks has changed.
        """
        if self.handle is None:
            self._loaded = state
        elif not state:
            pass
        elif is_of_fsdp2(state) == isinstance(self.handle, Handle):
            saved, found = ("FSDP2", "DDP") if is_of_fsdp2(state) else ("DDP", "FSDP2")
            warnings.warn(
                f"fusedcomm: the checkpoint has the state of an attachment to {saved}, which {found} cannot use: it is "
                "left out. At most the rounding of one step is lost",
                stacklevel=2,
            )
        else:
            self.handle.load_state_dict(state if is_of_fsdp2(state) else self._for_this_rank(state))

    def _for_this_rank(self, state: dict) -> dict:
        """The part of `state` that this rank loads."""
        rank, world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if RANKS in state:
            saved = state[RANKS]
            for each in saved:
                if (each["rank"], each["world_size"]) == (rank, world_size):
                    return each
            if len(saved) != saved[0]["world_size"]:
                raise ValueError(
                    f"fusedcomm: the checkpoint has the state of {len(saved)} of {saved[0]['world_size']} ranks, and "
                    f"not that of rank {rank} of {world_size}: load the file that rank 0 has saved"
                )
            state = mean_of(saved)
        # Counts of NaN and Inf are one rank's, and rank 0 has saved them.
        return state if rank == 0 else {**state, "nonfinite": {}}


def is_of_fsdp2(state: dict) -> bool:
    """Whether a saved state is that of an attachment to FSDP2. It is the same on every rank."""
    return "calls" in state


def mean_of(states: list[dict]) -> dict:
    """The mean of the residuals of all ranks' states, where a residual that a rank lacks counts as zeros."""
    sums: dict[str, torch.Tensor] = {}
    for state in states:
        for name, values in state["residuals"].items():
            sums[name] = values + sums[name] if name in sums else values
    residuals = {name: total / len(states) for name, total in sums.items()}
    return {**states[0], "rank": None, "world_size": None, "residuals": residuals, "residuals_of_encoders": {}}


def need(owner: object, names: Iterable[str], trainer: str, tested: str) -> None:
    """Raises RuntimeError if `owner`, a class or object of a trainer, has no attribute of one of the names."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        kind = owner if isinstance(owner, type) else type(owner)
        looked_for = ", ".join(f"{kind.__name__}.{name}" for name in missing)
        raise RuntimeError(
            f"fusedcomm: this {trainer} has no {looked_for}, which fusedcomm uses. Tested with {tested}: use "
            "that, or call fusedcomm.attach(ddp) in your own code"
        )
