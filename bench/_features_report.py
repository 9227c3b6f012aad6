"""Tables of docs/benchmarks.md: local steps, the owner's step, ranks that are lost, kernels and hooks on GPUs.
bench/_report.py writes them, from the JSON of bench/local_steps.py, optimizer.py, members.py, scale.py and _gpu.py."""

import statistics

from _steps_report import load_document as load
from _steps_report import markdown

LOCAL_WAYS = ("average", "corrected", "corrected int4")
EVERY = (5, 10, 30, 100)
EVERY_STEP = "int4 every step"
OWNER_WAYS = {
    "replicated int8": "replicated, int8",
    "replicated int8, one level": "… on one level",
    "sharded int8/int8": "sharded, int8 and int8",
    "DDP": "DDP",
    "DDP, ZeroRedundancyOptimizer": "DDP, ZeroRedundancyOptimizer",
    "hook int8, ZeroRedundancyOptimizer": "int8 hook, ZeroRedundancyOptimizer",
}
REPLICATED = "replicated int8"
"""The way whose time others are compared with."""
GPUS = {"H100": "nvidia-h100-80gb-hbm3-torch2.11.json", "H200": "nvidia-h200-torch2.11.json"}
MANY_RANKS = 4096
KERNEL_NUMELS = (16 << 20, 64 << 20)
TENSORS = ("flat", "10 tensors", "100 tensors", "1000 tensors", "10000 tensors")
KERNELS = {
    "pack bf16": ("pack/bf16", "fusedcomm"),
    "unpack bf16": ("unpack/bf16", "fusedcomm"),
    "pack int8": ("pack/int8", "fusedcomm"),
    "unpack int8": ("unpack/int8", "fusedcomm"),
    "pack bf16, torch._foreach_copy_": ("pack/bf16", "torch._foreach_copy_"),
}
HOOK_WAYS = ("ddp default", "python bf16_compress_hook", "c++ fp16_compress_hook")
HOOK_WAYS += ("fusedcomm fp32", "fusedcomm bf16", "fusedcomm int8", "fusedcomm int8 two-shot")
HOOK_NUMELS = (1024, 65536, 6553600)


def local_steps_table() -> str:
    """Held-out loss above that of DDP with the same seed, the mean over seeds, and the MB that a rank has sent."""
    runs: dict[str, dict[int, dict]] = {}  # way → seed → its run
    for run in load("local-steps-transformer.json")["runs"]["loopback"]:
        runs.setdefault(run["way"], {})[run["seed"]] = run

    def cell(way: str) -> str:
        of_seeds = runs[way]
        more = statistics.mean(run["loss"] - runs["DDP"][seed]["loss"] for seed, run in of_seeds.items())
        return f"{more:+.3f}; {of_seeds[0]['sent_nbytes'] / 1e6:.1f}"

    body = [[way, *(cell(f"H={every} {way}") for every in EVERY)] for way in LOCAL_WAYS]
    body.append([EVERY_STEP, *[cell(EVERY_STEP)] * len(EVERY)])
    return markdown(["loss above DDP's; MB sent", *(f"H = {every}" for every in EVERY)], body)


def local_speed_table() -> str:
    """Steps a second of merges in int4, relative to steps without communication."""
    columns: dict[str, dict[int, str]] = {}  # title → H → the ratio
    for hosts in (2, 4):
        for link, runs in load(f"local-speed-{hosts}-hosts.json")["runs"].items():
            ratios = {
                run["every"]: f"{statistics.median(run['alone_s']) / statistics.median(run['local_s']):.2f}"
                for run in runs
                if run["wire"] == "int4"
            }
            columns[f"{hosts} hosts, {link.replace('mbit', ' Mbit/s')}"] = ratios
    body = [[f"H = {every}", *(ratios[every] for ratios in columns.values())] for every in EVERY]
    return markdown(["speed, int4", *columns], body)


