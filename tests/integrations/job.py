"""Two ranks of a trainer, with DDP or with a model that FSDP2 shards; see test_trainers.py.

Arguments: the trainer, "ddp" or "fsdp2", a folder.
"""

import os
import sys
import warnings
from pathlib import Path

import torch
import training
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import fusedcomm
from fusedcomm import Config, Feedback

TRAINER, WAY, FOLDER = sys.argv[1], sys.argv[2], Path(sys.argv[3])
NUM_STEPS = {"ddp": 100, "fsdp2": 8}[WAY]
"""In two epochs. What is resumed goes on with the second one: within an epoch Lightning does not find the batch where
it stopped."""
ROWS = training.Rows(2 * NUM_STEPS // 2 * training.ACCUMULATED * training.BATCH)  # of two ranks in an epoch
os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")


def result(model: nn.Module, losses: list[float], comm: "fusedcomm.Handle | None", accumulated: int) -> dict:
    whole = nn.ParameterList(p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
    is_sharded = all(isinstance(p, DTensor) for p in model.parameters())
    found = {"losses": losses, "digest": training.digest(whole), "sharded": is_sharded}
    steps = {} if comm is None else {"steps": len(losses) // accumulated, "synchronized": comm.stats().steps}
    return {**found, **steps, "handle": repr(comm)}


# ---- trainers: each trains a Classifier, and may raise its ArithmeticError


def with_lightning(options: dict | None, folder: Path, resumed: bool, failing: bool = False, **of_strategy) -> dict:
    """of_strategy: further arguments of DDPStrategy."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from fusedcomm.integrations.lightning import FusedCommCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.of = training.Classifier(failing)

        def configure_model(self):
            for layer in (*self.of.model, self.of):
                has_parameters = next(layer.parameters(), None) is not None
                if WAY == "fsdp2" and has_parameters and not isinstance(layer, FSDPModule):
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            return self.of(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.of.parameters(), lr=training.LEARNING_RATE, momentum=0.9)

        def on_train_end(self):
            # Lightning's strategy for FSDP2 reduces in every pass that it accumulates.
            accumulated = 1 if WAY == "fsdp2" else training.ACCUMULATED
            self.result = result(self.of, self.of.losses, callback.handle if callback else None, accumulated)

    callback = None if options is None else FusedCommCallback(**options)
    if WAY == "fsdp2":
        strategy, clipped_to = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1), None
    else:
        strategy, clipped_to = DDPStrategy(find_unused_parameters=True, **of_strategy), training.CLIPPED_TO
    trainer = training.lightning_trainer(
        strategy=strategy,
        max_epochs=2,
        gradient_clip_val=clipped_to,
        callbacks=[
            ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1),
            *filter(None, [callback]),
        ],
    )
    module = Module()
    loader = torch.utils.data.DataLoader(ROWS, training.BATCH, shuffle=False)
    try:
        trainer.fit(module, loader, ckpt_path=folder / "epoch=0.ckpt" if resumed else None)
    except ArithmeticError:
        return {"detached": callback.handle is None}
    return {**module.result, "detached": callback is None or callback.handle is None}


def with_fabric(wire: str | None) -> dict:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    inner = training.Classifier()
    model, optimizer = fabric.setup(inner, torch.optim.SGD(inner.parameters(), lr=training.LEARNING_RATE))
    comm = None if wire is None else fusedcomm.attach(model, wire)
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(ROWS, training.BATCH))
    for index, batch in enumerate(loader, 1):
        is_last = index % training.ACCUMULATED == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(model(**batch)["loss"])
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=training.CLIPPED_TO)
            optimizer.step()
            optimizer.zero_grad()
    found = result(inner, inner.losses, comm, training.ACCUMULATED)
    if comm is not None:
        comm.detach()
    return found


def sharding_on_cpu() -> None:
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


def with_accelerate(options: dict | None, folder: Path, resumed: bool) -> dict:
    from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

    from fusedcomm.integrations.accelerate import attach

    if WAY == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Linear"]
        )
        of_way = {"fsdp_plugin": plugin}
    else:
        of_way = {"kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)]}
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=training.ACCUMULATED, **of_way)
    model = inner = training.Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=training.LEARNING_RATE, momentum=0.9)
    loader = torch.utils.data.DataLoader(ROWS, training.BATCH, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    comm = None if options is None else attach(accelerator, model, **options)
    if resumed:
        accelerator.load_state(folder)
    for epoch in (1,) if resumed else (0, 1):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if WAY == "ddp" and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), training.CLIPPED_TO)
                optimizer.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(folder)
    found = result(model, inner.losses, comm, training.ACCUMULATED)
    if comm is not None:
        comm.detach()
    accelerator.free_memory()
    return found


def with_transformers(options: dict | None, folder: Path, resumed: bool, failing: bool = False) -> dict:
    import transformers

    from fusedcomm.integrations.transformers import FusedCommCallback

    transformers.logging.set_verbosity_error()

    class Seen(FusedCommCallback):
        def on_train_end(self, args, state, control, **kwargs):
            self.result = result(model, model.losses, self.handle, training.ACCUMULATED)
            super().on_train_end(args, state, control, **kwargs)

    sharding = {"version": 2, "transformer_layer_cls_to_wrap": ["Linear"], "state_dict_type": "SHARDED_STATE_DICT"}
    of_way = {
        "ddp": {"max_grad_norm": training.CLIPPED_TO, "ddp_find_unused_parameters": True},
        "fsdp2": {"fsdp": True, "fsdp_config": sharding},
    }[WAY]
    model = training.Classifier(failing)
    arguments = training.transformers_arguments(folder, NUM_STEPS, NUM_STEPS // 2, **of_way)
    trainer = transformers.Trainer(model, arguments, train_dataset=ROWS)
    callback = None
    if options is not None:
        callback = Seen(trainer, **options)
        trainer.add_callback(callback)
    try:
        trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{NUM_STEPS // 2}") if resumed else None)
    except ArithmeticError:
        return {"detached": callback.handle is None}
    if callback is None:
        return result(model, model.losses, None, training.ACCUMULATED)
    return {**callback.result, "detached": callback.handle is None}


# ---- what is trained


def runs() -> dict[str, dict | None]:
    """The options by name; None: without fusedcomm."""
    found = {"plain": None, "fp32": {"config": "fp32"}}
    if WAY == "fsdp2":
        return {**found, "codes": {"config": "int8"}}
    return {
        **found,
        "int8": {"config": "int8"},
        "feedback": {"config": Config("int8", "one-shot", feedback=Feedback())},
    }


def main() -> None:
    train = {"lightning": with_lightning, "accelerate": with_accelerate, "transformers": with_transformers}[TRAINER]
    results = {}
    if WAY == "fsdp2" and TRAINER != "lightning":
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            results["DDP instead"] = train({"config": "fp32"}, FOLDER / "DDP", resumed=False)
        warned = [str(each.message) for each in caught if "asked for FSDP" in str(each.message)]
        results["DDP instead"]["warned"] = warned
        sharding_on_cpu()
    for name, options in runs().items():
        results[name] = train(options, FOLDER / name, resumed=False)
        if WAY == "fsdp2" or "feedback" in name:
            results[f"{name}, resumed"] = train(options, FOLDER / name, resumed=True)
    if WAY == "ddp" and TRAINER != "accelerate":
        results["after an error"] = train({"config": "bf16"}, FOLDER / "failing", resumed=False, failing=True)
    if WAY == "ddp" and TRAINER == "lightning":
        for wire in (None, "fp32", "int8"):
            results[f"Fabric, {wire or 'plain'}"] = with_fabric(wire)
        warnings.simplefilter("default")
        hook = {"ddp_comm_state": fusedcomm.CommState("int8"), "ddp_comm_hook": fusedcomm.comm_hook}
        with_lightning(None, FOLDER / "hook", resumed=False, **hook)
    training.write(FOLDER, results)


main()
