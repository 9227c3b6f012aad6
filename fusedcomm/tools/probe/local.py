"""Measures what happens on a rank itself: the codec's stages, DDP's copies, and how many cores a rank has.

All ranks measure at once, as in a step, because they may share memory and cores.
"""

import dataclasses
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fusedcomm import chunks
from fusedcomm.config import ONE_DIMENSIONAL, Chunks, Config, choose_codec_threads, choose_isa
from fusedcomm.native import _C
from fusedcomm.tools.cluster import Codec, codec_costs
from fusedcomm.tools.cost_model import DEFAULT_CAP_NBYTES
from fusedcomm.tools.probe.fit import Point, theil_sen
from fusedcomm.tools.probe.team import Team
from fusedcomm.tools.probe.traced import stage_points

CHUNK_PARTS = ((8, 2, 1), (8, 1), (1,))
"""Chunks are measured at the size that the engine gives them, divided by each of the first of these that fits the
budget. With one size the fixed part of a stage is taken to be 0."""
# Workspaces that take turns; few, so that they stay in the caches.
NUM_WORKSPACES = 4
NUM_BUCKETS = 4
"""Buckets that take turns; many, so that none is still in a cache when its turn comes again."""
NUM_STAGES, NUM_PASSES = 3, 3
"""Codec stages of a wire, and passes over a bucket that measuring one takes at least."""
MIN_BUCKET_SHARE = 1 / 8
"""Buckets are no smaller than this share of DDP's, however small the budget is: caches would hold them."""
# Repetitions of each measurement.
MIN_ROUNDS, MAX_ROUNDS = 1, 40


@dataclasses.dataclass(frozen=True)
class MeasuredLocal:
    """The costs on a rank itself."""

    codecs: dict[str, Codec]
    points: dict[str, dict[str, list[Point]]]
    """(elements, seconds) by wire and by stage, for the stages that sums among this many ranks have."""
    copy_s_per_byte: float
    cores: float | None
    """Cores of each rank. None: ranks compute on accelerators, which do not move bytes."""
    codec: str
    """What the codec's stages run on, in words."""


