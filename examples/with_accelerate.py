"""Accelerate with fusedcomm: torchrun --nproc-per-node=2 with_accelerate.py"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fusedcomm.integrations.accelerate import attach

accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(640, 32), torch.randint(10, (640,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=16))
comm = attach(accelerator, model, "int8")
for inputs, labels in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()
print(comm)
comm.detach()
accelerator.end_training()
