"""The machines of ``fusedcomm plan``. Every field with a help text is an option of the command, and every default is an
assumption that is printed. Loads no torch, so that a wrong option is answered at once.

costs.py turns these into the inputs of cost_model.py.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator

from fusedcomm.tools.arguments import number, whole

# Bytes that a hop of the tree carries at a time.
TREE_PIECE_NBYTES = 256 << 10
TREE_RATE = 0.9
"""A tree's rate as a share of a ring's: NCCL's own figure (busBw * .9)."""
RING_PLATEAU = 1.9
"""Factor on the latencies of a ring through several hosts: NCCL's own figure, which it uses for all messages except
short ones. Short messages take NCCL's faster protocols, which are not modeled."""
# Messages of an all-to-all that a rank has in flight at a time; an assumption.
MESSAGES_UNDER_WAY = 16
GLOO_RING = 5
"""Latencies of a step of gloo's ring. An all-reduce of two ranks, which has two steps, took 1.4 to 2.3 ms, and an
all-to-all 0.2 ms."""


def described(
    default: object, parse: Callable[[str], float], help: str | None = None, aliases: tuple[str, ...] = ()
) -> object:
    """A field that `parse` checks. Without `help` it is no option of the command."""
    metadata = {"parse": parse, "help": help, "aliases": aliases}
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Hosts:
    """What all machines have.

    Raises:
        ValueError: a field is out of range; names its option, its value and what is possible.
    """

    ranks: int = described(dataclasses.MISSING, whole(2), "processes that train, one on each GPU, or on CPU hosts")
    ranks_per_host: int = described(1, whole(1), "ranks on each host", ("--gpus-per-host",))
    nic_gbps: float = described(
        25.0, number(above=0), "line rate of a host, all its NICs together, each way, in Gbit/s"
    )
    efficiency: float = described(0.926, number(above=0, most=1), "share of that rate that gradients can use")
    nic_latency_us: float = described(9.6, number(least=0), "latency of a hop between hosts, in µs")
    local_gbps: float = described(
        200.0,
        number(above=0),
        "Gbit/s from a rank to others on its host; GPUs: PCIe 4.0 about 200, NVLink 4 about 3000",
    )
    local_latency_us: float = described(5.7, number(least=0), "latency of a hop within a host, in µs")
    memory_gbytes_per_s: float = described(
        1500.0, number(above=0), "memory rate of a GPU, or of a core of a CPU, in GB/s"
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "parse" not in field.metadata:
                continue
            try:
                field.metadata["parse"](str(getattr(self, field.name)))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{option_of(field)} {error}") from None
        if self.ranks % self.ranks_per_host:
            raise ValueError(
                f"--ranks {self.ranks} do not fill hosts of --ranks-per-host {self.ranks_per_host}: use a multiple of "
                f"{self.ranks_per_host}"
            )

    @property
    def num_hosts(self) -> int:
        """Hosts, each with `ranks_per_host` ranks."""
        return self.ranks // self.ranks_per_host


def option_of(field: dataclasses.Field) -> str:
    """The option of a field; its name if it is no option."""
    return "--" + field.name.replace("_", "-") if field.metadata["help"] else field.name


def options_of(hosts: type[Hosts]) -> Iterator[tuple[str, dataclasses.Field]]:
    """(option, field) of the fields that are options, in their order."""
    for field in dataclasses.fields(hosts):
        if field.metadata.get("help"):
            yield option_of(field), field


@dataclasses.dataclass(frozen=True)
class GpuHosts(Hosts):
    """Accelerators over NCCL."""

    launch_us: float = described(8.4, number(least=0))
    """Time to launch a collective."""
    tree: bool = True
    """Whether all-reduces may take a tree."""
    codec_share: float = described(0.25, number(above=0, most=1))
    """Share of the memory rate that fusedcomm's kernels reach beside the backward pass."""
    kernel_us: float = described(10.0, number(least=0))
    """Time to launch one of fusedcomm's kernels, with the events around it."""
    slowdown: float = described(
        0.4, number(least=0), "GPU: how much collectives lengthen the backward pass, as a share of their time"
    )
    """See cluster.Cluster."""

    def assumptions(self) -> dict[str, str]:
        """The assumptions and their sources, by topic, in the order in which they are printed."""
        said = {
            "ranks": f"{self.ranks}: {self.num_hosts} hosts × {self.ranks_per_host} GPUs, all alike and always equally "
            "fast",
            "between hosts": f"{self.nic_gbps:g} Gbit/s each way per host; gradients can use "
            f"{self.efficiency:g} of it (0.926: RoCE, 1024 bytes in 1106 on the wire); the switch is never the limit",
            "latency between hosts": f"{self.nic_latency_us:g} µs a hop (9.6: NCCL's own model, src/graph/tuning.cc)",
        }
        if self.ranks_per_host > 1:
            said["within a host"] = (
                f"{self.local_gbps:g} Gbit/s each way per GPU, {self.local_latency_us:g} µs a hop (NCCL's model: 5.7 "
                "over PCIe, 3.4 over NVLink)"
            )
        return said | {
            "all-reduce": f"NCCL's ring, {RING_PLATEAU} × these latencies between hosts"
            + (
                f", or its tree, in pieces of {TREE_PIECE_NBYTES >> 10} KiB at {TREE_RATE} of a ring's rate, where "
                "the tree is faster"
                if self.tree
                else " (no tree)"
            ),
            "all-to-all": f"{MESSAGES_UNDER_WAY} messages of a GPU in flight at a time (assumed, no source)",
            "collectives": f"one after another on one stream, {self.launch_us:g} µs each to launch (NCCL's model)",
            "memory": f"{self.memory_gbytes_per_s:g} GB/s; gradients are copied into buckets and out of them, each "
            "byte read and written at that rate (no gradient_as_bucket_view); fusedcomm's kernels reach "
            f"{self.codec_share:g} of it, and take {self.kernel_us:g} µs more each (assumed, not measured on a GPU)",
            "slowdown": f"the backward pass is longer by {self.slowdown:g} of the time that collectives and "
            "kernels run beside it (0.4: roughly fitted to PyTorch's benchmarks/distributed/ddp/README.md)",
        }


def _with_default(name: str, default: float) -> object:
    """The field of Hosts with this name, with another default."""
    return dataclasses.field(default=default, metadata=Hosts.__dataclass_fields__[name].metadata)


@dataclasses.dataclass(frozen=True)
class CpuHosts(Hosts):
    """Hosts that train on their cores, over gloo and TCP. Defaults of latencies, rates and core times are rounded from
    a measurement of two hosts with one core of an AMD EPYC each."""

    efficiency: float = _with_default("efficiency", 0.949)
    nic_latency_us: float = _with_default("nic_latency_us", 200.0)
    local_gbps: float = _with_default("local_gbps", 8.0)
    local_latency_us: float = _with_default("local_latency_us", 200.0)
    memory_gbytes_per_s: float = _with_default("memory_gbytes_per_s", 10.0)
    cores: float = described(1.0, number(above=0), "CPU: cores of a rank")
    tcp_ns_per_byte: float = described(1.0, number(least=0), "CPU: core time of a byte that is sent over TCP, in ns")
    codec_ns: float = described(0.3, number(least=0), "CPU: core time of a codec stage for a gradient, in ns")

    def assumptions(self) -> dict[str, str]:
        """As GpuHosts.assumptions."""
        measured = "rounded from a measurement: AMD EPYC, torch 2.13"
        said = {
            "ranks": f"{self.ranks}: {self.num_hosts} hosts × {self.ranks_per_host} ranks with {self.cores:g} cores "
            "each, which compute with all of them; all alike and always equally fast",
            "between hosts": f"{self.nic_gbps:g} Gbit/s each way per host; gradients can use {self.efficiency:g} of it "
            "(0.949: TCP over Ethernet); the switch is never the limit",
            "latency between hosts": f"{self.nic_latency_us:g} µs a message over gloo (200: {measured})",
        }
        if self.ranks_per_host > 1:
            said["within a host"] = (
                f"{self.local_gbps:g} Gbit/s each way per rank, {self.local_latency_us:g} µs a message (assumed)"
            )
        return said | {
            "all-reduce": f"gloo's ring; each of its steps takes {GLOO_RING} of these latencies (measured with 2 ranks "
            "only)",
            "all-to-all": f"{MESSAGES_UNDER_WAY} messages of a rank in flight at a time (assumed, no source)",
            "cores": f"sending a byte takes {self.tcp_ns_per_byte:g} ns of a core, a codec stage {self.codec_ns:g} ns "
            f"for each gradient on one thread (1 and 0.3: {measured}); what finds no idle core delays the backward "
            "pass",
            "memory": f"{self.memory_gbytes_per_s:g} GB/s for a core (10: {measured}); gradients are copied into "
            "buckets and out of them, each byte read and written at that rate (no gradient_as_bucket_view)",
        }


DEVICES: dict[str, type[Hosts]] = {"gpu": GpuHosts, "cpu": CpuHosts}
"""By the value of --device."""
