"""The ranks' digests: a bit that changes on the way ends training by name, in the next step."""

import datetime
import os
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from flipping_proxy import Flip, FlippingProxies
from models import Gradients, integers, mean_of_integers
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Checks, Config
from fusedcomm.native import _C

SHAPES = (300, 70), (500,), (90, 200)
STEPS = 6
TIMEOUT_S = 20


def train(rank, world_size, config, front_end):
    """Steps until an error. Returns (step of the error or STEPS, its text, the last comparison)."""
    model = Gradients(*SHAPES)
    if front_end == "ddp":
        module = DistributedDataParallel(model, bucket_cap_mb=0.1)
        comm = fusedcomm.attach(module, config)
    else:
        module = fusedcomm.DataParallel(model, config=config, bucket_mib=0.1)
        comm = module.comm
    return module, comm, [integers(rank, shape) for shape in SHAPES]


def steps(rank, world_size, config, front_end, between=None):
    module, comm, gradients = train(rank, world_size, config, front_end)
    step, text = 0, ""
    try:
        for step in range(STEPS):
            if step == 2 and between is not None:
                between()
            module.zero_grad()
            module(gradients).backward()
    except RuntimeError as error:
        text = str(error)
    found = comm.session.synchronizer.last_digests()
    return step, text, None if found is None else (found.first_pass, found.outvoted, found.links, found.means)


def steps_through(rank, world_size, ports, config, front_end):
    """steps() in a group whose connections pass the proxies. Bits are flipped from step 2 on."""
    dist.destroy_process_group()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.TCPStore("127.0.0.1", ports[rank], is_master=False)
        timeout = datetime.timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)

        def arm():
            store.set(f"ready/{rank}", "")
            store.wait(["armed"])

        return steps(rank, world_size, config, front_end, between=arm)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def flipped(ranks, flip, config="int8", front_end="ddp"):
    """The outcomes of both ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with FlippingProxies(server.port) as proxies:
        import threading

        def arm():
            server.wait(["ready/0", "ready/1"])
            proxies.flip = flip
            server.set("armed", "")

        threading.Thread(target=arm, daemon=True).start()
        return ranks.outcomes(steps_through, proxies.ports, config, front_end, world_size=2)
