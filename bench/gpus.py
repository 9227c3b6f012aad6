"""`make gpus`: what fusedcomm is worth on a machine with 2 to 8 GPUs, in six minutes: one JSON and one table.

    make gpus                                                     # all GPUs of this machine
    torchrun --nnodes 2 --nproc-per-node 8 ... bench/gpus.py      # several machines; rank 0 writes

sums     one bucket of each size: time, bandwidth in bytes of gradients (2 (p - 1) / p of them, as NCCL's tests count),
         and the host's time of the call, of which a no-op hook in C++ is the base. NCCL in fp32, in bf16, on registered
         memory; torch's hooks; CuPy's binding of NCCL with casts in one kernel, if CuPy is there; fusedcomm in each
         wire and sum.
steps    of a transformer of 124 million parameters, in bf16 autocast: alone, DDP, torch's hook, fusedcomm on DDP, with
         GradReducer, ShardedOptimizer and FSDP2, whose parameters are gathered exactly or in codes. One more step is
         profiled: calls that wait for a stream, calls that get memory, and how much of communication other kernels
         hid.

Both run with the network as it is, and once more with NCCL held to sockets, which shows what a slower network would.
All results are checked before anything is timed. The last line is the verdict. The JSON has the links between the GPUs.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from lib import noop_hook
from lib.common import Report, Row, run_command

from fusedcomm.ranks.own_group import served_store

BENCH = Path(__file__).resolve().parent
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
NETWORKS = {"as it is": {}, "sockets": SOCKETS}
NUMELS = [1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 27]
"""64 KiB to 512 MiB of fp32."""
VARIABLES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "CUDA_", "PYTORCH_CUDA_")
"""How the names of variables begin that change times."""
LINKS = (
    "topo -m",
    "nvlink --status",
    "--query-gpu=index,pci.bus_id,pcie.link.gen.current,pcie.link.width.current --format=csv",
)
TIMELINE = ("host_waits", "allocations", "hidden")
"""Figures of lib/gpu_timeline.py."""
WORTHWHILE = 1.05
"""How many times as fast as torch's best way a step must be to be recommended."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, help="GPUs of this machine to use (all); torchrun says it itself")
    parser.add_argument("--parts", nargs="+", choices=("sums", "steps"), default=["sums", "steps"], help="(both)")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS), help="(both)")
    parser.add_argument("--seconds", type=float, default=320, help="for all measurements together (320)")
    parser.add_argument("--dry-run", action="store_true", help="tiny, two ranks on a CPU: the times mean nothing")
    parser.add_argument("--json", metavar="PATH", help="(build/gpus.json)", default="build/gpus.json")
    arguments = parser.parse_args()
    arguments.device, arguments.rounds = "cuda", 40
    arguments.numel, arguments.params, arguments.length, arguments.batch = NUMELS, 124e6, 512, 8
    if arguments.dry_run:
        arguments.device, arguments.rounds, arguments.ranks = "cpu", 2, arguments.ranks or 2
        arguments.numel, arguments.params, arguments.length, arguments.batch = [64, 5000], 6e4, 8, 2
    elif not torch.cuda.is_available() or (torch.cuda.device_count() < 2 and "RANK" not in os.environ):
        parser.error(f"it needs two CUDA GPUs, and torch sees {torch.cuda.device_count()} (try --dry-run)")
    arguments.ranks = arguments.ranks or torch.cuda.device_count()
    return arguments


def links() -> dict[str, list[str]]:
    """How nvidia-smi says the GPUs are connected, by its arguments; empty where there is none."""
    found = {}
    for arguments in LINKS if shutil.which("nvidia-smi") else ():
        done = subprocess.run(["nvidia-smi", *arguments.split()], capture_output=True, text=True, timeout=30)
        found[arguments] = done.stdout.splitlines()
    return found


