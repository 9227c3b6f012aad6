"""Elastic training: the job goes on when a rank is lost. Only the import differs from a script for Horovod.

    fusedcomm run -np 3 --elastic --min-np 2 python horovod_elastic.py

Kill one of the Python processes: the others restore the last commit from their memory and finish the epoch.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedcomm.horovod as hvd

NUM_CLASSES, NUM_FEATURES, NUM_EPOCHS = 10, 32, 3


def make_data(num_samples: int) -> TensorDataset:
    """Clouds of points, one for each class. The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(NUM_CLASSES, NUM_FEATURES, generator=generator)
    labels = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(num_samples, NUM_FEATURES, generator=generator), labels)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState, data: TensorDataset) -> float:
    """The loss of the last step, averaged over ranks."""
    mean = 0.0
    while state.epoch < NUM_EPOCHS:
        for index, (inputs, labels) in enumerate(DataLoader(data, batch_size=32, sampler=state.sampler)):
            state.optimizer.zero_grad()
            loss = F.cross_entropy(state.model(inputs), labels)
            loss.backward()
            state.optimizer.step()
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            state.sampler.record_batch(index, len(inputs))
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
    return mean


def main() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    torch.set_num_threads(1)
    data = make_data(2048)
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 128), nn.ReLU(), nn.Linear(128, NUM_CLASSES))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(data)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    loss = train(state, data)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks at the end, loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
