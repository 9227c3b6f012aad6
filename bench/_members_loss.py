"""A rank of bench/members.py --parts loss: `_members_loss.py PIPE OPTIONS`. With place -1 it waits, and joins later.

Trains the transformer of bench/accuracy.py on characters, with eight microbatches a step however many ranks there are.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _members_rank import digest_of
from accuracy import Characters, Transformer, character_loss
from lib.job import Teller
from torch import Tensor
from torch.utils.data import Dataset

import fusedcomm
from fusedcomm import members as _package  # noqa: F401  (imported before a rank waits to join)

WINDOWS = 4
"""Pieces of text in a microbatch."""
HELD_OUT = 256
SLOW_STEP_S = 0.2
"""Added to a step while a rank is missing, so that another one has joined before many steps are over."""


class Windows(Dataset):
    """Pieces of text, one after the other: (inputs, targets), int64 [CONTEXT]."""

    def __init__(self, characters: Characters) -> None:
        self._codes = characters.train

    def __len__(self) -> int:
        return (len(self._codes) - 1) // Characters.CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * Characters.CONTEXT
        piece = self._codes[begin : begin + Characters.CONTEXT + 1].long()
        return piece[:-1], piece[1:]


def train(options: argparse.Namespace, say: Callable) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    characters = Characters()
    test = next(characters.batches(seed=3, batch=HELD_OUT, test=True))
    address = None
    if options.place < 0:
        say(waits=True)
        address = sys.stdin.readline().strip()
    else:
        store = dist.FileStore(str(Path(options.folder) / "store"), options.ranks)
        dist.init_process_group("gloo", store=store, rank=options.place, world_size=options.ranks)
    members = fusedcomm.Members(join=address, microbatches=options.microbatches)
    model = Transformer()
    config = fusedcomm.Config(options.wire, weighted="mean")
    parallel = fusedcomm.DataParallel(model, config=config, members=members, quiet=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total_iters=options.steps)
    members.carry(optimizer=optimizer, schedule=schedule)
    data = Windows(characters)
    sampler = fusedcomm.MembersSampler(data, members, batch_size=WINDOWS, seed=options.seed)
    loader = iter(torch.utils.data.DataLoader(data, batch_sampler=sampler))
    while members.step < options.steps:
        if members.size < options.ranks:
            time.sleep(SLOW_STEP_S)
        optimizer.zero_grad()
        losses = []
        for left in range(members.share, 0, -1):
            with parallel.no_sync() if left > 1 else contextlib.nullcontext():
                loss = character_loss(parallel, next(loader))
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        schedule.step()
        told = {"step": members.step, "size": members.size, "losses": losses, "address": members.address}
        say(digest=digest_of(model), **told)
    with torch.no_grad():
        say(ended=True, loss=character_loss(model, test).item(), steps=members.step)
    members.leave()
    os._exit(0)


if __name__ == "__main__":
    train(argparse.Namespace(**json.loads(sys.argv[2])), Teller(sys.argv[1]).say)
