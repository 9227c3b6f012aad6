"""The costs that follow from the machines of hardware.py: the inputs of cost_model.py.

Over NCCL, latencies come from the model by which it chooses its algorithms (src/graph/tuning.cc of NCCL 2.8). With p
ranks on H hosts, L = p/H ranks on each, a latency of aₙ for a hop between hosts and aₗ for one within a host, and c for
a launch:

    ring all-reduce    c + r·(2(H−1)·aₙ + 2(p−H)·aₗ)     2(p−1) steps; r = 1.9 with several hosts, else 1
    tree all-reduce    c + 2·log₂H·aₙ' + 2(L−1)·aₗ'      each hop carries a piece of 256 KiB: a' = a + 256 KiB/rate
    ring all-gather    c + (H−1)·aₙ + (p−H)·aₗ

An all-to-all has one message for each peer. We assume that 16 of them are in flight at a time:

    all-to-all         c + ⌈(p−L)/16⌉·aₙ + ⌈(L−1)/16⌉·aₗ

Over gloo there is no tree and no launch, r is 5, and an all-gather of the engine is an all-to-all.
"""

import math

from fusedcomm.chunks import nbytes_per_element
from fusedcomm.config import WIRES
from fusedcomm.tools.cluster import Cluster, Codec, Cost, Network, TwoLevels
from fusedcomm.tools.plan.hardware import (
    GLOO_RING,
    MESSAGES_UNDER_WAY,
    RING_PLATEAU,
    TREE_PIECE_NBYTES,
    TREE_RATE,
    CpuHosts,
    GpuHosts,
)

CODEC_STAGE_S = 3e-6
"""CPU: the fixed part of a codec stage, rounded from a measurement."""


def cluster_of(hosts: GpuHosts | CpuHosts) -> Cluster:
    """The costs that follow from the assumptions."""
    network, local = _networks(hosts, two_levels=False)
    on_cpu = isinstance(hosts, CpuHosts)
    return Cluster(
        world_size=hosts.ranks,
        network=network,
        codecs={wire: _codec_on_cpu(hosts) if on_cpu else _codec_on_gpu(hosts, wire) for wire in WIRES},
        copy_s_per_byte=2 / (1e9 * hosts.memory_gbytes_per_s),  # each byte is read and written
        cores=hosts.cores if on_cpu else None,
        timed_s_per_byte=network.exchange.per_unit_s if on_cpu else None,
        ranks_per_host=hosts.ranks_per_host,
        local=local if hosts.ranks_per_host > 1 else None,
        two_levels=TwoLevels(*_networks(hosts, two_levels=True)),
        slowdown=0.0 if on_cpu else hosts.slowdown,
    )


def rates(hosts: GpuHosts | CpuHosts) -> tuple[float, float]:
    """Bytes per second (of a host to others, of a rank to others on its host)."""
    return 1e9 / 8 * hosts.nic_gbps * hosts.efficiency, 1e9 / 8 * hosts.local_gbps


def _networks(hosts: GpuHosts | CpuHosts, two_levels: bool) -> tuple[Network, Network]:
    """The networks (between hosts, within a host).

    Args:
        two_levels: exchanges and all-gathers have the ranks of one host, or one rank of each host, instead of all.
    """
    if isinstance(hosts, CpuHosts):
        launch, tree, plateau, cpu_s_per_byte = 0.0, False, GLOO_RING, 1e-9 * hosts.tcp_ns_per_byte
    else:
        launch, tree, cpu_s_per_byte = 1e-6 * hosts.launch_us, hosts.tree, 0.0
        plateau = RING_PLATEAU if hosts.num_hosts > 1 else 1
    p, num_hosts, per_host = hosts.ranks, hosts.num_hosts, hosts.ranks_per_host
    hop, local_hop = (us * 1e-6 for us in (hosts.nic_latency_us, hosts.local_latency_us))
    between, within = (1 / rate for rate in rates(hosts))
    tree_hop, local_tree_hop = hop + TREE_PIECE_NBYTES * between, local_hop + TREE_PIECE_NBYTES * within
    peers, gather_steps = (num_hosts - 1, num_hosts - 1) if two_levels else (p - per_host, num_hosts - 1)
    # A collective is launched once. If it has both levels, the launch is part of its cost between hosts.
    local_launch = launch if two_levels or num_hosts == 1 else 0.0
    local_gather_steps = per_host - 1 if two_levels else p - num_hosts
    ring = 2 * plateau
    on_streams = isinstance(hosts, GpuHosts)
    network = Network(
        all_reduce=Cost(launch + ring * (num_hosts - 1) * hop, between),
        exchange=Cost(launch + math.ceil(peers / MESSAGES_UNDER_WAY) * hop, between),
        cpu_s_per_byte=cpu_s_per_byte,
        tree=Cost(launch + 2 * math.log2(num_hosts) * tree_hop, between / TREE_RATE) if tree else None,
        gather=Cost(launch + gather_steps * hop, between) if on_streams else None,
    )
    all_reduce_launch = launch if num_hosts == 1 else 0.0
    local = Network(
        all_reduce=Cost(all_reduce_launch + ring * (p - num_hosts) * local_hop, within),
        exchange=Cost(local_launch + math.ceil((per_host - 1) / MESSAGES_UNDER_WAY) * local_hop, within),
        cpu_s_per_byte=cpu_s_per_byte,
        tree=Cost(all_reduce_launch + 2 * (per_host - 1) * local_tree_hop, within / TREE_RATE) if tree else None,
        gather=Cost(local_launch + local_gather_steps * local_hop, within) if on_streams else None,
    )
    return network, local


def _codec_on_gpu(hosts: GpuHosts, wire: str) -> Codec:
    """Costs by the bytes that each stage reads and writes for an element of fp32 gradients, with w bytes in the
    wire: pack 4 + w, reduce w (the p-th part that it writes is left out), unpack w + 4, sum p·w + 4."""
    rate = 1e9 * hosts.memory_gbytes_per_s * hosts.codec_share
    w = nbytes_per_element(wire)
    kernel = hosts.kernel_us * 1e-6
    pack = Cost(kernel, 8 / rate) if wire == "fp32" else Cost(kernel, (4 + w) / rate)
    reduce, unpack = Cost(kernel, w / rate), Cost(kernel, (w + 4) / rate)
    return Codec(pack, reduce, unpack, sum=Cost(kernel, (hosts.ranks * w + 4) / rate))


def _codec_on_cpu(hosts: CpuHosts) -> Codec:
    """Every stage takes as long for each gradient. A sum decodes those of all ranks, of which there are two or more."""
    stage = Cost(CODEC_STAGE_S, 1e-9 * hosts.codec_ns)
    return Codec(stage, stage, stage, sum=Cost(CODEC_STAGE_S, 1e-9 * hosts.codec_ns * hosts.ranks / 2))