def environments(ranks: int, index: int, port: int) -> list[dict[str, str]]:
    """What each process that this one starts has of its own. Under torchrun each of its workers starts one rank. port:
    of a store that this process serves, for ranks that it starts itself."""
    if "RANK" in os.environ:
        port = str(int(os.environ["MASTER_PORT"]) + 1 + index)
        return [{"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}]
    rank_of = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    return [{**shared, **own} for own in rank_of]


def run_part(
    arguments: argparse.Namespace, part: str, network: str, index: int, seconds: float, report: Report
) -> None:
    """Runs a part on new ranks, since NCCL reads its variables once. Adds its rows to the report."""
    case, store = f"{network}/{part}", served_store("127.0.0.1")  # no other program can take its port before a rank
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        settings = json.dumps({**vars(arguments), "part": part, "seconds": 0.7 * seconds})
        command = [sys.executable, str(BENCH / "_gpus_rank.py"), str(results), settings]
        processes = [
            subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **NETWORKS[network], **own})
            for own in environments(arguments.ranks, index, store.port)
        ]
        statuses = []
        try:
            until = time.monotonic() + seconds + (120 if arguments.dry_run else 30)
            for process in processes:
                statuses.append(process.wait(max(1.0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            statuses.append(None)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = json.loads(results.read_text()) if results.exists() else {"rows": [], "not_measured": []}
    for row in found["rows"]:
        report.add([Row(**{**row, "case": f"{network}/{row['case']}"})])
    for entry in found["not_measured"]:
        report.missing(f"{network}/{entry['case']}", entry["impl"], entry["reason"], failed=entry["failed"])
    if any(statuses) or None in statuses:
        report.missing(case, "the rest", f"the ranks ended with {statuses}, None is too late")


def print_sums(rows: list[Row], network: str) -> None:
    numels = sorted({row.numel for row in rows})
    print(f"\n{network}: a bucket, GB/s of gradients / µs of the host's call")
    print(f"{'':<28}" + "".join(f"{numel * 4 / 2**20:>15.4g} MiB" for numel in numels))
    for impl in dict.fromkeys(row.impl for row in rows):
        of = {row.numel: row.figures for row in rows if row.impl == impl}
        cells = [
            f"{of[n]['bus_bytes_per_s'] / 1e9:.1f} / {of[n]['call_s'] * 1e6:.0f}" if n in of else "–" for n in numels
        ]
        print(f"{impl:<28}" + "".join(f"{cell:>19}" for cell in cells))


def print_steps(rows: list[Row], network: str) -> None:
    ddp_s = next((row.median_s for row in rows if row.impl == "DDP"), float("nan"))
    print(f"\n{network}: {'a step':<26}{'ms':>8}{'x DDP':>7}{'error':>9}{'waits':>7}{'allocs':>7}{'hidden':>7}")
    for row in rows:
        cells = [f"{row.figures[name]:.2g}" if name in row.figures else "–" for name in TIMELINE]
        print(
            f"{row.impl:<36}{row.median_s * 1e3:>8.1f}{ddp_s / row.median_s:>7.2f}{row.figures['error']:>9.1e}"
            + "".join(f"{cell:>7}" for cell in cells)
        )


def verdict(rows: list[Row], network: str) -> str:
    """One line: what to write for steps that are as long as these."""
    steps = {row.impl: row.median_s for row in rows if row.case == f"{network}/step"}
    of_torch = {name: steps[name] for name in ("DDP", "DDP, c++ fp16 hook", "FSDP2") if name in steps}
    ours = {name: seconds for name, seconds in steps.items() if name != "compute alone" and name not in of_torch}
    if not of_torch or not ours:
        return f"{network}: no verdict, since steps were not measured"
    theirs, best = min(of_torch, key=of_torch.get), min(ours, key=ours.get)
    ratio = of_torch[theirs] / ours[best]
    if ratio < WORTHWHILE:
        return f"{network}: leave it off: the best way, {best}, is {ratio:.2f} times as fast as {theirs}"
    return f"{network}: {best} is {ratio:.2f} times as fast as torch's best, {theirs}"


def main() -> None:
    arguments = parse()
    writes = os.environ.get("RANK", "0") == "0"
    report = Report(arguments.json if writes else None, dry_run=arguments.dry_run, links=links())
    arguments.noop = noop_hook.module() is not None
    report.extra["variables"] = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)}
    report.env.update(threads=1, ranks=int(os.environ.get("WORLD_SIZE", arguments.ranks)))
    runs = [(network, part) for network in arguments.networks for part in arguments.parts]
    for index, (network, part) in enumerate(runs):
        run_part(arguments, part, network, index, arguments.seconds / len(runs), report)
    if not writes:
        return
    for network in arguments.networks:
        print_sums([row for row in report.rows if row.case.startswith(f"{network}/bucket")], network)
        print_steps([row for row in report.rows if row.case == f"{network}/step"], network)
    print()
    for network in arguments.networks:
        print(verdict(report.rows, network))
    if arguments.dry_run:
        print("DRY RUN: the times above mean nothing")
    report.finish()


if __name__ == "__main__":
    run_command(main)
