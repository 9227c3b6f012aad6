"""Measures the codec's stages on an accelerator. They cannot be called one by one there, so the engine traces them."""

import json
import statistics
import tempfile
from pathlib import Path

from torch.nn.parallel import DistributedDataParallel

from fusedcomm.config import ONE_DIMENSIONAL, Config
from fusedcomm.ddp.attach import attach
from fusedcomm.tools.cluster import codec_costs
from fusedcomm.tools.cost_model import DEFAULT_CAP_NBYTES
from fusedcomm.tools.probe.fit import Point
from fusedcomm.tools.probe.team import Team
from fusedcomm.tools.probe.workload import synthetic

# Elements of the buckets that are traced.
BUCKET_NUMELS = (DEFAULT_CAP_NBYTES // 32, DEFAULT_CAP_NBYTES // 8, DEFAULT_CAP_NBYTES // 4)
STAGES = ("pack", "reduce", "unpack")
"""The engine's codec stages. Not all sums have a reduce. Without it, unpack may be the sum of all ranks' messages."""
WARMUP_STEPS, STEPS = 3, 5
# Large enough that DDP makes one bucket.
ONE_BUCKET_MB = 1 << 20


def stage_points(team: Team, wire: str) -> dict[str, list[Point]]:
    """(elements of a chunk, seconds) by codec stage, for the stages of sums among these ranks. A collective call."""
    points = _points(team, wire, "auto")
    if "sum" in codec_costs(Config(wire).plan_of_large_buckets(team.world_size)):
        points["sum"] = points.pop("unpack")
        if wire in ("bf16", "fp16"):
            points["unpack"] = _points(team, wire, "direct")["unpack"]
    return points


def _points(team: Team, wire: str, sum: str) -> dict[str, list[Point]]:
    """(elements of a chunk, seconds on the slowest rank) by the engine's stage, with the given sum."""
    points: dict[str, list[Point]] = {}
    for numel in BUCKET_NUMELS:
        model, step, _ = synthetic(numel, team.device)
        ddp = DistributedDataParallel(model, process_group=team.group, init_sync=False, bucket_cap_mb=ONE_BUCKET_MB)
        handle = attach(ddp, Config(wire, sum, wires={ONE_DIMENSIONAL: wire}, hosts=None), quiet=True)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace-{rank}.json"
            for _ in range(WARMUP_STEPS):
                step(ddp).backward()
            with handle.trace(path):
                for _ in range(STEPS):
                    step(ddp).backward()
                team.settle()
            events = json.loads(Path(str(path).replace("{rank}", str(team.rank))).read_text())["traceEvents"]
        handle.detach()
        found = [event for event in events if event["ph"] == "X" and event["args"]["stage"] in STAGES]
        num_chunks = 1 + max(event["args"]["chunk"] for event in found)
        for stage in STAGES:
            seconds = [event["dur"] / 1e6 for event in found if event["args"]["stage"] == stage]
            if seconds:
                (slowest_s,) = team.slowest([statistics.median(seconds)])
                points.setdefault(stage, []).append((numel / num_chunks, slowest_s))
    return points
