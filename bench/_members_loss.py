"""A rank of bench/members.py --parts loss.

It trains the transformer of bench/accuracy.py on characters, with as many microbatches a step however many ranks there
are.
"""

import argparse
import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # noqa: F401  (imported by the first DataParallel)
import torch.distributed as dist
from _members_rank import digest_of
from lib.characters import Characters, Transformer, character_loss
from lib.job import Teller
from torch import Tensor
from torch.utils.data import Dataset

import fusedcomm
from fusedcomm import members as _package  # noqa: F401  (imported before ranks are forked)

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


def begin(pipe: str, options: argparse.Namespace, founds: bool) -> tuple[Callable[..., None], Characters, tuple]:
    """Begins the process of a rank; founds: with the other first ones. (what tells the job, the text, a held-out
    batch)."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    say = Teller(pipe).say
    torch.manual_seed(options.seed)
    characters = Characters()
    test = next(characters.batches(seed=3, batch=HELD_OUT, test=True))
    if founds:
        store = dist.FileStore(str(Path(options.folder) / "store"), options.ranks)
        dist.init_process_group("gloo", store=store, rank=options.place, world_size=options.ranks)
    return say, characters, test


def train(pipe: str, options: argparse.Namespace, address: str | None) -> None:
    """The process of a rank. With `address`, a member's, it joins."""
    say, characters, test = begin(pipe, options, address is None)
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
