"""Lightning: ``Trainer(strategy="ddp", callbacks=[FusedCommCallback("bf16")])``.

For Fabric no callback is needed: ``fusedcomm.attach(model, "bf16")`` after ``fabric.setup``.
"""

import sys
from typing import TYPE_CHECKING

from fusedcomm.autotune.auto import ConfigLike
from fusedcomm.config import LocalOptions
from fusedcomm.ddp.handle import Handle
from fusedcomm.integrations.attachment import Attachment, need

if TYPE_CHECKING:
    from fusedcomm.fsdp.handle import FsdpHandle

# Lightning has two packages with the same classes. A program uses one of them.
if "lightning.pytorch" not in sys.modules and "pytorch_lightning" in sys.modules:
    import pytorch_lightning as pl
else:
    import lightning.pytorch as pl

_TESTED = "Lightning 2.6.6"
_NAME = f"Lightning {getattr(pl, '__version__', '(version unknown)')}"


class FusedCommCallback(pl.Callback):
    """Attaches fusedcomm when a fit starts, and detaches when it ends, also with an error.

    Args:
        config, local, quiet: as for :func:`fusedcomm.attach`.

    The attribute `handle` is what :func:`fusedcomm.attach` has returned; None outside a fit. Lightning's checkpoints
    hold the handle's state.

    Raises:
        RuntimeError: this version of Lightning lacks a hook that is needed.
    """

    def __init__(
        self,
        config: ConfigLike | None = None,
        *,
        local: LocalOptions | None = None,
        quiet: bool = False,
    ) -> None:
        need(pl.Callback, ("on_fit_start", "on_exception", "teardown", "state_dict", "load_state_dict"), _NAME, _TESTED)
        self._attachment = Attachment(config, local=local, quiet=quiet)

    @property
    def handle(self) -> "Handle | FsdpHandle | None":
        """The handle that :func:`fusedcomm.attach` returned; None outside a fit."""
        return self._attachment.handle

    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Attaches. Called by Lightning, as the methods below."""
        need(trainer, ("strategy", "world_size"), _NAME, _TESTED)
        need(trainer.strategy, ("model",), _NAME, _TESTED)
        how = (
            'Lightning wraps it with Trainer(strategy="ddp"), or with ModelParallelStrategy and fully_shard() in '
            f"configure_model(), and this strategy is {type(trainer.strategy).__name__}"
        )
        self._attachment.attach(trainer.strategy.model, trainer.world_size, how)

    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        """Detaches."""
        self._attachment.detach()  # Lightning calls no teardown then

    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Detaches."""
        self._attachment.detach()

    def state_dict(self) -> dict:
        """Lightning calls it on every rank, and saves rank 0's."""
        return self._attachment.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        """Keeps a checkpoint's state for the next fit."""
        self._attachment.load_state_dict(state_dict)
