"""Two ranks of Lightning; see test_trainers.py."""

import logging
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import training
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from fusedcomm.integrations.lightning import FusedCommCallback

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
FOLDER = Path(sys.argv[1])


class Classifier(pl.LightningModule):
    def __init__(self, failing_at: int | None = None) -> None:
        super().__init__()
        self.model, self.losses, self.failing_at = training.model(), [], failing_at

    def training_step(self, batch, index):
        if index == self.failing_at:
            raise ArithmeticError("on purpose")
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=training.LEARNING_RATE, momentum=0.9)


def fit(callback=None, module=None, resumed=False, num_steps=training.NUM_STEPS) -> dict:
    module = module or Classifier()
    callbacks = [] if callback is None else [callback]
    if resumed is not None:
        callbacks.append(ModelCheckpoint(FOLDER, "{step}", every_n_train_steps=training.RESUMED_AT, save_top_k=-1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=True),
        max_steps=num_steps,
        max_epochs=1,
        accumulate_grad_batches=training.ACCUMULATED,
        gradient_clip_val=training.CLIPPED_TO,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = torch.utils.data.DataLoader(training.dataset(), training.BATCH, shuffle=False)
    path = FOLDER / f"step={training.RESUMED_AT}.ckpt"
    trainer.fit(module, loader, ckpt_path=path if resumed else None)
    return {"losses": module.losses, "digest": training.digest(module.model), "steps": trainer.global_step}


class Seen(FusedCommCallback):
    """Counts the steps of the handle, and of what it is detached from."""

    def on_train_end(self, trainer, pl_module):
        self.steps = self.handle.stats().steps


def main() -> None:
    results = {"plain": fit(resumed=None)}
    for wire in ("fp32", "int8"):
        callback = Seen(wire=wire)
        results[wire] = fit(callback, resumed=None)
        results[wire] |= {"synchronized": callback.steps, "detached": callback.handle is None}
    for every_rank in (True, False):
        for name in FOLDER.glob("*.ckpt"):
            name.unlink(missing_ok=True)
        suffix = "every rank" if every_rank else "mean"
        results[f"feedback, {suffix}"] = fit(FusedCommCallback(training.FEEDBACK, every_rank=every_rank))
        results[f"resumed, {suffix}"] = fit(FusedCommCallback(training.FEEDBACK, every_rank=every_rank), resumed=True)
    callback = FusedCommCallback(wire="bf16")
    try:
        fit(callback, Classifier(failing_at=3), resumed=None)
    except ArithmeticError:
        results["after an error"] = {"detached": callback.handle is None}
    training.write(FOLDER, results)


main()
