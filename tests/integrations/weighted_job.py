"""Two ranks whose batches have unequal numbers of labels, in one of the trainers; see test_trainers.py.

The recipes of docs/weights.md: losses are sums, weights are numbers of labels, and nothing is scaled twice.
"""

import logging
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import training
from torch import nn

from fusedcomm import Config

warnings.simplefilter("ignore")
NUM_STEPS = 3
WEIGHTED = Config("fp32", weighted="sum")
NO_LABEL = -100


def rows() -> torch.utils.data.TensorDataset:
    """Rows of which most have no label; how many do differs from batch to batch."""
    inputs, labels = training.dataset().tensors
    generator = torch.Generator().manual_seed(2)
    share = torch.rand(len(labels) // training.BATCH, generator=generator).repeat_interleave(training.BATCH)
    labels = torch.where(torch.rand(len(labels), generator=generator) < share**3, labels, NO_LABEL)
    return torch.utils.data.TensorDataset(inputs, labels)


def sum_of_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum")


def count(labels: torch.Tensor) -> int:
    return int((labels != NO_LABEL).sum())


def with_accelerate(seen: list) -> nn.Module:
    from accelerate import Accelerator

    from fusedcomm.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=training.ACCUMULATED)
    model = training.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=training.LEARNING_RATE)
    loader = torch.utils.data.DataLoader(rows(), training.BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    comm = attach(accelerator, model, WEIGHTED, quiet=True)
    for inputs, labels in loader:
        seen.append((inputs, labels))
        with accelerator.accumulate(model):
            # backward() divides the loss by the number of passes.
            comm.weight = count(labels) / accelerator.gradient_accumulation_steps
            accelerator.backward(sum_of_losses(model(inputs), labels))
            optimizer.step()
            optimizer.zero_grad()
        if len(seen) == NUM_STEPS * training.ACCUMULATED:
            return accelerator.unwrap_model(model)
    raise AssertionError("too few rows")


def with_lightning(seen: list) -> nn.Module:
    import lightning.pytorch as pl

    from fusedcomm.integrations.lightning import FusedCommCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = FusedCommCallback(WEIGHTED, quiet=True)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model()

        def training_step(self, batch, index):
            inputs, labels = batch
            seen.append((inputs, labels))
            # Lightning divides the loss by the number of passes.
            callback.handle.weight = count(labels) / self.trainer.accumulate_grad_batches
            return sum_of_losses(self.model(inputs), labels)

        def configure_optimizers(self):
            return torch.optim.SGD(self.model.parameters(), lr=training.LEARNING_RATE)

    module = Classifier()
    trainer = training.lightning_trainer(
        strategy="ddp", max_steps=NUM_STEPS, callbacks=[callback], enable_checkpointing=False
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows(), training.BATCH))
    return module.model


def with_transformers(seen: list) -> nn.Module:
    import transformers

    from fusedcomm.integrations.transformers import FusedCommCallback

    transformers.logging.set_verbosity_error()

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = training.model()

        def forward(self, inputs, labels=None):
            seen.append([inputs])
            return {"logits": self.model(inputs)}

    class Rows(training.Rows):
        def __init__(self) -> None:
            self.tensors, self.num_rows = rows(), len(rows())

    def loss(outputs, labels, num_items_in_batch=None):
        seen[-1].append(labels)
        callback.handle.weight = count(labels)  # of this pass; num_items_in_batch is of all passes of the step
        return sum_of_losses(outputs["logits"], labels)

    # Otherwise the Trainer multiplies the loss by the number of ranks.
    arguments = training.transformers_arguments(
        Path(sys.argv[2]) / "run", NUM_STEPS, 1, saved=False, average_tokens_across_devices=False, max_grad_norm=0.0
    )
    module = Classifier()
    trainer = transformers.Trainer(module, arguments, train_dataset=Rows(), compute_loss_func=loss)
    callback = FusedCommCallback(trainer, WEIGHTED, quiet=True)
    trainer.add_callback(callback)
    trainer.train()
    return module.model


def in_one_process(seen: list[list]) -> nn.Module:
    """Trained with the batches that every rank has seen."""
    model = training.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=training.LEARNING_RATE)
    for step in range(NUM_STEPS):
        passes = range(step * training.ACCUMULATED, (step + 1) * training.ACCUMULATED)
        batches = [of_rank[number] for of_rank in seen for number in passes]
        total = sum(count(labels) for _, labels in batches)
        optimizer.zero_grad()
        for inputs, labels in batches:
            (sum_of_losses(model(inputs), labels) / total).backward()
        optimizer.step()
    return model


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main() -> None:
    seen: list = []
    trained = flat(
        {"accelerate": with_accelerate, "lightning": with_lightning, "transformers": with_transformers}[sys.argv[1]](
            seen
        )
    )
    everybodys: list = [None, None]
    dist.all_gather_object(everybodys, [tuple(each) for each in seen])
    expected, start = flat(in_one_process(everybodys)), flat(training.model())
    counts = [[count(labels) for _, labels in of_rank] for of_rank in everybodys]
    error = float((trained - expected).norm() / (expected - start).norm())
    training.write(Path(sys.argv[2]), {"error": error, "counts": counts})


main()
