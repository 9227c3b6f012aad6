"""The Hugging Face Trainer with fusedcomm: torchrun --nproc-per-node=2 with_transformers.py"""

import torch
import transformers
from torch import nn

from fusedcomm.integrations.transformers import FusedCommCallback


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, inputs, labels):
        logits = self.model(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


data = [{"inputs": torch.randn(32), "labels": torch.tensor(index % 10)} for index in range(640)]
arguments = transformers.TrainingArguments("out", use_cpu=True, max_steps=20, save_strategy="no", report_to=[])
trainer = transformers.Trainer(Classifier(), arguments, train_dataset=data)
trainer.add_callback(FusedCommCallback(trainer, "int8"))
trainer.train()
