"""A rank of the job that bench/members.py kills ranks of: `_members_rank.py WAY PIPE OPTIONS`, or `lighthouse`.

It trains until it is killed. Its model sleeps, as if an accelerator computed.
"""

import argparse
import datetime
import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from lib.job import Teller
from torch import nn

WIDTH = 256


def digest_of(module: nn.Module) -> str:
    """A short text that differs if a bit of the parameters does."""
    return hashlib.sha1(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()[:16]


class Work:
    """A model and its batches, each rank's own. `passes` counts backward passes that were begun."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        depth = max(1, round(options.kill_params / WIDTH**2))
        self.model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])
        self.compute_s, self.passes = options.compute_ms / 1e3, 0
        self._generator = torch.Generator().manual_seed(options.place)

    def backward(self, module: nn.Module) -> None:
        """A forward and a backward pass."""
        time.sleep(self.compute_s)
        batch = torch.randn(2, WIDTH, generator=self._generator)
        loss = module(batch).square().mean()
        self.passes += 1
        loss.backward()

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)


def members(options: argparse.Namespace, say: Callable) -> None:
    import fusedcomm

    store = dist.FileStore(str(Path(options.folder) / "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=options.place, world_size=options.ranks)
    joined = fusedcomm.Members(min_ranks=1)
    work = Work(options)
    model = fusedcomm.DataParallel(work.model, config="fp32", members=joined, quiet=True)
    optimizer = work.optimizer()
    joined.carry(optimizer=optimizer)
    while True:
        optimizer.zero_grad()
        work.backward(model)
        optimizer.step()
        changes = model.comm.stats().changes
        pause_s = changes[-1].pause_s if changes else 0.0
        say(step=joined.step, size=joined.size, passes=work.passes, digest=digest_of(work.model), pause_s=pause_s)


def horovod(options: argparse.Namespace, say: Callable) -> None:
    import fusedcomm.horovod as hvd

    hvd.init()
    options.place = hvd.rank()
    work = Work(options)
    optimizer = hvd.DistributedOptimizer(work.optimizer(), named_parameters=work.model.named_parameters())
    state = hvd.elastic.TorchState(work.model, optimizer, steps=0)

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while True:
            optimizer.zero_grad()
            work.backward(work.model)
            optimizer.step()
            state.steps += 1
            if state.steps % options.commit_every == 0:
                state.commit()
            say(step=state.steps, size=hvd.size(), passes=work.passes, digest=digest_of(work.model))

    train(state)


def torchft(options: argparse.Namespace, say: Callable) -> None:
    import torchft as ft

    work = Work(options)
    inner = work.optimizer()

    def state_dict() -> dict:
        return {"model": work.model.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict) -> None:
        work.model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    # The times are those of torchft's own example of training.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = ft.Manager(
        pg=ft.ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        timeout=datetime.timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"replica_{options.place}",
        hostname="127.0.0.1",
    )
    optimizer = ft.Optimizer(manager, inner)
    while True:
        before = manager.current_step()
        optimizer.zero_grad()
        work.backward(work.model)
        # Not by torchft's DistributedDataParallel: with torch 2.13 its hook raises AssertionError when a sum fails.
        for sum_of_ranks in [manager.allreduce(parameter.grad) for parameter in work.model.parameters()]:
            sum_of_ranks.wait()
        optimizer.step()
        size, step = manager.num_participants(), manager.current_step()
        if step > before:
            say(step=step, size=size, passes=work.passes, digest=digest_of(work.model))


def lighthouse(options: argparse.Namespace, say: Callable) -> None:
    from torchft.coordination import LighthouseServer

    # The times are those of torchft's own example.
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10000, quorum_tick_ms=100)
    say(lighthouse=f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
    sys.stdin.read()


WAYS = {way.__name__: way for way in (members, horovod, torchft, lighthouse)}


def main() -> None:
    way, pipe, options = sys.argv[1:]
    torch.set_num_threads(1)
    WAYS[way](argparse.Namespace(**json.loads(options)), Teller(pipe).say)


if __name__ == "__main__":
    main()