def measure_local(
    team: Team,
    wires: Sequence[str],
    cores: float | None,
    s_per_byte: float | None,
    budget_s: float,
) -> MeasuredLocal:
    """Measures each of the `wires` and "fp32". A collective call.

    On cuda, where this has not yet run on a GPU, stages are measured from traces and take no core of the model's.

    Args:
        cores: of this rank; None: they are counted.
        s_per_byte: seconds per byte of the link as attach times it, for the size of chunks; None: not timed.
    """
    on_cpu = team.device.type == "cpu"
    codec = _C.Codec(choose_isa(None), choose_codec_threads(None, team.world_size))
    began = time.perf_counter()
    copy_s_per_byte = _copy_s_per_byte(team, 0.1 * budget_s)
    cores = _agreed_cores(team, cores) if on_cpu else None
    points, codecs = {}, {}
    first = torch.randn(DEFAULT_CAP_NBYTES // 4, dtype=torch.float32)
    buckets = [first, *(first.clone() for _ in range(NUM_BUCKETS - 1))]
    wires = tuple(dict.fromkeys(("fp32", *wires)))
    for index, wire in enumerate(wires):
        if on_cpu:
            # A wire has an equal part of the time that the ones before it left.
            (left_s,) = team.slowest([budget_s - (time.perf_counter() - began)])
            points[wire] = _stages(team, codec, buckets, wire, s_per_byte, max(left_s, 0.0) / (len(wires) - index))
        else:
            points[wire] = stage_points(team, wire)
        codecs[wire] = Codec(**{stage: theil_sen(of_stage) for stage, of_stage in points[wire].items()})
    what = f"{codec.isa} × {codec.num_threads} thread(s)" if on_cpu else "on the GPU"
    return MeasuredLocal(codecs, points, copy_s_per_byte, cores, what)


def _plan(team: Team, wire: str, gradient: torch.Tensor, parts: int, s_per_byte: float | None) -> "_C.BucketPlan":
    """The plan of a bucket with this gradient, in chunks that are `parts` times smaller than the engine's."""
    default = chunks.resolved(Config(wire), team.world_size, team.device.type, s_per_byte).chunks.nbytes
    config = Config(wire, wires={ONE_DIMENSIONAL: wire}, chunks=Chunks(max(default // parts, 4096)))
    return _C.plan_bucket(chunks.native(config, team.world_size), team.world_size, gradient[:0], 0, gradient.numel())


def _fitting(
    team: Team, codec: "_C.Codec", bucket: torch.Tensor, wire: str, s_per_byte: float | None, budget_s: float
) -> tuple[tuple[int, ...], int]:
    """(the entry of CHUNK_PARTS that fits the budget, the elements of a bucket that do). A collective call.

    Packing the smallest bucket shows what a pass takes, on this machine and as busy as it is.
    """
    smallest = bucket[: int(MIN_BUCKET_SHARE * bucket.numel())]
    layout = _plan(team, wire, smallest, 1, s_per_byte).layout
    message = torch.zeros(layout.chunk_nbytes, dtype=torch.uint8)

    def pack() -> None:
        for chunk in range(layout.num_chunks):
            codec.pack(layout, chunk, [smallest], [], 1.0, message)

    (pass_s,) = team.time(pack, 1)
    of_a_size_s = NUM_STAGES * NUM_PASSES * pass_s / MIN_BUCKET_SHARE
    parts = next((parts for parts in CHUNK_PARTS if len(parts) * of_a_size_s <= budget_s), CHUNK_PARTS[-1])
    return parts, int(bucket.numel() * min(1.0, max(budget_s / of_a_size_s, MIN_BUCKET_SHARE)))


def _stages(
    team: Team,
    codec: "_C.Codec",
    buckets: list[torch.Tensor],
    wire: str,
    s_per_byte: float | None,
    budget_s: float,
) -> dict[str, list[Point]]:
    """(elements, seconds) of each stage, on chunks of DDP's buckets. Caches hold the workspaces but not the buckets."""
    if wire == "fp32":
        return _exact(team, codec, buckets[0], budget_s)
    points: dict[str, list[Point]] = {"pack": [], "unpack": []}
    chunk_parts, bucket_numel = _fitting(team, codec, buckets[0], wire, s_per_byte, budget_s)
    buckets = [bucket[:bucket_numel] for bucket in buckets]
    gradient = buckets[0]
    turn = itertools.cycle(buckets)
    for parts in chunk_parts:
        plan = _plan(team, wire, gradient, parts, s_per_byte)
        layout, num_messages = plan.layout, plan.steps[-1].num_ranks  # the last step unpacks this many
        slots = [torch.zeros(num_messages * layout.chunk_nbytes, dtype=torch.uint8) for _ in range(NUM_WORKSPACES)]
        sums = torch.zeros(layout.part_stride, dtype=torch.uint8)
        for chunk, slot in enumerate(slots):
            for message in slot.chunk(num_messages):
                codec.pack(layout, chunk % layout.num_chunks, [gradient], [], 1.0, message)

        def each(stage: Callable, layout=layout, slots=slots) -> Callable[[], None]:
            def run() -> None:
                bucket = next(turn)
                for chunk in range(layout.num_chunks):
                    stage(bucket, chunk, slots[chunk % len(slots)])

            return run

        def pack(bucket: torch.Tensor, chunk: int, slot: torch.Tensor, layout=layout) -> None:
            codec.pack(layout, chunk, [bucket], [], 1.0, slot[: layout.chunk_nbytes])

        def reduce(bucket: torch.Tensor, chunk: int, slot: torch.Tensor, layout=layout, sums=sums) -> None:
            codec.reduce(layout, slot, 1 / team.world_size, sums)

        def unpack(bucket: torch.Tensor, chunk: int, slot: torch.Tensor, layout=layout) -> None:
            codec.unpack(layout, chunk, slot[: layout.chunk_nbytes], 1.0, [bucket], [])

        def sum(bucket: torch.Tensor, chunk: int, slot: torch.Tensor, layout=layout, number=num_messages) -> None:
            codec.unpack(layout, chunk, slot, 1.0, [bucket], [], number)

        numel = gradient.numel() / layout.num_chunks
        stages = {"pack": pack, "reduce": reduce, "sum": sum, "unpack": unpack}
        # The stages of this plan, and the unpack of 16-bit all-reduces.
        stages = {name: stages[name] for name in dict.fromkeys((*codec_costs(plan), "unpack"))}
        for name, stage in stages.items():
            seconds = _timed(team, each(stage), budget_s / len(chunk_parts) / len(stages))
            points.setdefault(name, []).append((numel, seconds / layout.num_chunks))
    return points


def _exact(team: Team, codec: "_C.Codec", gradient: torch.Tensor, budget_s: float) -> dict[str, list[Point]]:
    """(elements, seconds) of the only stage of an exact sum: it scales the bucket in place."""
    points = []
    for parts in (8, 1):
        part = gradient[: gradient.numel() // parts]
        points.append((part.numel(), _timed(team, lambda part=part: codec.scale_in_place([part], 1.0), budget_s / 2)))
    return {"pack": points}


def _copy_s_per_byte(team: Team, budget_s: float) -> float:
    """Seconds per byte of a copy that is as long as one of DDP's buckets."""
    shape = (DEFAULT_CAP_NBYTES // 4,)
    pairs = [
        [torch.full(shape, value, dtype=torch.float32, device=team.device) for value in (0.0, 1.0)]
        for _ in range(NUM_BUCKETS)
    ]
    turn = itertools.cycle(pairs)

    def copy() -> None:
        source, target = next(turn)
        target.copy_(source)

    return _timed(team, copy, budget_s) / DEFAULT_CAP_NBYTES


def _timed(team: Team, function: Callable[[], object], budget_s: float) -> float:
    """The median seconds of `function`, over as many rounds as the budget allows."""
    (first_s,) = team.time(function, 1)
    rounds = min(max(int(budget_s / max(first_s, 1e-6)), MIN_ROUNDS), MAX_ROUNDS)
    return statistics.median([first_s, *team.time(function, rounds, warmup=0)])


# ---- cores


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Equal on ranks that share a kernel and therefore its cores, even in containers and network namespaces with different
host names."""


def _agreed_cores(team: Team, own: float | None) -> float:
    """The smallest number of cores of any rank: the one that its user gives, or the counted one. A collective call."""
    counted = cores_of_a_rank(team)
    return min(team.gather(counted if own is None else own))


def cores_of_a_rank(team: Team) -> float:
    """The cores that this machine lets its ranks use, divided by the number of these ranks. A collective call.

    They are counted, not measured: a measurement would treat another program's momentary load as permanent.
    """
    machine = BOOT_ID.read_text().strip() if BOOT_ID.exists() else platform.node()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    everyone = team.gather((machine, cores))
    of_machine = [set(theirs) for name, theirs in everyone if name == machine]
    return len(set.union(*of_machine)) / len(of_machine)
