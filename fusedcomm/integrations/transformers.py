"""Hugging Face Transformers: ``trainer.add_callback(FusedCommCallback(trainer, "bf16"))``."""

import functools
import inspect
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

from fusedcomm import files
from fusedcomm.autotune.auto import ConfigLike
from fusedcomm.config import LocalOptions
from fusedcomm.integrations.accelerate import ASKED_FOR_FSDP
from fusedcomm.integrations.attachment import Attachment, need

if TYPE_CHECKING:
    from fusedcomm.ddp.handle import Handle
    from fusedcomm.fsdp.handle import FsdpHandle

_TESTED = "Transformers 5.24"
_NAME = f"Transformers {transformers.__version__}"
_FILE = "fusedcomm.pt"
_HOW = "Transformers wraps it when the script runs under torchrun"


class FusedCommCallback(transformers.TrainerCallback):
    """Attaches fusedcomm when training begins, and detaches when it ends.

    Args:
        trainer: the Trainer that the callback is for. A callback sees neither the DDP module nor the folder that
            training resumes from, so ``trainer.train`` is wrapped to see the latter.
        config, local, quiet: as for :func:`fusedcomm.attach`.

    The attribute `handle` is what :func:`fusedcomm.attach` has returned; None outside training. A checkpoint's folder
    has its state in ``fusedcomm.pt``, which any number of ranks can load.

    Raises:
        RuntimeError: this version of Transformers lacks something that is needed.
    """

    def __init__(
        self,
        trainer: "transformers.Trainer",
        config: ConfigLike | None = None,
        *,
        local: LocalOptions | None = None,
        quiet: bool = False,
    ) -> None:
        need(transformers.TrainerCallback, ("on_train_begin", "on_save", "on_train_end"), _NAME, _TESTED)
        need(trainer, ("model_wrapped", "train"), _NAME, _TESTED)
        if "resume_from_checkpoint" not in inspect.signature(trainer.train).parameters:
            raise RuntimeError(
                f"fusedcomm: the train() of this {_NAME} has no argument resume_from_checkpoint, which says where "
                f"fusedcomm's state is loaded from. It is tested with {_TESTED}"
            )
        self._trainer = weakref.ref(trainer)
        self._attachment = Attachment(config, local=local, quiet=quiet)
        self._resumed_from: str | None = None
        _see_training(trainer, self)

    @property
    def handle(self) -> "Handle | FsdpHandle | None":
        """The handle that :func:`fusedcomm.attach` returned; None outside training."""
        return self._attachment.handle

    def on_train_begin(self, args, state, control, **_) -> None:
        """Attaches, with the state of the checkpoint that training resumes from. Called by Transformers."""
        trainer = self._trainer()
        if self._resumed_from is not None:
            self._attachment.load_state_dict(_saved_in(Path(self._resumed_from)))
        asked = ASKED_FOR_FSDP if getattr(args, "fsdp", None) else ""
        self._attachment.attach(trainer.model_wrapped, args.world_size, _HOW, asked_for_fsdp=asked)

    def on_save(self, args, state, control, **_) -> None:
        """Saves the state beside the checkpoint."""
        saved = self._attachment.state_dict()
        if saved and args.should_save:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)  # the checkpoints of a search's trial lie elsewhere
            with files.replacing(folder / _FILE) as file:
                torch.save(saved, file)

    def on_train_end(self, args, state, control, **_) -> None:
        """Detaches."""
        self._attachment.detach()


def _see_training(trainer: "transformers.Trainer", callback: FusedCommCallback) -> None:
    """Wraps ``trainer.train``: the callback sees the folder that training resumes from, and detaches after errors."""
    original, output_dir = trainer.train, trainer.args.output_dir
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train(*args, **kwargs):
        folder = signature.bind(*args, **kwargs).arguments.get("resume_from_checkpoint")
        if folder is True:
            folder = get_last_checkpoint(output_dir)
        callback._resumed_from = None if not folder else os.fspath(folder)
        try:
            return original(*args, **kwargs)
        finally:
            callback._attachment.detach()

    trainer.train = train


def _saved_in(folder: Path) -> dict:
    """The state in a checkpoint's folder; empty if there is none."""
    path = folder / _FILE
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else {}
