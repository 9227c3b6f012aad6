"""What every benchmark shares: one row format, one JSON format, one way of taking turns on the clock."""

import dataclasses
import gc
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation in one case. `checked`: its result was compared, and found right, before it was timed."""

    case: str
    impl: str
    numel: int
    traffic_bytes: int
    """Bytes that have to be read and written at the least."""
    median_s: float
    best_s: float
    checked: bool
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    """Speed relative to other rows of the case, by medians: {"memcpy": 0.95} is 0.95 times as fast as memcpy."""


def with_ratios(rows: Sequence[Row], baselines: Sequence[str]) -> list[Row]:
    """The rows with their speed relative to those rows of the same case and numel whose impl is in `baselines`."""
    medians = {(row.case, row.numel, row.impl): row.median_s for row in rows}
    result = []
    for row in rows:
        found = {name: medians.get((row.case, row.numel, name)) for name in baselines if name != row.impl}
        ratios = {name: median_s / row.median_s for name, median_s in found.items() if median_s is not None}
        result.append(dataclasses.replace(row, ratios=ratios))
    return result


def interleave(functions: dict[str, Callable[[int], object]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds that each function took in each of `rounds` rounds; each is called with the number of the round.

    All take their turn in every round, in another order each time, so that whatever else the machine does falls on all.
    """
    names = list(functions)
    seconds = {name: [] for name in names}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for index in range(-warmup, rounds):
            first = index % len(names)
            for name in names[first:] + names[:first]:
                started = time.perf_counter()
                functions[name](max(index, 0))
                elapsed = time.perf_counter() - started
                if index >= 0:
                    seconds[name].append(elapsed)
    finally:
        if enabled:
            gc.enable()
    return seconds


def make_row(case: str, impl: str, numel: int, traffic_bytes: int, seconds: Sequence[float], checked: bool) -> Row:
    return Row(case, impl, numel, traffic_bytes, statistics.median(seconds), min(seconds), checked)


def print_table(rows: Sequence[Row]) -> None:
    """One line a row: sizes, times, rate at the median, what it is worth beside other rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row.ratios))
    width = max((len(row.case) for row in rows), default=4)
    impl_width = max((len(row.impl) for row in rows), default=4)
    headings = "".join(f" {'x ' + name:>15}" for name in columns)
    print(
        f"{'case':<{width}} {'impl':<{impl_width}} {'numel':>11} {'median us':>11} {'best us':>11} {'GB/s':>8}"
        f"{headings}  checked"
    )
    for row in rows:
        ratios = "".join(f" {row.ratios[name]:>15.2f}" if name in row.ratios else f" {'':>15}" for name in columns)
        print(
            f"{row.case:<{width}} {row.impl:<{impl_width}} {row.numel:>11} {row.median_s * 1e6:>11.1f} "
            f"{row.best_s * 1e6:>11.1f} {row.traffic_bytes / row.median_s / 1e9:>8.2f}{ratios}  "
            f"{'yes' if row.checked else 'NO'}"
        )


def env() -> dict[str, object]:
    """What the figures depend on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def write_json(path: str | os.PathLike, rows: Sequence[Row], **extra: object) -> None:
    """{"env": …, "rows": […]} and whatever else is given; env= replaces the one taken here."""
    document = {"env": extra.pop("env", None) or env(), **extra, "rows": [dataclasses.asdict(row) for row in rows]}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(document, indent=1) + "\n")


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The checkout's commit, marked where it has been changed since; None where there is no git or no commit."""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
