"""Every script of bench/ measures with its quickest options, and finds no wrong result; and what its checks rest on.
test_make_gpu.py runs the scripts that `make gpu` and `make gpus` run."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from on_hosts import needs_hosts
from patience import HANG_S

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))  # stays: ranks that are started import this file, too

import _ddp_step_rank  # noqa: E402
import _steps_report  # noqa: E402

# A script may use all cores, and takes long beside other programs.
alone = pytest.mark.alone


# ---- every script


def of_steps(found: dict, per_element: dict[str, float]) -> dict[str, dict]:
    """The rows of ddp_step.py by way, each of which has sent so many bytes an element. On two ranks a rank sends each
    element once. The tolerance is for biases and norms, which are sent exactly, and for the headers of small
    messages."""
    rows = {row["impl"]: row for row in found["rows"]}
    for impl, nbytes in per_element.items():
        assert rows[impl]["figures"]["wire_nbytes"] == pytest.approx(nbytes * rows[impl]["numel"], rel=0.1), impl
    return rows


def all_steps(found: dict) -> None:
    rows = of_steps(found, {"ddp default": 4, "c++ fp16 hook": 2, "fusedcomm bf16": 2, "fusedcomm int8": 1.03})
    assert {"ddp tuned", "powersgd rank 1", "fusedcomm int4 feedback", "fusedcomm members int8", "hvd int8"} <= set(
        rows
    )


def steps_of_two_runs(found: dict) -> None:
    nbytes = {"ddp default": 4, "ddp tuned": 4, "fusedcomm bf16": 2}
    rows = of_steps(found, nbytes)
    for impl in nbytes:
        row, sent = rows[impl], rows[impl]["figures"]["wire_nbytes"]
        # A shorter time would mean that the link is not limited. A link may send bursts of 1 ms ahead of its rate.
        assert row["best_s"] >= 0.9 * (sent * 8 / 100e6 - 2e-3)
        first, second = row["figures"]["medians_s"]
        assert row["median_s"] == pytest.approx((first + second) / 2)
    assert 0.5 < float(_steps_report.Result("", found, "transformer/100mbit").of_ideal("fusedcomm bf16")) < 1.1


SMALL = "--quick --width 32 --depth 1"
SCRIPTS = {
    "accuracy": "--quick",
    "codec": "--quick --no-compile --wires bf16 int4",
    "ddp_step": "--quick --model resnet",
    "fsdp": "--quick",
    "scale": "--quick --ways ddp fsdp members",
    "local_speed": f"{SMALL} --wires int4",
    "local_speed of windows": f"{SMALL} --wires int4 --window 0.5s --device-ms 10 --turn-s 1",
    "local_steps": f"{SMALL} --finetune 2",
    "members": "--quick --ranks 3 --ways members 'horovod elastic'",
    "optimizer": "--quick --optimizers adamw --models perceptron --wires int8 --updates int8 --steps 2",
}
"""By script, and what it measures where it runs twice: its options."""
OF_MAKE_GPU = {"kernels", "hook_overhead", "gpus"}
NEEDS = {"accuracy": "sklearn", "codec": "tqdm"}
"""A package that not every machine has."""


def measure(tmp_path: Path, script: str, *options: str) -> dict:
    """Runs a script. What it writes says neither that a result was wrong nor that something failed."""
    path = tmp_path / "found.json"
    command = [sys.executable, str(BENCH / f"{script}.py"), *options, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert all(row["checked"] for row in found.get("rows", []))
    assert not any(entry["failed"] for entry in found.get("not_measured", []))
    assert [name for name, part in found.items() if part in ([], {}) and name != "not_measured"] == []
    return found


@alone
@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_measures_with_its_quickest_options(tmp_path, name):
    script = name.split()[0]
    pytest.importorskip(NEEDS.get(script, "torch"))
    found = measure(tmp_path, script, *shlex.split(SCRIPTS[name]))
    if script == "ddp_step":
        all_steps(found)


@alone
@pytest.mark.full
@needs_hosts
def test_steps_on_two_hosts_take_their_bytes_time_on_the_line(tmp_path):
    options = ["--quick", "--hosts", "2", "--link", "100mbit", "--repeat", "2"]
    found = measure(tmp_path, "ddp_step", *options, "--ways", "ddp default", "fusedcomm bf16")
    steps_of_two_runs(found)
    assert found["cases"]["transformer/100mbit"]["wire_nbytes_from"] == "eth0 of each host"


def test_every_script_is_run():
    scripts = {path.stem for path in BENCH.glob("[!_]*.py")}
    assert scripts == {*(name.split()[0] for name in SCRIPTS), *OF_MAKE_GPU}


# ---- what their checks rest on: no run would find these faults


def test_the_figures_of_a_timeline(bench_modules):
    from lib import gpu_timeline

    kernels = [("gemm", 0, 10), ("ncclDevKernel_AllReduce", 5, 10), ("_pack_kernel", 14, 2), ("softmax", 15, 3)]
    calls = ["cudaLaunchKernel", "cudaStreamSynchronize", "cudaMalloc", "cudaDeviceSynchronize", "cuMemCreate"]
    events = [{"cat": "kernel", "name": name, "ts": begin, "dur": length} for name, begin, length in kernels]
    events += [{"cat": "cuda_runtime", "name": name, "ts": 0} for name in calls] + [{"cat": "cpu_op", "name": "nccl"}]
    figures = gpu_timeline.figures_of(events)
    assert figures == {
        "host_waits": 1,
        "allocations": 2,
        "hidden": 6 / 11,
    }  # 5 to 16 communicates; 5 to 10 and 15 to 16
    assert gpu_timeline.figures_of([{"cat": "cpu_op", "name": "x"}]) == {}


def test_a_wrong_result_fails_the_run(tmp_path):
    from lib import common

    report = common.Report(tmp_path / "x.json")
    report.add([common.make_row("pack", "ours", 1, 6, [1.0], True)])
    report.missing("pack", "absent", "nothing to measure", failed=False)
    report.finish()
    report.add([common.make_row("pack", "wrong one", 1, 6, [1.0], False)])
    report.missing("pack", "broken", RuntimeError("first line\nsecond"))
    with pytest.raises(SystemExit, match="wrong results: pack wrong one; not measured: pack broken"):
        report.finish()


def test_known_gradients_and_their_error(ranks):
    for error, zero in ranks.run(known_error, world_size=2):
        assert zero == 0
        assert error == pytest.approx(0.1)


def known_error(rank, world_size):
    known = _ddp_step_rank.Known(torch.nn.Linear(20, 10), None)
    return known.error_of([1.1 * mean for mean in known.mean]), known.error_of(known.mean)


def test_ragged_buckets_hold_every_element_once(bench_modules):
    pytest.importorskip("tqdm")
    import kernels

    for num_tensors in (10, 11, 1000):
        shape = kernels.ragged_shape(1 << 18, num_tensors)
        lossy, exact = ([place for place in places if place[0] >= 0] for places in (shape.lossy, shape.exact))
        places = sorted(lossy + exact)
        assert [at for at, _ in places] == [0, *(at + numel for at, numel in places[:-1])]
        assert len(places) == num_tensors and shape.numel == 1 << 18


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_the_muon_of_optimizer_does_what_torchs_does_but_for_the_rounding_to_bf16(shape):
    from _optimizer_ways import Float32Muon

    generator = torch.Generator().manual_seed(0)
    begin, gradients = torch.randn(shape, generator=generator), torch.randn(3, *shape, generator=generator)
    results = []
    for kind in (torch.optim.Muon, Float32Muon):
        p = torch.nn.Parameter(begin.clone())
        optimizer = kind([p], lr=0.02)
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        results.append(p.detach() - begin)
    torchs, ours = results
    assert 0 < float((ours - torchs).norm() / torchs.norm()) < 0.02
