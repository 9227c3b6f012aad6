"""A script for Horovod: a small classifier on synthetic data. horovod_after.py is the same on fusedcomm.

horovodrun -np 2 python horovod_before.py
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

NUM_CLASSES, NUM_FEATURES = 10, 32


def make_data(num_samples: int) -> TensorDataset:
    """Clouds of points, one for each class. The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=generator)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(num_samples, NUM_FEATURES, generator=generator), labels)


def main() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())  # the broadcast below makes the models equal
    torch.set_num_threads(1)
    data = make_data(2048)
    sampler = DistributedSampler(data, hvd.size(), hvd.rank())
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16,
    )
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with torch.no_grad():
            inputs, labels = data.tensors
            mine = slice(hvd.rank(), None, hvd.size())
            right = (model(inputs[mine]).argmax(1) == labels[mine]).float().mean()
        accuracy = hvd.allreduce(right, name="accuracy").item()
        if hvd.rank() == 0:
            print(f"epoch {epoch}: {accuracy:.1%} right", flush=True)


if __name__ == "__main__":
    main()
