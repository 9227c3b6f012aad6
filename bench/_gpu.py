"""`make gpu`: builds, tests and measures on this machine's GPU. A part that fails does not stop the others.

Every part is a process with its own time limit, so a hang costs no more than that limit. By default all parts run, one
after another. --call runs the parts of one of three calls, for machines that are available for nine minutes at a time;
--parts runs the named parts. With --seconds, a part starts only if at least half of its limit is left.

The parts' results are written to one document, bench/results/<gpu>-torch<version>.json, every few seconds and when a
part ends. If $OUT is set, the document and the parts' logs are copied there. If the document already exists and is of
the same sources, GPU and libraries, this call adds to it. If the machine keeps no files, copy the document back from
$OUT before the next call. Any other document is moved into --folder.

At the end a short table shows all results, and the commands for the parts that are left. The exit status is 1 if any
part failed.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from lib.common import REPOSITORY, write_document
from lib.gpu_plan import (
    BENCH,
    BUILD,
    CALL_S,
    CALLS,
    ENDED,
    FINISH_S,
    PLAN,
    Part,
    advice,
    describe,
    json_of,
    log_of,
    parts,
)

# Characters at the end of each part's log that are copied to $OUT.
MAX_LOG_NBYTES = 2 << 20

# Entries of `env` that must be the same for the results of two calls to be in one document.
SAME = ("commit", "sources", "gpu", "driver", "torch", "cuda", "nccl", "triton")

SOURCES = ("csrc", "kernels", "fusedcomm", "tests", "bench", "Makefile", "setup.py", "pyproject.toml")
KERNELS = ("kernels", "csrc/devices")
SOURCE_SUFFIXES = (".cpp", ".h", ".cu", ".cuh", ".py")


# ---- running


def take_env() -> dict[str, object]:
    code = "import json; from lib import common; print(json.dumps(common.env()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=BENCH, capture_output=True, text=True, timeout=100)
    if done.returncode:
        raise SystemExit(f"cannot ask torch what this machine has:\n{done.stderr}")
    digests = {"sources": digest_of(SOURCES), "kernels": digest_of(KERNELS)}
    return {**json.loads(done.stdout.splitlines()[-1]), **digests}


def digest_of(names: Collection[str]) -> str:
    """Digest of files, and of the sources in folders. A commit does not show later changes, and a copy of the files has
    no commit."""
    paths = [path for name in names for path in (REPOSITORY / name, *(REPOSITORY / name).rglob("*")) if path.is_file()]
    digest = hashlib.sha256()
    for path in sorted(path for path in paths if path.suffix in SOURCE_SUFFIXES or path.parent == REPOSITORY):
        digest.update(f"{path.relative_to(REPOSITORY)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class Run:
    """The parts of one call, and the document with their results and those of earlier calls."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.folder = Path(arguments.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + arguments.seconds
        self.parts = parts(arguments, self.folder)
        for part in self.parts:
            for path in (json_of(self.folder, part.name), log_of(self.folder, part.name)):
                path.unlink(missing_ok=True)
        self.dry_run = arguments.dry_run
        self.env: dict[str, object] = {}
        self.earlier = empty_document()
        self.replaced = ""
        """Text that says why this call does not add to the document of earlier calls; empty if it does, or if there was
        none."""
        self.processes: list[subprocess.Popen] = []

    @property
    def results(self) -> Path:
        """The document's path. The document of a dry run is never in bench/results."""
        if self.dry_run or not self.env.get("gpu"):
            return self.folder / "results" / "gpu.json"
        version = ".".join(str(self.env["torch"]).split("+")[0].split(".")[:2])
        gpu = re.sub(r"[^a-z0-9]+", "-", str(self.env["gpu"]).lower()).strip("-")
        return BENCH / "results" / f"{gpu}-torch{version}.json"

    def run(self) -> None:
        self.env = self._take_env()
        self._take_earlier()
        try:
            for part in self.parts:
                self._run_part(part)
                self.write()
        finally:
            self._stop()
            for part in self.parts:
                if part.state == "running":
                    part.state, part.detail = "cut off", "this call was stopped"
            self.write()

    def _take_env(self) -> dict[str, object]:
        env = take_env()
        if env["gpu"] is None and not self.dry_run:
            raise SystemExit("make gpu needs a CUDA GPU, and torch sees none on this machine (try ARGS=--dry-run)")
        return env

    def _take_earlier(self) -> None:
        """Reads the document of earlier calls. If this call cannot add to it, moves it into the folder."""
        if not self.results.exists():
            return
        try:
            self.earlier = earlier_document(self.results.read_text(), self.env, self.dry_run)
        except ValueError as error:
            moved = Path(shutil.move(self.results, self.folder / f"replaced-{self.results.name}"))
            self.replaced = f"{shown(self.results)} is replaced, the old one is now {shown(moved)}: {error}"
            print(self.replaced, flush=True)

    def _run_part(self, part: Part) -> None:
        left_s = self.deadline - FINISH_S - time.monotonic()
        limit_s = min(part.limit_s, left_s)
        if any(other.name == BUILD.name and other.state != "ok" for other in self.parts[: self.parts.index(part)]):
            part.detail = "the build failed"
        elif left_s < part.limit_s / 2 and part.name != BUILD.name:
            part.detail = f"no time left: {max(0, left_s):.0f} s of {part.limit_s:.0f}"
        else:
            print(f"== {part.name}, at most {limit_s:.0f} s", flush=True)
            self._start_and_wait(part, limit_s)
        print(f"   {part.name}: {part.state} {part.detail} ({part.seconds:.0f} s)".replace("  (", " ("), flush=True)
        if part.failed:
            log = log_of(self.folder, part.name).read_text(errors="replace").splitlines()
            print("\n".join(f"   | {line[:200]}" for line in log[-15:]), flush=True)

    def _start_and_wait(self, part: Part, limit_s: float) -> None:
        started = time.monotonic()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with open(log_of(self.folder, part.name), "wb") as log:
            for command in part.commands:
                process = subprocess.Popen(
                    [word if isinstance(word, str) else word(limit_s) for word in command],
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
        if part.name.startswith("tests"):
            part.detail = test_summary(log_of(self.folder, part.name)) or part.detail

    def _stop(self) -> None:
        """Ends the part's process groups, since a group may outlive its first process."""
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

    # ---- the document

    def document(self) -> dict:
        """The results of earlier calls, without the parts that this call has run again, and this call's results."""
        anew = self.names_run()
        entries = {entry["name"]: entry for entry in self.earlier["parts"]}
        for part in self.parts:
            if part.name in anew or part.name not in entries:
                entries[part.name] = {
                    "name": part.name,
                    "state": part.state,
                    "detail": part.detail,
                    "seconds": round(part.seconds, 1),
                }
        document = {"env": self.env, "dry_run": self.dry_run, **empty_document(), "parts": list(entries.values())}
        for key in ("not_measured", "rows"):
            document[key] = [entry for entry in self.earlier[key] if entry["bench"] not in anew]
        document["benches"] = {name: bench for name, bench in self.earlier["benches"].items() if name not in anew}
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

    def names_run(self) -> set[str]:
        return {part.name for part in self.parts if part.state != "not run"}

    def of_earlier_calls(self) -> set[str]:
        """The parts that earlier calls ran and this call did not."""
        return {entry["name"] for entry in self.earlier["parts"]} - self.names_run()

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


def empty_document() -> dict:
    return {"parts": [], "benches": {}, "not_measured": [], "rows": []}


def earlier_document(text: str, env: dict[str, object], dry_run: bool) -> dict:
    """The document of earlier calls, from its JSON text. Raises ValueError, which says why, if results of `env` cannot
    be added to it."""
    document = json.loads(text)
    if not isinstance(document, dict) or not {"env", "dry_run", *empty_document()} <= document.keys():
        raise ValueError("it is not a document of this program")
    now, before = {**env, "dry run": dry_run}, {**document["env"], "dry run": document["dry_run"]}
    different = [
        f"{name} was {before.get(name)} and is {now.get(name)}"
        for name in ("dry run", *SAME)
        if before.get(name) != now.get(name)
    ]
    if different:
        raise ValueError("; ".join(different))
    document["parts"] = [entry for entry in document["parts"] if entry["state"] != "not run"]
    for entry in document["parts"]:
        if entry["state"] == "running":
            entry.update(state="cut off", detail="its call ended before it did")
    return document


def shown(path: Path) -> str:
    return os.path.relpath(path, REPOSITORY)


def test_summary(log: Path) -> str:
    """pytest's last line for each file that it finished. Without any, the test at which it was stopped; empty if no
    test had begun."""
    lines = log.read_text(errors="replace").splitlines()
    found = [re.fullmatch(r"=+ (.*(?:passed|failed|skipped|error|deselected).*) in .*=+", line) for line in lines]
    summaries = [match.group(1) for match in found if match]
    if summaries:
        return "; ".join(summaries)
    tests = [line for line in lines if line.startswith("tests/")]
    return f"at {tests[-1]}" if tests else ""


# ---- the table


def print_summary(document: dict, of_earlier_calls: Collection[str]) -> None:
    """Prints a table of the whole document. Parts of earlier calls are marked."""
    rows: dict[str, list[dict]] = {}
    for row in document["rows"]:
        rows.setdefault(row["bench"], []).append(row)
    env = document["env"]
    print(f"\n{env['gpu']}, torch {env['torch']}, Triton {env['triton']}, NCCL {env['nccl']}, driver {env['driver']}")
    if document["dry_run"]:
        print("DRY RUN: the times below mean nothing")
    print_kernels(rows.get("kernels", []) + rows.get("kernels-ragged", []))
    print_hooks(rows.get("hooks", []), document["benches"].get("hooks", {}).get("launches", []))
    for numel, names in document["benches"].get("hooks-2-ranks", {}).get("checked", {}).items():
        print(f"\n2 ranks, buckets of {numel} elements, right: {', '.join(names) or 'none'}")
    print()
    for part in document["parts"]:
        earlier = "(an earlier call) " if part["name"] in of_earlier_calls else ""
        print(f"{part['name']:<16} {part['state']:<10} {part['seconds']:6.1f} s  {earlier}{part['detail']}")
    missing = sorted(document["not_measured"], key=lambda entry: not entry["failed"])
    for entry in missing[:12]:
        print(f"not measured: {entry['bench']} {entry['case']} {entry['impl']}: {entry['reason'][:110]}")
    if len(missing) > 12:
        print(f"not measured: {len(missing) - 12} more, see the JSON")


def print_kernels(rows: list[dict]) -> None:
    """Prints a line for each case and implementation, with every size that was measured."""
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
        print("\nkernels, by MiB of fp32 values: rate relative to a device copy that moves the same bytes")
    for (case, impl), cells in lines.items():
        if impl != "device copy" or case.endswith("/flat"):
            figures = "  ".join(f"{numel * 4 / 2**20:.4g}: {figure}" for numel, figure in sorted(cells))
            print(f"{case + ' ' + impl:<42} {figures}")


def print_hooks(rows: list[dict], launches: list[dict]) -> None:
    """Prints, by elements in a bucket: host µs until the hook returns, µs until the result is complete, launches."""
    numels = sorted({row["numel"] for row in rows})
    if not rows:
        return
    counts = {(entry["numel"], entry["impl"]): f"{entry['kernels'] + entry['copies']:.1f}" for entry in launches}
    times = {(row["case"], row["impl"]): row["median_s"] * 1e6 for row in rows}
    print("\nhooks, a bucket: host us until the hook returns / us until the result is complete / launches")
    print(f"{'':<28}" + "".join(f"{f'{numel:,} elements':>28}" for numel in numels))
    for impl in dict.fromkeys(row["impl"] for row in rows):
        cells = []
        for numel in numels:
            call, result = times.get((f"call/{numel}", impl)), times.get((f"result/{numel}", impl))
            count = counts.get((numel, impl), "not measured")
            cells.append(f"{call:.1f} / {result:.1f} / {count}" if call else "not measured")
        print(f"{impl:<28}" + "".join(f"{cell:>28}" for cell in cells))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=describe(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    chosen = parser.add_mutually_exclusive_group()
    names = [planned.name for planned in (BUILD, *PLAN)]
    chosen.add_argument("--call", type=int, choices=CALLS, help="run only this call's parts: at most nine minutes")
    chosen.add_argument("--parts", nargs="+", choices=names, metavar="NAME", help="run only these: " + ", ".join(names))
    parser.add_argument("--seconds", type=float, help=f"total time (default: {CALL_S} with --call, else no limit)")
    parser.add_argument("--build", default="make build", metavar="COMMAND", help="builds the extension (make build)")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="more options for pytest")
    parser.add_argument("--folder", default=str(REPOSITORY / "build" / "gpu"), help="where logs go (build/gpu)")
    parser.add_argument("--dry-run", action="store_true", help="only the benchmarks, tiny, on a CPU")
    arguments = parser.parse_args()
    if arguments.seconds is None:
        arguments.seconds = math.inf if arguments.call is None else CALL_S
    if not parts(arguments, Path(arguments.folder)):
        able = ", ".join(planned.name for planned in PLAN if planned.in_dry_run)
        parser.error(f"a dry run has nothing of what was chosen: choose among {able}")
    return arguments


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))
    run = Run(arguments)
    run.run()
    document = run.document()
    print_summary(document, run.of_earlier_calls())
    print(f"written: {shown(run.results)}")
    if run.replaced:
        print(run.replaced)
    ended = [part["name"] for part in document["parts"] if part["state"] in ENDED]
    if left := advice(ended, arguments.dry_run):
        print(left)
    failed = [f"{part.name} ({part.state} {part.detail})".replace(" )", ")") for part in run.parts if part.failed]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
