"""The attachment that the trainers' modules share, whose state can be loaded before it is made."""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from fusedcomm import log
from fusedcomm.attaching import attach, unwrapped
from fusedcomm.autotune.auto import ConfigLike, chosen
from fusedcomm.config import LocalOptions
from fusedcomm.ddp.handle import Handle

if TYPE_CHECKING:
    from fusedcomm.fsdp.handle import FsdpHandle


class Attachment:
    """``fusedcomm.attach`` for a trainer that makes the model later, and may attach again in its next fit.

    config, local, quiet: as for :func:`fusedcomm.attach`.
    """

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        local: LocalOptions | None = None,
        quiet: bool = False,
    ) -> None:
        self._options = {"config": chosen(config), "local": local, "quiet": quiet}
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

        Raises as :func:`fusedcomm.attach`.
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
        """The state for a checkpoint that one file holds: with error feedback the mean of the ranks' residuals, which
        any number of ranks can load. If nothing is attached what was loaded, or an empty one.

        With error feedback or FSDP2 a collective call. Save rank 0's state.
        """
        if self.handle is None:
            return self._loaded or {}
        if isinstance(self.handle, Handle):
            own = self.handle.state_dict()
            if not own["error_feedback"]:
                return own
        return self.handle.state_dict(consolidated=True)

    def load_state_dict(self, state: dict) -> None:
        """Loads what :meth:`state_dict` returned on rank 0. Before :meth:`attach` it only keeps `state`."""
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
        elif is_of_fsdp2(state) or dist.get_rank(self._group) == 0:
            self.handle.load_state_dict(state)
        else:  # counts of NaN and Inf are rank 0's
            self.handle.load_state_dict({**state, "nonfinite": {}})


def is_of_fsdp2(state: dict) -> bool:
    """Whether a saved state is that of an attachment to FSDP2. It is the same on every rank."""
    return "calls" in state


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
