"""What the jobs of the trainers' tests train: a small classifier, equal data in every run, different on each rank."""

import hashlib
import json
import os
from pathlib import Path

import torch
from torch import nn

NUM_ROWS = 3200
ACCUMULATED = 2
BATCH = 8
CLIPPED_TO = 0.5
LEARNING_RATE = 0.2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


def dataset() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_ROWS, 32, generator=generator)
    teacher = torch.randn(32, 8, generator=generator)
    return torch.utils.data.TensorDataset(inputs, (inputs @ teacher).argmax(dim=1))


class Classifier(nn.Module):
    """With the labels in its forward pass, as Transformers wants it. failing: whether that raises ArithmeticError."""

    def __init__(self, failing: bool = False) -> None:
        super().__init__()
        self.model, self.losses, self.failing = model(), [], failing

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.failing:
            raise ArithmeticError("on purpose")
        logits = self.model(inputs)
        loss = nn.functional.cross_entropy(logits, labels)
        self.losses.append(loss.item())
        return {"loss": loss, "logits": logits}


class Rows(torch.utils.data.Dataset):
    """The first `num_rows` of the data set by name."""

    def __init__(self, num_rows: int) -> None:
        self.tensors, self.num_rows = dataset(), num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, labels = self.tensors[index]
        return {"inputs": inputs, "labels": labels}


def lightning_trainer(**options: object):
    """A quiet Trainer of Lightning. `options`: further ones."""
    import lightning.pytorch as pl

    return pl.Trainer(
        accelerator="cpu",
        devices=2,
        accumulate_grad_batches=ACCUMULATED,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def transformers_arguments(folder: Path, max_steps: int, save_steps: int, saved: bool = True, **options: object):
    """TrainingArguments of Transformers. `options`: further ones."""
    import transformers

    return transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATED,
        max_steps=max_steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        save_strategy="steps" if saved else "no",
        save_steps=save_steps,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        seed=3,
        dataloader_num_workers=0,
        **options,
    )


def digest(trained: nn.Module) -> str:
    """A hash of all parameters."""
    values = torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()


def write(folder: Path, results: dict) -> None:
    """Writes what this rank has found for the test to read."""
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
