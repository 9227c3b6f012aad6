"""Lightning Fabric with fusedcomm: torchrun --nproc-per-node=2 with_fabric.py"""

import torch
from lightning.fabric import Fabric
from torch import nn

import fusedcomm

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = nn.Linear(256, 10)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
comm = fusedcomm.attach(model, "int8")
for _ in range(10):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(16, 256)), torch.randint(10, (16,)))
    fabric.backward(loss)
    optimizer.step()
print(comm)
comm.detach()
