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
from fusedcomm.ddp.handle import Handle
from fusedcomm.integrations.accelerate import ASKED_FOR_FSDP
from fusedcomm.integrations.attachment import RANKS, Attachment, need

if TYPE_CHECKING:
    from fusedcomm.fsdp.handle import FsdpHandle

_TESTED = "Transformers 5.24"
_NAME = f"Transformers {transformers.__version__}"
# With DDP one file for each rank; with FSDP2 one for all, which is the same whatever their number.
_FILE, _FILE_OF_ALL = "fusedcomm_{rank}.pt", "fusedcomm.pt"
_HOW = "Transformers wraps it when the script runs under torchrun"


class FusedCommCallback(transformers.TrainerCallback):
    """Attaches fusedcomm when training begins, and detaches when it ends.

    Args:
        trainer: the Trainer that the callback is for. A callback sees neither the DDP module nor the folder that
            training resumes from, so ``trainer.train`` is wrapped to see the latter.
        config, local, quiet: as for :func:`fusedcomm.attach`.

    The attribute `handle` is what :func:`fusedcomm.attach` has returned; None outside training. A checkpoint's folder
    has one file for each rank, ``fusedcomm_0.pt`` and so on; with FSDP2 ``fusedcomm.pt`` alone.

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
            self._attachment.load_state_dict(_saved_in(Path(self._resumed_from), args))
        asked = ASKED_FOR_FSDP if getattr(args, "fsdp", None) else ""
        self._attachment.attach(trainer.model_wrapped, args.world_size, _HOW, asked_for_fsdp=asked)

    def on_save(self, args, state, control, **_) -> None:
        """Saves the state beside the checkpoint."""
        is_of_all = not isinstance(self.handle, Handle)
        saved = self._attachment.state_dict() if is_of_all else self._attachment.own_state()
        if saved and (args.should_save or not is_of_all):
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            folder.mkdir(parents=True, exist_ok=True)  # on a host without rank 0, and without a shared file system
            name = _FILE_OF_ALL if is_of_all else _FILE.format(rank=args.process_index)
            with files.replacing(folder / name) as file:
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


def _saved_in(folder: Path, args: "transformers.TrainingArguments") -> dict:
    """The state of all ranks in a checkpoint's folder, or this rank's; after a change of the number of ranks every
    rank's; else empty."""
    of_all = folder / _FILE_OF_ALL
    if of_all.exists():
        return torch.load(of_all, map_location="cpu", weights_only=True)
    own = folder / _FILE.format(rank=args.process_index)
    states = [torch.load(own, map_location="cpu", weights_only=True)] if own.exists() else []
    if not states or states[0]["world_size"] != args.world_size:
        paths = sorted(folder.glob(_FILE.format(rank="*")))
        states = [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
    return {RANKS: states} if states else {}
