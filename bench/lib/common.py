"""Shared by every benchmark: the row format, the JSON format, and timing in turns."""

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
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import NoReturn, TypeVar

import torch

T = TypeVar("T")

REPOSITORY = Path(__file__).resolve().parents[2]
MALLOPT_TRIM_THRESHOLD, MALLOPT_MMAP_MAX = -1, -4
"""Parameters of mallopt(), as glibc's malloc.h numbers them."""

LINE_WIDTH, ROW_WIDTH = 118, 500
"""Most characters of a line of a JSON file; the second where it holds an item of a list, such as a row."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The times of one implementation in one case."""

    case: str
    impl: str
    numel: int
    traffic_bytes: int
    """The fewest bytes that have to be read and written."""
    median_s: float
    best_s: float
    # Whether the result was compared before it was timed, and was right.
    checked: bool
    ratios: dict[str, float] = dataclasses.field(default_factory=dict)
    """Speed relative to other rows of the case, by medians: {"memcpy": 0.95} means 0.95 times as fast as memcpy."""
    percentiles_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds, where the spread matters: {"p50": …, "p95": …}. Otherwise empty."""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """Other measured values. Their names give the unit: {"wire_nbytes": …}."""


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p75, p90 and p95 of `seconds`, interpolated between the two nearest values."""
    values = sorted(seconds)
    result = {}
    for percent in (50, 75, 90, 95):
        place = (len(values) - 1) * percent / 100
        low, high = values[math.floor(place)], values[math.ceil(place)]
        result[f"p{percent}"] = low + (high - low) * (place - math.floor(place))
    return result


def with_ratios(rows: Sequence[Row], baselines: Sequence[str]) -> list[Row]:
    """The rows with `ratios`: their speed relative to the rows of the same case and numel whose impl is a baseline."""
    medians = {(row.case, row.numel, row.impl): row.median_s for row in rows}
    result = []
    for row in rows:
        found = {name: medians.get((row.case, row.numel, name)) for name in baselines if name != row.impl}
        ratios = {name: median_s / row.median_s for name, median_s in found.items() if median_s is not None}
        result.append(dataclasses.replace(row, ratios=ratios))
    return result


def keep_memory() -> None:
    """Makes malloc keep freed memory in the process. Otherwise code that writes fresh tensors would wait for the kernel
    to clear their pages. PyTorch's tuning guide recommends another allocator for the same effect.

    Does nothing where the C library is not glibc. Raises OSError if glibc refuses."""
    _mallopt((MALLOPT_TRIM_THRESHOLD, (1 << 31) - 1), (MALLOPT_MMAP_MAX, 0))


def drop_memory() -> None:
    """Frees objects that refer to each other, and gives the system what keep_memory() has kept so far."""
    gc.collect()
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)


