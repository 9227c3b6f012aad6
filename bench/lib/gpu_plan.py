"""The plan of `make gpu`: every part, its time limit, and the call that runs it, the most valuable first."""

import argparse
import dataclasses
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lib.common import REPOSITORY

Word = str | Callable[[float], str]
"""A word of a command. A function makes the word from the seconds that the part may take."""
BENCH = Path(__file__).resolve().parents[1]
TESTS = REPOSITORY / "tests"

# Seconds that a call may take in total: nine minutes, less 15 s for make and for the start of Python.
CALL_S = 525

# Seconds at the end of a call that are kept for stopping a part and merging results.
FINISH_S = 8

FAILED = ("failed", "timed out")
ENDED = ("ok", *FAILED)
"""States of a part that has ended. The others are "not run", "running", and "cut off": its call ended while it ran."""

# Seconds that one test may take. pytest then ends a test that hangs, and names it. Ranks wait for longer, HANG_S in
# tests/helpers/patience.py, which a slow machine may need; but that is more than a whole call, and a hang has to be
# named before the call ends.
TEST_LIMIT_S = 120


@dataclasses.dataclass(frozen=True)
class Planned:
    name: str
    call: int
    limit_s: float
    in_dry_run: bool = True
    """Whether dry runs have this part. They have only benchmarks."""


# Factor between a dry run's limits and those on a machine with a GPU: a dry run's machine may be slow or busy.
DRY_RUN_PATIENCE = 8

BUILD = Planned("build", 0, 160, in_dry_run=False)
"""Comes first in every call, because each call may be on another machine."""

PLAN = (
    Planned("compile", 1, 45, in_dry_run=False),
    Planned("kernels-ragged", 1, 90),
    Planned("kernels", 1, 100),
    Planned("hooks", 1, 75),
    Planned("hooks-2-ranks", 2, 45),
    Planned("steps", 2, 110),
    Planned("tests-hooks", 2, 180, in_dry_run=False),
    Planned("tests-kernels", 3, 330, in_dry_run=False),
)
CALLS = tuple(sorted({planned.call for planned in PLAN}))

# Files with hundreds of tests that each compile one or two kernels. All other files with GPU tests test hooks.
KERNEL_TESTS = ("test_kernels.py",)


def of_call(call: int) -> list[Planned]:
    return [planned for planned in PLAN if planned.call == call]


def call_limit_s(call: int) -> float:
    """Seconds that the build and the parts of a call may take in total."""
    return BUILD.limit_s + sum(planned.limit_s for planned in of_call(call))


def describe() -> str:
    """Text for --help: the calls with their parts and limits."""
    lines = [f"{BUILD.name} (at most {BUILD.limit_s:.0f} s) always comes first. Then, the most valuable parts first:"]
    for call in CALLS:
        names = ", ".join(f"{planned.name} ({planned.limit_s:.0f} s)" for planned in of_call(call))
        lines.append(f"  --call {call}, at most {call_limit_s(call):.0f} s in total: {names}")
    return "\n".join(lines)


def advice(ended: Sequence[str], dry_run: bool) -> str:
    """Text that names the parts of the plan that have not ended, and the commands that run them. Empty if every part
    has ended."""
    wanted = [planned for planned in PLAN if planned.in_dry_run or not dry_run]
    left = [planned for planned in wanted if planned.name not in ended]
    if not left:
        return ""
    names = ", ".join(planned.name for planned in left)
    calls = sorted({planned.call for planned in left})
    options = [f"--call {call}" for call in calls]
    if len(left) < sum(planned.call in calls for planned in wanted):
        options = [f"--parts {' '.join(planned.name for planned in left)}"]
    dry = " --dry-run" if dry_run else ""
    return f"left: {names}. To run: " + ", then ".join(f'make gpu ARGS="{option}{dry}"' for option in options)


# ---- parts


@dataclasses.dataclass
class Part:
    name: str
    commands: list[list[Word]]
    """They run side by side."""
    limit_s: float
    state: str = "not run"
    detail: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return self.state in FAILED


