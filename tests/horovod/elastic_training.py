"""A script that trains elastically and loses workers on purpose. test_elastic.py starts it.

    elastic_training.py FOLDER LOST_RANK AFTER_COMMITS [WAIT_FOR_SIZE]

The first process of rank LOST_RANK kills itself after AFTER_COMMITS commits, in the middle of a step. With
WAIT_FOR_SIZE training does not end before there are as many ranks again.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import fusedcomm.horovod as hvd

NUM_SAMPLES, NUM_EPOCHS, BATCH = 120, 2, 4
PATIENCE_S = 60

folder, lost_rank, after = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
wanted_size = int(sys.argv[4]) if len(sys.argv) > 4 else 0
first = {"rank": None, "loads": 0}

hvd.init()
first["rank"] = hvd.rank()
inputs = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(1))
targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
torch.manual_seed(hvd.rank())  # every rank's own: sync() must make them equal
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(NUM_SAMPLES), shuffle=True)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, num_steps=0, seen=[], losses=[], sizes=[])


def lose_this_worker() -> None:
    marker = folder / "lost"
    if hvd.rank() == lost_rank == first["rank"] and state.num_steps >= after and not marker.exists():
        marker.touch()
        # In the middle of a step: the others already wait for this rank's gradients.
        os.kill(os.getpid(), signal.SIGKILL)


def step(indices: list[int]) -> None:
    optimizer.zero_grad()
    loss = (model(inputs[indices]) - targets[indices]).square().mean()
    loss.backward()
    lose_this_worker()
    optimizer.step()
    sampler.record_batch(0, len(indices))
    everyone = hvd.allgather_object((indices, loss.item()))
    state.seen = state.seen + [(state.epoch, index) for each, _ in everyone for index in each]
    state.losses = state.losses + [sum(each for _, each in everyone) / hvd.size()]
    state.sizes = state.sizes + [hvd.size()]
    state.num_steps += 1
    state.commit()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    print(f"rank {hvd.rank()} of {hvd.size()} at step {state.num_steps}", flush=True)
    while state.epoch < NUM_EPOCHS:
        indices = list(sampler)
        for begin in range(0, len(indices), BATCH):
            step(indices[begin : begin + BATCH])
        state.epoch += 1
        sampler.set_epoch(state.epoch)
        state.commit()
        until = time.monotonic() + PATIENCE_S
        while wanted_size and state.epoch == 1 and hvd.size() < wanted_size and time.monotonic() < until:
            state.check_host_updates()


train(state)
if hvd.rank() == 0:
    result = {name: getattr(state, name) for name in ("seen", "losses", "sizes", "num_steps")}
    weights = model.weight.detach().flatten().tolist()
    about = {"size": hvd.size(), "weights": weights, "num_samples": NUM_SAMPLES, "num_epochs": NUM_EPOCHS}
    (folder / "result.json").write_text(json.dumps({**result, **about}))
