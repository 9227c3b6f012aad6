"""What happens on a rank itself: the codec's stages, DDP's copies, and how many cores a rank really has. All ranks at
once, as in a step, since they may share memory and cores."""

import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import torch

from fusedcomm import env
from fusedcomm.config import Config, choose_codec_threads, choose_isa
from fusedcomm.cost_model import DEFAULT_CAP_NBYTES, Codec
from fusedcomm.native import _C
from fusedcomm.probe.fit import Point, theil_sen
from fusedcomm.probe.team import Team

CHUNK_PARTS = (8, 2, 1)
"""Chunks are measured at so many parts of the size that the engine gives them."""
MIN_ROUNDS, MAX_ROUNDS = 3, 15
WORK_NUMEL = 1 << 15
"""Of what a thread works on to see how many cores there are: stays in a core's own cache."""


@dataclasses.dataclass(frozen=True)
class MeasuredLocal:
    codecs: dict[str, Codec]
    points: dict[str, dict[str, list[Point]]]
    """By wire and stage: (elements, seconds)."""
    copy_s_per_byte: float
    cores: float
    isa: str
    codec_threads: int
    seconds: float
    """That measuring took."""


def measure_local(team: Team, wires: Sequence[str], budget_s: float, cores: float | None = None) -> MeasuredLocal:
    """A collective call, for gradients on CPU. `cores`: of a rank, if it is known."""
    began = time.perf_counter()
    codec = _C.Codec(choose_isa(None), choose_codec_threads(None, team.world_size))
    copy_s_per_byte = _copy_s_per_byte(team, 0.1 * budget_s)
    if cores is None:
        cores = measure_cores(team, 0.1 * budget_s)
    points, codecs = {}, {}
    for wire in dict.fromkeys(("fp32", *wires)):
        points[wire] = _stages(team, codec, wire, 0.8 * budget_s / (len(wires) + 1))
        codecs[wire] = Codec(**{stage: theil_sen(points[wire][stage]) for stage in ("pack", "reduce", "unpack")})
    seconds = time.perf_counter() - began
    return MeasuredLocal(codecs, points, copy_s_per_byte, cores, codec.isa, codec.num_threads, seconds)


def _stages(team: Team, codec: "_C.Codec", wire: str, budget_s: float) -> dict[str, list[Point]]:
    """On chunks of a bucket as DDP makes them, which no cache holds, and workspaces that do stay in caches."""
    if wire == "fp32":
        return _exact(team, codec, budget_s)
    points: dict[str, list[Point]] = {"pack": [], "reduce": [], "unpack": []}
    default = Config(wire=wire).chunk_nbytes_for(team.world_size, team.device.type)
    gradient = torch.randn(DEFAULT_CAP_NBYTES // 4)
    for parts in CHUNK_PARTS:
        config = Config(wire=wire, sum="two-shot", exempt=(), chunk_nbytes=max(default // parts, 4096))
        plan = _C.plan_bucket(config.native(team.world_size), team.world_size, gradient[:0], 0, gradient.numel())
        layout = plan.layout
        slots = [torch.zeros(layout.chunk_nbytes, dtype=torch.uint8) for _ in range(config.chunks_in_flight)]
        sums = torch.zeros(layout.part_stride * team.world_size, dtype=torch.uint8)
        for chunk, slot in enumerate(slots):
            codec.pack(layout, chunk % layout.num_chunks, [gradient], [], 1.0, slot)

        def each(stage: Callable, layout=layout, slots=slots) -> Callable[[], None]:
            def run() -> None:
                for chunk in range(layout.num_chunks):
                    stage(chunk, slots[chunk % len(slots)])

            return run

        def pack(chunk: int, slot: torch.Tensor, layout=layout) -> None:
            codec.pack(layout, chunk, [gradient], [], 1.0, slot)

        def reduce(chunk: int, slot: torch.Tensor, layout=layout, sums=sums) -> None:
            # The copies are what an all-gather over gloo sends.
            codec.reduce(layout, slot, 1 / team.world_size, sums, team.world_size)

        def unpack(chunk: int, slot: torch.Tensor, layout=layout) -> None:
            codec.unpack(layout, chunk, slot, 1.0, [gradient], [])

        numel = gradient.numel() / layout.num_chunks
        for name, stage in (("pack", pack), ("reduce", reduce), ("unpack", unpack)):
            seconds = _timed(team, each(stage), budget_s / len(CHUNK_PARTS) / len(points))
            points[name].append((numel, seconds / layout.num_chunks))
    return points


def _exact(team: Team, codec: "_C.Codec", budget_s: float) -> dict[str, list[Point]]:
    """A bucket in its own memory is scaled there, once."""
    points = []
    gradient = torch.randn(DEFAULT_CAP_NBYTES // 4)
    for parts in (8, 1):
        part = gradient[: gradient.numel() // parts]
        points.append((part.numel(), _timed(team, lambda part=part: codec.scale_in_place([part], 1.0), budget_s / 2)))
    return {"pack": points, "reduce": [(1, 0.0)], "unpack": [(1, 0.0)]}


def _copy_s_per_byte(team: Team, budget_s: float) -> float:
    source, target = torch.ones(DEFAULT_CAP_NBYTES // 4), torch.zeros(DEFAULT_CAP_NBYTES // 4)
    return _timed(team, lambda: target.copy_(source), budget_s) / DEFAULT_CAP_NBYTES


def _timed(team: Team, function: Callable[[], object], budget_s: float) -> float:
    """The median, by as many rounds as there is time for."""
    (first_s,) = team.time(function, 1)
    rounds = min(max(int(budget_s / max(first_s, 1e-6)), MIN_ROUNDS), MAX_ROUNDS)
    return statistics.median([first_s, *team.time(function, rounds, warmup=0)])


# ---- cores


def measure_cores(team: Team, budget_s: float) -> float:
    """That a rank has for itself while all ranks work, by what as many threads of all ranks get done together as there
    are cores for them, beside one thread alone: hosts may share a machine, and two cores may be two halves of one."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = max(1, available // (env.local_world_size() or 1))
    work_s = 0.02
    begin = time.perf_counter()
    _work(100)
    num_repeats = max(1, round(100 * work_s / (time.perf_counter() - begin)))
    num_repeats = int(team.mean([float(num_repeats)])[0])
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(budget_s / 4 / work_s)))
    # The least of all rounds: how cores are shared shows when nothing else disturbs, and what does would count twice.
    alone_s = min(team.time(lambda: _work(num_repeats) if team.rank == 0 else None, rounds))
    together_s = min(team.time(lambda: _on_threads(num_threads, num_repeats), rounds))
    return min(num_threads * alone_s / together_s, float(num_threads))


def _work(num_repeats: int) -> None:
    values = torch.ones(WORK_NUMEL)
    for _ in range(num_repeats):
        values.mul_(1.0)  # without the GIL


def _on_threads(num_threads: int, num_repeats: int) -> None:
    threads = [threading.Thread(target=_work, args=(num_repeats,)) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
