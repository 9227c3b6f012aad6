"""Two ranks of a trainer with a model that FSDP2 shards; see test_trainers_with_fsdp2.py.

Arguments: the trainer, a folder.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import training
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fusedcomm
from fusedcomm import Config, Feedback

NUM_STEPS, SAVED_AT = 8, 4
TRAINER, FOLDER = sys.argv[1], Path(sys.argv[2])
FEEDBACK = Config("int8", feedback=Feedback(unsharded=True))
ROWS = training.Rows(2 * SAVED_AT * training.ACCUMULATED * training.BATCH)  # of two ranks until the first save
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")


def result(model: nn.Module, losses: list[float], comm: fusedcomm.Handle | None) -> dict:
    whole = nn.ParameterList(p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    is_sharded = all(isinstance(p, DTensor) for p in model.parameters())
    found = {"by": TRAINER, "losses": losses, "digest": training.digest(whole), "sharded": is_sharded}
    return found if comm is None else {**found, "synchronized": comm.stats().steps, "handle": repr(comm)}


def with_lightning(config: Config | None, folder: Path, resumed: bool) -> dict:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    from fusedcomm.integrations.lightning import FusedCommCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.of = training.Classifier()

        def configure_model(self):
            for layer in (*self.of.model, self.of):
                if next(layer.parameters(), None) is not None and not isinstance(
                    layer, torch.distributed.fsdp.FSDPModule
                ):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            return self.of(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.of.parameters(), lr=training.LEARNING_RATE, momentum=0.9)

        def on_train_end(self):
            self.result = result(self.of, self.of.losses, callbacks[1].handle if config else None)

    callbacks = [ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1)]
    if config is not None:
        callbacks.append(FusedCommCallback(config))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_epochs=2,
        accumulate_grad_batches=training.ACCUMULATED,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(ROWS, training.BATCH)
    trainer.fit(module, loader, ckpt_path=folder / "epoch=0.ckpt" if resumed else None)
    return module.result


def _sharding_on_cpu() -> None:
    """Accelerate shards on accelerators only. This makes it take the same path on CPU."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)  # of an earlier training, which was not sharded
    original = AcceleratorState.__init__

    def init(self, *args, fsdp_plugin=None, **kwargs) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = init


def with_accelerate(config: Config | None, folder: Path, resumed: bool) -> dict:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    from fusedcomm.integrations.accelerate import attach

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=training.ACCUMULATED, fsdp_plugin=plugin)
    model = inner = training.Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=training.LEARNING_RATE, momentum=0.9)
    loader = torch.utils.data.DataLoader(ROWS, training.BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    comm = None if config is None else attach(accelerator, model, config)
    if resumed:
        accelerator.load_state(folder)
    for epoch in (1,) if resumed else (0, 1):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(folder)
    found = result(model, inner.losses, comm)
    if comm is not None:
        comm.detach()
    accelerator.free_memory()
    return found


def with_transformers(config: Config | None, folder: Path, resumed: bool) -> dict:
    import transformers

    from fusedcomm.integrations.transformers import FusedCommCallback

    class Seen(FusedCommCallback):
        def on_train_end(self, args, state, control, **kwargs):
            self.result = result(model, model.losses, self.handle)
            super().on_train_end(args, state, control, **kwargs)

    model = training.Classifier()
    sharding = {
        "version": 2,
        "transformer_layer_cls_to_wrap": ["Linear"],
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    arguments = training.transformers_arguments(folder, NUM_STEPS, SAVED_AT, fsdp=True, fsdp_config=sharding)
    trainer = transformers.Trainer(model, arguments, train_dataset=ROWS)
    callback = None
    if config is not None:
        callback = Seen(trainer, config)
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AT}") if resumed else None)
    return callback.result if callback else result(model, model.losses, None)


def main() -> None:
    train = {"lightning": with_lightning, "accelerate": with_accelerate, "transformers": with_transformers}[TRAINER]
    results = {}
    if TRAINER != "lightning":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results["DDP instead"] = train(Config("fp32"), FOLDER / "DDP", resumed=False)
        results["warned"] = [str(each.message) for each in caught if "asked for FSDP" in str(each.message)]
        _sharding_on_cpu()
    for name, config in {
        "plain": None,
        "fp32": Config("fp32"),
        "int4": Config("int4"),
        "feedback": FEEDBACK,
    }.items():
        results[name] = train(config, FOLDER / name, resumed=False)
        results[f"{name}, resumed"] = train(config, FOLDER / name, resumed=True)
    training.write(FOLDER, results)


main()
