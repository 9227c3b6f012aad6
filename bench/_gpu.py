"""`make gpu`: builds, tests and measures on the GPU of this machine, within --seconds, and goes on whatever fails.

Every part is a process with a time limit of its own, so that a hang costs no more than that. What the parts have
measured is merged into one document, bench/results/<gpu>-torch<version>.json, every few seconds; it, and the parts'
logs, are copied to $OUT if that is set. Exits with 1 if any part failed, after a short table of everything.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from _common import REPOSITORY, write_document

BENCH = Path(__file__).resolve().parent
TESTS = REPOSITORY / "tests"
FINISH_S = 8
"""Kept back for merging and for stopping a part."""
MAX_LOG_NBYTES = 2 << 20
TESTS_LIMIT_S, CALL_LIMIT_S = 220, 120


@dataclasses.dataclass
class Part:
    name: str
    commands: list[list[str]]
    """Run beside each other."""
    limit_s: float
    state: str = "not run"
    detail: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.state == "ok"


def parts(arguments: argparse.Namespace, folder: Path) -> list[Part]:
    python = sys.executable

    def bench(name: str, script: str, limit_s: float, *options: str) -> Part:
        dry = ["--dry-run"] if arguments.dry_run else []
        command = [python, str(BENCH / script), *options, *dry, "--json", str(json_of(folder, name))]
        return Part(name, [command], limit_s)

    def kernels(name: str, limit_s: float, *of: str) -> Part:
        return bench(name, "kernels.py", limit_s, "--seconds", f"{0.75 * limit_s:.0f}", "--parts", *of)

    cuda = [] if arguments.dry_run else ["--device", "cuda"]
    tests = [python, "-X", "faulthandler", "-m", "pytest", "-m", "gpu", "-v", "--durations=10"]
    if importlib.util.find_spec("pytest_timeout"):
        # More than a call of ranks may take; and the session ends itself, so that what has failed is printed.
        tests += [f"--timeout={CALL_LIMIT_S}", f"--session-timeout={TESTS_LIMIT_S - 30}"]
    # Most of their time goes into compiling kernels, which as many cores can do at once.
    files = [path for path in sorted(TESTS.glob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    built = [
        Part("build", [shlex.split(arguments.build)], 170),
        Part("compile", [[python, str(BENCH / "_compile.py")]], 60),
        Part(
            "tests",
            [[*tests, *spread(path), str(path), *shlex.split(arguments.pytest)] for path in files],
            TESTS_LIMIT_S,
        ),
    ]
    measured = [
        kernels("kernels", 130, "flat", "reduce", "programs", "scale"),
        bench("hooks", "hook_overhead.py", 80, *cuda, "--numel", "1024", "65536", "6553600", "--rounds", "100"),
        kernels("kernels-ragged", 70, "ragged"),
        bench("overlap", "overlap.py", 60, "--seconds", "40"),
        bench("hooks-2-ranks", "hook_overhead.py", 45, *cuda, "--ranks", "2", "--check-only", "--numel", "1024"),
    ]
    return measured if arguments.dry_run else built + measured


def spread(path: Path) -> list[str]:
    """Options by which a file's tests share the cores: of those hundreds that compile a kernel or two each."""
    if path.name != "test_kernels.py" or not importlib.util.find_spec("xdist"):
        return []
    return ["-n", str(max(1, (os.cpu_count() or 1) // 2)), "--dist", "worksteal"]


def json_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def log_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


# ---- running


class Run:
    """All parts, and the document that they make."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder = Path(arguments.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in os.listdir(self.folder):
            if name.endswith((".json", ".log")):
                (self.folder / name).unlink()
        self.deadline = time.monotonic() + arguments.seconds
        self.parts = parts(arguments, self.folder)
        self.dry_run = arguments.dry_run
        self.env: dict[str, object] = {}
        self.processes: list[subprocess.Popen] = []

    @property
    def results(self) -> Path:
        """Where the document goes. A dry run's never lies among results."""
        if self.dry_run or not self.env.get("gpu"):
            return self.folder / "results" / "gpu.json"
        version = ".".join(str(self.env["torch"]).split("+")[0].split(".")[:2])
        gpu = re.sub(r"[^a-z0-9]+", "-", str(self.env["gpu"]).lower()).strip("-")
        return BENCH / "results" / f"{gpu}-torch{version}.json"

    def run(self) -> None:
        self.env = self._take_env()
        try:
            for part in self.parts:
                self._run_part(part)
                self.write()
        finally:
            self._stop()
            self.write()

    def _take_env(self) -> dict[str, object]:
        code = "import json, _common; print(json.dumps(_common.env()))"
        done = subprocess.run([sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, timeout=100)
        if done.returncode:
            raise SystemExit(f"torch cannot be asked what there is:\n{done.stderr}")
        env = json.loads(done.stdout.splitlines()[-1])
        if env["gpu"] is None and not self.dry_run:
            raise SystemExit("make gpu needs a CUDA GPU, and torch sees none here (try ARGS=--dry-run)")
        return env

    def _run_part(self, part: Part) -> None:
        limit_s = min(part.limit_s, self.deadline - FINISH_S - time.monotonic())
        if limit_s < min(10, part.limit_s):
            part.detail = "no time left"
        elif any(other.name == "build" and not other.ok for other in self.parts[: self.parts.index(part)]):
            part.detail = "the build failed"
        else:
            print(f"== {part.name}, at most {limit_s:.0f} s", flush=True)
            self._start_and_wait(part, limit_s)
        print(f"   {part.name}: {part.state} {part.detail} ({part.seconds:.0f} s)".replace("  (", " ("), flush=True)
        if part.state in ("failed", "timed out"):
            log = log_of(self.folder, part.name).read_text(errors="replace").splitlines()
            print("\n".join(f"   | {line[:200]}" for line in log[-15:]), flush=True)

    def _start_and_wait(self, part: Part, limit_s: float) -> None:
        started = time.monotonic()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with open(log_of(self.folder, part.name), "wb") as log:
            for command in part.commands:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=REPOSITORY,
                    env=environment,
                    start_new_session=True,
                )
                self.processes.append(process)
            part.state = "running"
            written = started
            while None in self._exit_codes() and time.monotonic() - started < limit_s:
                time.sleep(0.1)
                part.seconds = time.monotonic() - started
                if time.monotonic() - written > 5:
                    self.write()
                    written = time.monotonic()
            codes = self._exit_codes()
            self._stop()
        part.seconds = time.monotonic() - started
        bad = [code for code in codes if code]
        part.state = "timed out" if None in codes else "failed" if bad else "ok"
        part.detail = f"after {limit_s:.0f} s" if None in codes else f"with exit status {bad[0]}" if bad else ""
        if part.name == "tests":
            part.detail = test_summary(log_of(self.folder, part.name)) or part.detail

    def _stop(self) -> None:
        """Ends the part's whole process groups, which may outlive their first processes."""
        for number, patience_s in ((signal.SIGINT, 8), (signal.SIGKILL, 3)):
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            until = time.monotonic() + patience_s
            while None in self._exit_codes() and time.monotonic() < until:
                time.sleep(0.05)
        self.processes = []

    def _exit_codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    # ---- what there is so far

    def document(self) -> dict:
        document = {
            "env": self.env,
            "dry_run": self.dry_run,
            "parts": [
                {"name": p.name, "state": p.state, "detail": p.detail, "seconds": round(p.seconds, 1)}
                for p in self.parts
            ],
            "benches": {},
            "not_measured": [],
            "rows": [],
        }
        for part in self.parts:
            path = json_of(self.folder, part.name)
            if not path.exists():
                continue
            bench = json.loads(path.read_text())
            document["rows"] += [{"bench": part.name, **row} for row in bench.pop("rows")]
            document["not_measured"] += [{"bench": part.name, **entry} for entry in bench.pop("not_measured")]
            bench.pop("env")
            document["benches"][part.name] = bench
        return document

    def write(self) -> None:
        document = self.document()
        write_document(self.results, document)
        out = os.environ.get("OUT")
        if out and not self.dry_run:
            write_document(Path(out) / self.results.name, document)
            (Path(out) / "gpu-logs.txt").write_text(self._logs())

    def _logs(self) -> str:
        texts = []
        for part in self.parts:
            path = log_of(self.folder, part.name)
            if path.exists():
                texts.append(f"==== {part.name}\n{path.read_text(errors='replace')[-MAX_LOG_NBYTES:]}")
        return "\n".join(texts)


def test_summary(log: Path) -> str:
    """pytest's last lines, one for each file that came to its end, or the test it was at when it was stopped."""
    lines = log.read_text(errors="replace").splitlines()
    found = [re.fullmatch(r"=+ (.*(?:passed|failed|skipped|error|deselected).*) in .*=+", line) for line in lines]
    summaries = [match.group(1) for match in found if match]
    if summaries:
        return "; ".join(summaries)
    tests = [line for line in lines if line.startswith("tests/")]
    return f"at {tests[-1]}" if tests else ""


# ---- the table


def print_summary(document: dict) -> None:
    rows: dict[str, list[dict]] = {}
    for row in document["rows"]:
        rows.setdefault(row["bench"], []).append(row)
    env = document["env"]
    print(f"\n{env['gpu']}, torch {env['torch']}, Triton {env['triton']}, NCCL {env['nccl']}, driver {env['driver']}")
    if document["dry_run"]:
        print("DRY RUN: the times below mean nothing")
    print_kernels(rows.get("kernels", []) + rows.get("kernels-ragged", []))
    print_hooks(rows.get("hooks", []), document["benches"].get("hooks", {}).get("launches", []))
    print_overlap(rows.get("overlap", []))
    for numel, names in document["benches"].get("hooks-2-ranks", {}).get("checked", {}).items():
        print(f"\n2 ranks, buckets of {numel} elements, right: {', '.join(names) or 'none'}")
    print()
    for part in document["parts"]:
        print(f"{part['name']:<16} {part['state']:<10} {part['seconds']:6.1f} s  {part['detail']}")
    missing = sorted(document["not_measured"], key=lambda entry: not entry["failed"])
    for entry in missing[:12]:
        print(f"not measured: {entry['bench']} {entry['case']} {entry['impl']}: {entry['reason'][:110]}")
    if len(missing) > 12:
        print(f"not measured: {len(missing) - 12} more, see the JSON")


def print_kernels(rows: list[dict]) -> None:
    """A line for each case and implementation, with every size that was measured."""
    copies = {(row["case"], row["numel"]): row["median_s"] for row in rows if row["impl"] == "device copy"}
    lines: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for row in rows:
        copy_s = copies.get((row["case"], row["numel"]))
        if row["impl"] == "device copy":
            figure = f"{row['traffic_bytes'] / row['median_s'] / 1e9:.0f} GB/s"
        else:
            figure = f"{copy_s / row['median_s']:.2f}" if copy_s else "no copy"
        cells = lines.setdefault((row["case"], row["impl"]), [])
        cells.append((row["numel"], figure if row["checked"] else f"{figure} WRONG"))
    if lines:
        print("\nkernels: MiB of fp32 values: fraction of the rate of a device copy of the same bytes")
    for (case, impl), cells in lines.items():
        if impl != "device copy" or case.endswith("/flat"):
            figures = "  ".join(f"{numel * 4 / 2**20:.4g}: {figure}" for numel, figure in sorted(cells))
            print(f"{case + ' ' + impl:<42} {figures}")


def print_hooks(rows: list[dict], launches: list[dict]) -> None:
    """Host µs until the hook returns, until the results are there, and kernels, by elements in a bucket."""
    numels = sorted({row["numel"] for row in rows})
    if not rows:
        return
    counts = {(entry["numel"], entry["impl"]): f"{entry['kernels'] + entry['copies']:.1f}" for entry in launches}
    times = {(row["case"], row["impl"]): row["median_s"] * 1e6 for row in rows}
    print("\nhooks, a bucket: host us until the hook returns / us until the result is there / launches")
    print(f"{'':<28}" + "".join(f"{f'{numel:,} elements':>28}" for numel in numels))
    for impl in dict.fromkeys(row["impl"] for row in rows):
        cells = []
        for numel in numels:
            call, result = times.get((f"call/{numel}", impl)), times.get((f"result/{numel}", impl))
            count = counts.get((numel, impl), "not measured")
            cells.append(f"{call:.1f} / {result:.1f} / {count}" if call else "not measured")
        print(f"{impl:<28}" + "".join(f"{cell:>28}" for cell in cells))


def print_overlap(rows: list[dict]) -> None:
    ratios: dict[str, dict[str, float]] = {}
    for row in rows:
        if "alone" in row["ratios"]:
            ratios.setdefault(row["case"], {})[row["impl"].split()[0]] = row["ratios"]["alone"]
    if ratios:
        print("\noverlap: speed beside each other, of the speed alone")
    for case, by in ratios.items():
        print(f"{case:<28} product {by['product']:.2f}, codec {by['codec']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=525, help="in all (525)")
    parser.add_argument("--build", default="make build", metavar="COMMAND", help="that builds the extension")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="further options for pytest")
    parser.add_argument("--folder", default=str(REPOSITORY / "build" / "gpu"), help="for the logs (build/gpu)")
    parser.add_argument("--dry-run", action="store_true", help="the benchmarks alone, tiny, on a CPU")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    run = Run(arguments)
    run.run()
    document = run.document()
    print_summary(document)
    print(f"written: {os.path.relpath(run.results, REPOSITORY)}")
    failed = [f"{part.name} ({part.state} {part.detail})".replace(" )", ")") for part in run.parts if not part.ok]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
