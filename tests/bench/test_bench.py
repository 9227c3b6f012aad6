"""Every script of bench/ measures with its quickest options, and what it has then is right; and what its checks rest
on. test_make_gpu.py runs the scripts that `make gpu` runs."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from on_hosts import needs_hosts
from patience import HANG_S

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.append(str(BENCH))  # stays: ranks that are started import this file, too

import _ddp_step_rank  # noqa: E402

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
    assert {"ddp tuned", "powersgd rank 1", "fusedcomm int4 feedback", "fusedcomm reducer int8"} <= set(rows)


def steps_of_two_runs(found: dict) -> None:
    nbytes = {"ddp default": 4, "ddp tuned": 4, "fusedcomm bf16": 2}
    rows = of_steps(found, nbytes)
    for impl in nbytes:
        row, sent = rows[impl], rows[impl]["figures"]["wire_nbytes"]
        # A shorter time would mean that the link is not limited. A link may send bursts of 1 ms ahead of its rate.
        assert row["best_s"] >= 0.9 * (sent * 8 / 100e6 - 2e-3)
        first, second = row["figures"]["medians_s"]
        assert row["median_s"] == pytest.approx((first + second) / 2)
    assert 0.5 < rows["fusedcomm bf16"]["figures"]["of_ideal"] < 1.1


def accuracy(found: dict) -> None:
    ways = {row["way"] for row in found["error_by_ranks"]}
    assert ways >= {"bf16 ring", "bf16", "int8", "int4", "int4 rotated"}
    assert {run["model"] for run in found["training_summary"]} == {"digits", "characters"}


def horovod(found: dict) -> None:
    impls = {row["impl"] for row in found["rows"]}
    assert impls >= {"ddp", "hvd int8", "fusedcomm hook int8", "dist.all_reduce", "hvd.allreduce_async_"}
    assert found["idle"]["num_own"] >= 1 and found["idle"]["coordinator_wakeups_s"] <= 1


def local_steps(found: dict) -> None:
    (rows,) = found["runs"].values()
    assert {"DDP", "PowerSGD", "H=10 average", "H=10 corrected int4"} <= {row["way"] for row in rows}
    assert all(row["finetuned"] > 0 for row in rows)


def local_speed(found: dict) -> None:
    ((row,),) = found["runs"].values()
    assert len(row["alone_s"]) == len(row["local_s"]) == 2 and row["sent_nbytes"] > 0


def members(found: dict) -> None:
    rows = [(row["case"].split("/")[0], row["impl"], row["figures"]) for row in found["rows"]]
    without, again, with_members = (figures for case, _, figures in rows if case == "cost")
    assert without["sent_nbytes"] == again["sent_nbytes"] == with_members["sent_nbytes"]
    assert without["kept_nbytes"] == 0 < with_members["kept_nbytes"]
    killed = {impl: figures for case, impl, figures in rows if case == "kill"}
    assert set(killed) == {"members", "horovod elastic"} and killed["members"]["passes_thrown_away"] == 0


def optimizer(found: dict) -> None:
    assert [row["way"] for row in found["loss"]] == ["int8 replicated", "int8 update int8"]
    assert found["loss"][1]["bytes_ratio"] == pytest.approx(1, abs=0.01)
    rows = {row["way"]: row for row in found["speed"]["loopback"]}
    whole, half = (rows[way]["state_nbytes"] for way in ("replicated int8", "sharded int8/int8"))
    assert len(rows) == 9 and half / whole == pytest.approx(0.5, abs=0.01)


SMALL = "--quick --width 32 --depth 1"
SCRIPTS: dict[str, tuple[str, Callable[[dict], object]]] = {
    "accuracy": ("--quick", accuracy),
    "codec": ("--quick --no-compile --wires bf16 int4", lambda found: found["rows"][0]),
    "ddp_step": ("--quick --model resnet", all_steps),
    "fsdp": ("--quick", lambda found: found["rows"][6]),
    "horovod": ("--quick --params 1e5 --batch 1", horovod),
    "hosts": ("--quick --link 100mbit", lambda found: found["rows"][1]),
    "local_speed": (f"{SMALL} --wires int4", local_speed),
    "local_steps": (f"{SMALL} --finetune 2", local_steps),
    "members": ("--quick --ranks 3 --ways members 'horovod elastic'", members),
    "optimizer": ("--quick --optimizers adamw --models perceptron --wires int8 --updates int8 --steps 2", optimizer),
    "reducer_host": ("--ranks 2 --parameters 30 --rounds 2", lambda found: found["rows"][5]),
    "weights": ("--quick", lambda found: found["runs"][1]),
}
"""By script: its options, and what checks its results."""
OF_MAKE_GPU = {"kernels", "hook_overhead"}
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
    return found


@alone
@pytest.mark.full
@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=needs_hosts) if name == "hosts" else name for name in SCRIPTS]
)
def test_a_script_measures_with_its_quickest_options(tmp_path, script):
    pytest.importorskip(NEEDS.get(script, "torch"))
    options, check = SCRIPTS[script]
    check(measure(tmp_path, script, *shlex.split(options)))


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
    assert scripts == {*SCRIPTS, *OF_MAKE_GPU}


# ---- what their checks rest on: no run would find these faults


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