def _mallopt(*settings: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for parameter, value in settings:
        if mallopt is not None and mallopt(parameter, value) != 1:
            raise OSError(f"mallopt({parameter}, {value}) was refused")


def interleave(functions: dict[str, Callable[[int], object]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds that each function took in each of `rounds` rounds. A function is called with the round's number.

    Every function runs once in every round, in another order each time, so that other load on the machine affects all
    of them alike. `warmup` rounds come first and are not timed.
    """
    seconds = {name: [] for name in functions}
    enabled = gc.isenabled()
    gc.disable()
    try:
        for index in range(-warmup, rounds):
            for name in in_turn(functions, index):
                started = time.perf_counter()
                functions[name](max(index, 0))
                elapsed = time.perf_counter() - started
                if index >= 0:
                    seconds[name].append(elapsed)
    finally:
        if enabled:
            gc.enable()
    return seconds


def run_command(main: Callable[[], object]) -> NoReturn:
    """Runs a benchmark's main function and ends the process. After Ctrl-C it says "interrupted"; the exit status is 130
    then, else 0."""
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)


def worst(errors: Sequence[float]) -> float:
    """The largest error, NaN if any is NaN. max() alone would ignore a NaN that does not come first."""
    return next((error for error in errors if error != error), max(errors))


def make_row(case: str, impl: str, numel: int, traffic_bytes: int, seconds: Sequence[float], checked: bool) -> Row:
    return Row(case, impl, numel, traffic_bytes, statistics.median(seconds), min(seconds), checked)


def in_turn(items: Iterable[T], index: int) -> list[T]:
    """The items in the order of round `index`: each round begins with another one, the same on every rank."""
    items = list(items)
    first = index % len(items)
    return items[first:] + items[:first]


def print_table(rows: Sequence[Row]) -> None:
    """Prints a line for each row: sizes, times, rate at the median, speed relative to other rows."""
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
    """The software and hardware that the figures depend on."""
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
    """Writes {"env": …, "rows": […]} with the entries of `extra`. env= replaces the environment that is found here."""
    document = {"env": extra.pop("env", None) or env(), **extra, "rows": [dataclasses.asdict(row) for row in rows]}
    write_document(path, document)


def write_document(path: str | os.PathLike, document: dict) -> None:
    """Replaces the file in one step: a concurrent reader sees either the old document or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(as_json(document) + "\n")
    unfinished.replace(path)


def as_json(value: object, indent: int = 0, used: int = 0, width: int = LINE_WIDTH) -> str:
    """JSON with a row on a line: what fits into `width` characters, of which `used` are taken, is not broken up."""
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or indent + used + len(text) <= width:
        return text
    if isinstance(value, dict):
        items = [
            f"{json.dumps(str(key))}: {as_json(of_key, indent + 1, len(str(key)) + 4)}" for key, of_key in value.items()
        ]
    else:
        items = [as_json(item, indent + 1, width=ROW_WIDTH) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + "\n" + ",\n".join(" " * (indent + 1) + item for item in items) + "\n" + " " * indent + end


class Report:
    """The results of one run. They are in its JSON file, if `path` names one, as soon as they are known, because the
    run may be killed.

    `extra` are further entries of the document. "dry_run" marks a document whose times mean nothing.
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
        """Records that `impl` was not measured, with the first line of `reason`.

        `failed`: something that should work did not. Otherwise there was nothing to measure here.
        """
        reason = (str(reason).strip() or type(reason).__name__).splitlines()[0][:300]
        print(f"{case} {impl}: not measured: {reason}", flush=True)
        self.not_measured.append({"case": case, "impl": impl, "reason": reason, "failed": failed})
        self.write()

    def write(self) -> None:
        if self.path:
            extra = {**self.extra, "not_measured": self.not_measured}
            write_json(self.path, self.rows, env=self.env, **extra)

    def finish(self) -> None:
        """Exits with status 1 if a result was wrong, or if something that should work failed."""
        failed = [f"{entry['case']} {entry['impl']}" for entry in self.not_measured if entry["failed"]]
        problems = [f"wrong results: {', '.join(self.wrong)}"] if self.wrong else []
        problems += [f"not measured: {', '.join(failed)}"] if failed else []
        if problems:
            raise SystemExit("; ".join(problems))


def _gpu_env() -> dict[str, object]:
    """The GPU and its libraries; None for each that is absent."""
    gpu: dict[str, object] = dict.fromkeys(("gpu", "num_sms", "gpu_memory_nbytes", "nccl"))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu.update(gpu=properties.name, num_sms=properties.multi_processor_count)
        gpu.update(gpu_memory_nbytes=properties.total_memory)
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        gpu["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {**gpu, "driver": _driver_version(), "triton": _version("triton")}


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


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    return cpu_name(path.read_text() if path.exists() else "") or platform.processor() or platform.machine()


def cpu_name(cpuinfo: str) -> str:
    """The processor's name and generation from the text of /proc/cpuinfo; empty if the text has no name. On a virtual
    machine the name alone may give no more than the maker."""
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    generation = {"family": found.get("cpu family"), "model": found.get("model")}
    if "model name" not in found or None in generation.values():
        return found.get("model name", "")
    return f"{found['model name']} ({', '.join(map(' '.join, generation.items()))})"


def _commit() -> str | None:
    """The checkout's commit, with "-dirty" if files other than results have changed since. None without git or a
    commit."""

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True)

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    except FileNotFoundError:
        return None
    return found.stdout.strip() + ("-dirty" if changed.stdout else "") if found.returncode == 0 else None
