"""Lightning's Trainer with fusedcomm: torchrun --nproc-per-node=2 with_lightning.py"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fusedcomm.integrations.lightning import FusedCommCallback


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch, index):
        inputs, labels = batch
        return nn.functional.cross_entropy(self.model(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = TensorDataset(torch.randn(640, 32), torch.randint(10, (640,)))
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    callbacks=[FusedCommCallback("int8")],
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=16))
