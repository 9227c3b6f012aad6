"""fusedcomm's own channels over the ranks of a process group, or some of them, and the speed of their link."""

import dataclasses
import datetime
import os

import torch
import torch.distributed as dist

from fusedcomm.native import _C
from fusedcomm.ranks import torch_groups
from fusedcomm.ranks.groups import Group, group_timeout
from fusedcomm.ranks.hosts import Hosts
from fusedcomm.ranks.own_group import OwnGroup

# Threads of one channel's gloo context: as many of its all-reduces run at once. One all-reduce of 8 to 32 MiB uses half
# of a link; four chunks under way fill it.
GLOO_THREADS = 4

LINK_MESSAGES_NBYTES = ((2 << 10, 2 << 20), (128 << 10, 2 << 20), (1 << 20, 8 << 20))
"""Messages that time a link, as (bytes to each rank, most bytes to all ranks). The first gives the fixed time of a
message. The last is sent only if the second takes too little time."""
# All-to-alls of each message.
LINK_ROUNDS = 6
LONG_ENOUGH_S = 1e-3
"""Seconds beyond the first message's time that suffice: a busy machine adds less than that to most messages."""
MIN_S_PER_BYTE = 1e-11
"""Least result, in seconds a byte: no link is faster."""

MAX_CTAS_IN_HOST, MAX_CTAS_BETWEEN = 16, 8
"""Most thread blocks of NCCL's for the collectives of a channel, each of which takes a multiprocessor. Two channels
within hosts and one between them work at the same time. Together they fit onto the 40 multiprocessors of a T4, so none
waits for a multiprocessor that another holds while that one waits for a peer. NCCL's own choice is up to 64 for each. A
host's interface is slower than its links inside, and needs fewer. NCCL_MAX_CTAS overrides both."""


@dataclasses.dataclass(frozen=True)
class Channels:
    """fusedcomm's own backends: `scatter` for the first collective of a sum, `gather` for the second of a two-shot."""

    scatter: dist.Backend
    gather: dist.Backend


@dataclasses.dataclass(frozen=True)
class HostChannels:
    """fusedcomm's own backends for sums on two levels: `local` ones connect the ranks of a host, `cross` ones the ranks
    with the same number on every host."""

    local_scatter: dist.Backend
    local_gather: dist.Backend
    cross_scatter: dist.Backend
    cross_gather: dist.Backend


def make_channels(process_group: Group, device: torch.device, store: dist.Store) -> Channels:
    """Connects the ranks of `process_group` over two new gloo backends, with the group's timeout. A collective call."""
    timeout = group_timeout(process_group, device)
    rank, world_size = process_group.rank(), process_group.size()
    scatter, gather = (connect_gloo(store, name, rank, world_size, timeout) for name in ("scatter", "gather"))
    return Channels(scatter, gather)


def make_host_channels(process_group: Group, device: torch.device, store: dist.Store, hosts: Hosts) -> HostChannels:
    """Connects this rank with the ranks of its host, and with one rank on each other host. A collective call.

    On cuda each of the three wire streams has a communicator, so both collectives between hosts share one. The
    communicators are connected on return.
    """
    timeout = group_timeout(process_group, device)
    local_rank, host = hosts.place(process_group.rank())
    local = (local_rank, hosts.ranks_per_host, timeout)
    cross = (host, hosts.num_hosts, timeout)
    if device.type == "cuda":
        scatter = torch_groups.own_nccl(store, f"local scatter/{host}", *local, device, max_ctas=MAX_CTAS_IN_HOST)
        between = torch_groups.own_nccl(store, f"cross/{local_rank}", *cross, device, max_ctas=MAX_CTAS_BETWEEN)
        gather = torch_groups.own_nccl(store, f"local gather/{host}", *local, device, max_ctas=MAX_CTAS_IN_HOST)
        return HostChannels(scatter, gather, between, between)
    return HostChannels(
        connect_gloo(store, f"local scatter/{host}", *local),
        connect_gloo(store, f"local gather/{host}", *local),
        connect_gloo(store, f"cross scatter/{local_rank}", *cross),
        connect_gloo(store, f"cross gather/{local_rank}", *cross),
    )


def beside_group(process_group: Group, device: torch.device, store: dist.Store) -> OwnGroup:
    """The same ranks with an NCCL communicator of fusedcomm's own, which leaves the GPU to the model while a collective
    takes long, and delays none of `process_group`. A collective call."""
    rank, size, timeout = process_group.rank(), process_group.size(), group_timeout(process_group, device)
    backend = torch_groups.own_nccl(store, "own", rank, size, timeout, device, max_ctas=MAX_CTAS_BETWEEN)
    return OwnGroup(store, rank, size, timeout, {device.type: backend})


def with_hosts(
    transport: "_C.C10dTransport", process_group: Group, device: torch.device, store: dist.Store, hosts: Hosts
) -> "_C.C10dTransport":
    """`transport` with channels for sums on two levels. A collective call."""
    channels = make_host_channels(process_group, device, store, hosts)
    local_rank, host = hosts.place(process_group.rank())
    return _C.with_hosts(
        transport,
        local_rank=local_rank,
        ranks_per_host=hosts.ranks_per_host,
        host=host,
        num_hosts=hosts.num_hosts,
        **vars(channels),
    )


def connect_gloo(store: dist.Store, name: str, rank: int, size: int, timeout: datetime.timedelta) -> dist.Backend:
    """A new gloo backend over the ranks that call this with the same name. A collective call of these ranks."""
    try:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, _gloo_options(timeout))
    except dist.DistError:
        raise
    except RuntimeError as error:  # for example, the system has no thread left
        raise RuntimeError(
            f"fusedcomm: gloo's channel {name!r} over {size} ranks, with {GLOO_THREADS} threads and one for each "
            f"network device, could not be made: {error}"
        ) from error


def _gloo_options(timeout: datetime.timedelta) -> "dist.ProcessGroupGloo._Options":
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    # The interfaces that torch gives to a gloo group.
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [
        dist.ProcessGroupGloo.create_default_device()
    ]
    options._threads = GLOO_THREADS * len(options._devices)
    return options


def time_link(backend: dist.Backend) -> float | None:
    """Roughly the seconds for each byte that a rank sends in an all-to-all; equal on every rank. None for one rank.

    A collective call. It sends about 800 KiB to each rank, and 6 MiB more if that is too fast to measure, but at most
    60 MiB to all of them.
    """
    p = backend.size()
    if p == 1:
        return None
    (small, most), *larger = LINK_MESSAGES_NBYTES
    small_s = _C.all_to_all_s(backend, min(small, most // p), LINK_ROUNDS)
    for to_each, most in larger:
        nbytes = min(to_each, most // p)
        beyond_s = max(_C.all_to_all_s(backend, nbytes, LINK_ROUNDS) - small_s, 0.0)
        if beyond_s >= LONG_ENOUGH_S:
            break
    return max(beyond_s / ((p - 1) * nbytes), MIN_S_PER_BYTE)
