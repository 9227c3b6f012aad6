"""What every benchmark shares: one row format, one JSON format, one way of taking turns on the clock."""

import ctypes
import dataclasses
import gc
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
MALLOPT_TRIM_THRESHOLD, MALLOPT_MMAP_MAX = -1, -4
"""Of glibc's malloc.h."""


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
    percentiles_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds, where the spread matters: {"p50": …, "p95": …}."""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """What else was measured, by names that tell the unit: {"wire_nbytes": …}."""


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p75, p90 and p95, between the two nearest values."""
    values = sorted(seconds)
    result = {}
    for percent in (50, 75, 90, 95):
        place = (len(values) - 1) * percent / 100
        low, high = values[math.floor(place)], values[math.ceil(place)]
        result[f"p{percent}"] = low + (high - low) * (place - math.floor(place))
    return result


def with_ratios(rows: Sequence[Row], baselines: Sequence[str]) -> list[Row]:
    """The rows with their speed relative to those rows of the same case and numel whose impl is in `baselines`."""
    medians = {(row.case, row.numel, row.impl): row.median_s for row in rows}
    result = []
    for row in rows:
        found = {name: medians.get((row.case, row.numel, name)) for name in baselines if name != row.impl}
        ratios = {name: median_s / row.median_s for name, median_s in found.items() if median_s is not None}
        result.append(dataclasses.replace(row, ratios=ratios))
    return result


def keep_memory() -> None:
    """What is freed stays with the process, as PyTorch's tuning guide has it by another allocator: otherwise
    whatever writes fresh tensors waits for the kernel to clear their pages. Only glibc can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for parameter, value in ((MALLOPT_TRIM_THRESHOLD, (1 << 31) - 1), (MALLOPT_MMAP_MAX, 0)):
        if mallopt is not None and mallopt(parameter, value) != 1:
            raise OSError(f"mallopt({parameter}, {value}) was refused")


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


def worst(errors: Sequence[float]) -> float:
    """The greatest, NaN if one is; max() passes over a NaN that does not come first."""
    return next((error for error in errors if error != error), max(errors))


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
        **_gpu_env(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def write_json(path: str | os.PathLike, rows: Sequence[Row], **extra: object) -> None:
    """{"env": …, "rows": […]} and whatever else is given; env= replaces the one taken here."""
    document = {"env": extra.pop("env", None) or env(), **extra, "rows": [dataclasses.asdict(row) for row in rows]}
    write_document(path, document)


def write_document(path: str | os.PathLike, document: dict) -> None:
    """At once: whoever reads meanwhile sees the old document or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document, indent=1) + "\n")
    unfinished.replace(path)


class Report:
    """The results of one run, in its JSON file (if there is one) as soon as they are known: a run may be killed.

    `extra` are further entries of the document; "dry_run" marks one whose times mean nothing.
    """

    def __init__(self, path: str | os.PathLike | None, **extra: object) -> None:
        self.path = path
        self.rows: list[Row] = []
        self.not_measured: list[dict[str, str]] = []
        self.wrong: list[str] = []
        self.extra = extra
        self.env = env()
        self.write()

    def add(self, rows: Sequence[Row]) -> None:
        self.rows += rows
        self.wrong += [f"{row.case} {row.impl}" for row in rows if not row.checked]
        self.write()

    def missing(self, case: str, impl: str, reason: object, *, failed: bool = True) -> None:
        """`failed`: something that should work did not; else there was nothing to measure here."""
        reason = (str(reason).strip() or type(reason).__name__).splitlines()[0][:300]
        print(f"{case} {impl}: not measured: {reason}", flush=True)
        self.not_measured.append({"case": case, "impl": impl, "reason": reason, "failed": failed})
        self.write()

    def write(self) -> None:
        if self.path:
            extra = {**self.extra, "not_measured": self.not_measured}
            write_json(self.path, self.rows, env=self.env, **extra)

    def finish(self) -> None:
        """Exits with 1 if a result was wrong or something that should work did not."""
        failed = [f"{entry['case']} {entry['impl']}" for entry in self.not_measured if entry["failed"]]
        problems = [f"wrong results: {', '.join(self.wrong)}"] if self.wrong else []
        problems += [f"not measured: {', '.join(failed)}"] if failed else []
        if problems:
            raise SystemExit("; ".join(problems))


def _gpu_env() -> dict[str, object]:
    """What is there of a GPU and its libraries; None for what is not."""
    gpu: dict[str, object] = dict.fromkeys(("gpu", "num_sms", "gpu_memory_nbytes", "nccl"))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu.update(gpu=properties.name, num_sms=properties.multi_processor_count)
        gpu.update(gpu_memory_nbytes=properties.total_memory)
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        gpu["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {**gpu, "driver": _driver_version(), "triton": _version("triton"), "nvrtc": _nvrtc_version()}


def _driver_version() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc_version() -> str | None:
    return next(filter(None, map(_version, ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"))), None)


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    return cpu_name(path.read_text() if path.exists() else "") or platform.processor() or platform.machine()


def cpu_name(cpuinfo: str) -> str:
    """By /proc/cpuinfo, with its generation: of virtual machines the name alone may be no more than the maker's. Empty
    if that does not say."""
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    generation = {"family": found.get("cpu family"), "model": found.get("model")}
    if "model name" not in found or None in generation.values():
        return found.get("model name", "")
    return f"{found['model name']} ({', '.join(map(' '.join, generation.items()))})"


def _commit() -> str | None:
    """The checkout's commit, marked where more than results has been changed since; None without git or a commit."""

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True)

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    except FileNotFoundError:
        return None
    return found.stdout.strip() + ("-dirty" if changed.stdout else "") if found.returncode == 0 else None
