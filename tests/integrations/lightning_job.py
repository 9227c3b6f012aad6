"""Two ranks of Lightning; see test_trainers.py."""

import logging
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import training
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import fusedcomm
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


def fit(callback=None, module=None, resumed=None, **of_strategy) -> dict:
    """Two epochs of half the data: within an epoch Lightning does not find the batch where it stopped.

    Args:
        resumed: False: saves after each epoch. True: goes on with the second epoch. None: neither.
        of_strategy: further arguments of DDPStrategy.
    """
    module = module or Classifier()
    callbacks = [] if callback is None else [callback]
    if resumed is not None:
        callbacks.append(ModelCheckpoint(FOLDER, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(find_unused_parameters=True, **of_strategy),
        max_epochs=2,
        accumulate_grad_batches=training.ACCUMULATED,
        gradient_clip_val=training.CLIPPED_TO,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=resumed is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    dataset = training.dataset()
    half = torch.utils.data.Subset(dataset, range(len(dataset) // 2))
    loader = torch.utils.data.DataLoader(half, training.BATCH, shuffle=False)
    trainer.fit(module, loader, ckpt_path=FOLDER / "epoch=0.ckpt" if resumed else None)
    return {"losses": module.losses, "digest": training.digest(module.model), "steps": trainer.global_step}


class Seen(FusedCommCallback):
    """Keeps the handle's number of steps."""

    def on_train_end(self, trainer, pl_module):
        self.steps = self.handle.stats().steps


def with_fabric(wire: str | None) -> dict:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = training.model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=training.LEARNING_RATE))
    comm = None if wire is None else fusedcomm.attach(model, wire)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(training.dataset(), training.BATCH))
    losses = []
    for index, (inputs, labels) in enumerate(loader, 1):
        is_last = index % training.ACCUMULATED == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            losses.append(loss.item())
            fabric.backward(loss)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=training.CLIPPED_TO)
            optimizer.step()
            optimizer.zero_grad()
    result = {"losses": losses, "digest": training.digest(model), "steps": index // training.ACCUMULATED}
    if comm is not None:
        result["synchronized"] = comm.stats().steps
        comm.detach()
    return result


def main() -> None:
    results = {"plain": fit()}
    for wire in ("fp32", "int8"):
        callback = Seen(wire)
        results[wire] = fit(callback)
        results[wire] |= {"synchronized": callback.steps, "detached": callback.handle is None}
    for every_rank in (True, False):
        for name in FOLDER.glob("*.ckpt"):
            name.unlink(missing_ok=True)  # else Lightning saves under another name
        suffix = "every rank" if every_rank else "mean"
        results[f"feedback, {suffix}"] = fit(FusedCommCallback(training.FEEDBACK, every_rank=every_rank), resumed=False)
        results[f"resumed, {suffix}"] = fit(FusedCommCallback(training.FEEDBACK, every_rank=every_rank), resumed=True)
    for wire in (None, "fp32", "int8"):
        results[f"Fabric, {wire or 'plain'}"] = with_fabric(wire)
    callback = FusedCommCallback("bf16")
    try:
        fit(callback, Classifier(failing_at=3))
    except ArithmeticError:
        results["after an error"] = {"detached": callback.handle is None}
    warnings.simplefilter("default")
    fit(ddp_comm_state=fusedcomm.CommState("int8"), ddp_comm_hook=fusedcomm.comm_hook)
    training.write(FOLDER, results)


main()