def parts(arguments: argparse.Namespace, folder: Path) -> list[Part]:
    """The build, then the parts that arguments.call or arguments.parts choose, in the order of the plan. With neither,
    all parts."""
    everything = [BUILD, *PLAN]
    if arguments.call is not None:
        everything = [BUILD, *of_call(arguments.call)]
    elif arguments.parts is not None:
        everything = [BUILD, *(planned for planned in PLAN if planned.name in arguments.parts)]
    chosen = [planned for planned in everything if planned.in_dry_run or not arguments.dry_run]
    patience = DRY_RUN_PATIENCE if arguments.dry_run else 1
    return [
        Part(planned.name, commands(planned.name, arguments, folder), patience * planned.limit_s) for planned in chosen
    ]


def commands(name: str, arguments: argparse.Namespace, folder: Path) -> list[list[Word]]:
    python = sys.executable
    patience = DRY_RUN_PATIENCE if arguments.dry_run else 1

    def bench(script: str, *options: Word) -> list[list[Word]]:
        dry = ["--dry-run"] if arguments.dry_run else []
        return [[python, str(BENCH / script), *options, *dry, "--json", str(json_of(folder, name))]]

    def kernels(*of: str) -> list[list[Word]]:
        return bench("kernels.py", "--seconds", lambda limit_s: f"{0.75 * limit_s / patience:.0f}", "--parts", *of)

    cuda = [] if arguments.dry_run else ["--device", "cuda"]
    match name:
        case "build":
            return [shlex.split(arguments.build)]
        case "compile":
            return [[python, str(BENCH / "_compile.py")]]
        case "tests-hooks" | "tests-kernels":
            return [pytest_command(path, arguments.pytest) for path in test_files(name)]
        case "hooks-2-ranks":
            return bench("hook_overhead.py", *cuda, "--ranks", "2", "--check-only", "--numel", "1024")
        case "hooks":
            return bench("hook_overhead.py", *cuda, "--numel", "1024", "65536", "6553600", "--rounds", "100")
        case "steps":
            of_resnet_50 = ["--model", "resnet", "--params", "25.6e6", "--size", "64", "--batch", "32"]
            ways = ["ddp default", "fusedcomm bf16", "fusedcomm int8", "hvd none", "hvd bf16", "hvd int8"]
            return bench("ddp_step.py", *cuda, *of_resnet_50, "--rounds", "4", "--caps", "--ways", *ways)
        case "kernels":
            return kernels("flat", "reduce", "scale")
        case "kernels-ragged":
            return kernels("ragged")
    raise ValueError(f"{name} is in the plan, but commands() has no case for it: add one")


def test_files(name: str) -> list[Path]:
    """The files with GPU tests of "tests-hooks" or "tests-kernels". They run side by side: most of their time goes into
    compiling kernels, and each file's kernels can be compiled on another core."""
    files = [path for path in sorted(TESTS.rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    return [path for path in files if (path.name in KERNEL_TESTS) == (name == "tests-kernels")]


def pytest_command(path: Path, options: str) -> list[Word]:
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-m", "gpu", "--all", "-v", "--durations=10"]
    if importlib.util.find_spec("pytest_timeout"):
        # pytest ends its session itself before the part's limit, so that it still prints what has failed.
        command += [f"--timeout={TEST_LIMIT_S}", lambda limit_s: f"--session-timeout={max(10, limit_s - 30):.0f}"]
    return [*command, *spread(path), str(path), *shlex.split(options)]


def spread(path: Path) -> list[str]:
    """Options that spread a file's tests over processes: test_kernels.py's, each of which compiles one or two kernels,
    over half of the cores, and the others', each of which has up to four ranks, over three. Empty without pytest-xdist
    or with few cores."""
    num_cores = os.cpu_count() or 1
    if num_cores < 8 or not importlib.util.find_spec("xdist"):
        return []
    return ["-n", str(num_cores // 2 if path.name in KERNEL_TESTS else 3), "--dist", "worksteal"]


def json_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def log_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"