def owner_table() -> str:
    """A step's time relative to that of REPLICATED with the same optimizer, MB sent and MiB of optimizer state."""
    columns: dict[str, dict[tuple[str, str], dict]] = {}  # title → (optimizer, way) → its row
    for hosts in ("4 hosts", "2 hosts × 2 ranks"):
        for link, rows in load(f"optimizer-speed-{hosts[0]}-hosts.json")["speed"].items():
            title = f"{hosts}, {link.replace('gbit', ' Gbit/s').replace('unlimited', 'no limit')}"
            columns[title] = {(row["optimizer"], row["way"]): row for row in rows}
    some = next(iter(columns.values()))

    def cell(rows: dict[tuple[str, str], dict], optimizer: str, way: str) -> str:
        if (optimizer, way) not in rows:
            return ""
        of_way, base = (statistics.median(rows[optimizer, name]["step_s"]) for name in (way, REPLICATED))
        return f"{base * 1e3:,.0f} ms" if way == REPLICATED else f"{of_way / base:.2f}"

    body = []
    for optimizer, name in (("adamw", "AdamW"), ("muon", "Muon")):
        for way, label in OWNER_WAYS.items():
            row = some.get((optimizer, way))
            sizes = [f"{row['tx_nbytes'] / 1e6:.1f}", f"{row['state_nbytes'] / 2**20:.1f}"] if row else ["", ""]
            cells = [cell(rows, optimizer, way) for rows in columns.values()]
            body.append([f"{name}: {label}" if way == REPLICATED else label, *cells, *sizes])
    return markdown(["step", *columns, "MB sent, 4 hosts", "state, MiB"], body)


def members_table() -> str:
    body = []
    for way, kills in load("members.json")["kills"].items():
        seconds = [kill["to_next_step_s"] for kill in kills]
        lost = statistics.mean(kill["passes_thrown_away"] for kill in kills)
        body.append([way, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", f"{lost:g}"])
    return markdown(["", "SIGKILL to next step, median, s", "worst", "survivors' passes lost, mean"], body)


def scale_table() -> str:
    """With as many ranks as all ways were measured with; connections also on a line through the sizes at MANY_RANKS."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for row in load("scale.json")["rows"]:
        if row["case"].endswith(" ranks") and row["impl"] not in ("torch DDP", "reducer"):  # nothing, and as ddp
            found.setdefault(row["impl"], {})[int(row["case"].split()[0])] = row["figures"]
    few, most = sorted(set.intersection(*map(set, found.values())))[-2:]
    body = []
    for way, by_size in found.items():
        a, b = by_size[few], by_size[most]
        many = b["sockets"] + (b["sockets"] - a["sockets"]) / (most - few) * (MANY_RANKS - most)
        cells = [f"{b['attach_s']:.1f}", f"{b['threads']:.0f}", f"{b['mib']:.0f}", f"{b['idle_nbytes_s']:.0f}"]
        body.append([way, *cells, f"{b['sockets']:.0f}", f"{many:.0f}"])
    heads = [f"{most} ranks", "attach, s", "threads", "MiB", "idle, B/s", "sockets", f"of {MANY_RANKS} ranks"]
    return markdown(heads, body)


def gpu_kernels_table() -> str:
    """Speed relative to a device copy of the same bytes."""
    body = []
    for gpu, name in GPUS.items():
        found = {(row["case"], row["impl"], row["numel"]): row["ratios"] for row in load(name)["rows"]}
        for label, (stage, impl) in KERNELS.items():
            keys = [[(f"{stage}/{tensors}", impl, numel) for numel in KERNEL_NUMELS] for tensors in TENSORS]
            cells = [[f"{found[key]['device copy']:.2f}" for key in of_cell if key in found] for of_cell in keys]
            body.append([f"{gpu}: {label}", *map("; ".join, cells)])
    return markdown(["of a copy's speed, 64 MiB; 256 MiB", *TENSORS], body)


def gpu_hooks_table() -> str:
    """Microseconds of the host until the hook returns."""
    found = {(row["case"], row["impl"]): row["median_s"] for row in load(GPUS["H100"])["rows"]}
    body = [[way, *(f"{found[f'call/{numel}', way] * 1e6:.0f}" for numel in HOOK_NUMELS)] for way in HOOK_WAYS]
    return markdown(["µs, H100", *(f"{numel:,} elements" for numel in HOOK_NUMELS)], body)


TABLES = {
    "local-steps": local_steps_table,
    "local-speed": local_speed_table,
    "owner": owner_table,
    "members": members_table,
    "scale": scale_table,
    "gpu-kernels": gpu_kernels_table,
    "gpu-hooks": gpu_hooks_table,
}
