"""bench/ddp_step.py: the training steps that it measures over links, and how it reports them."""

import json
import subprocess
import sys
import time

import pytest
import torch
from patience import HANG_S
from test_hosts import BENCH, makes_hosts  # first: it adds bench/ to sys.path

from lib import common  # isort: skip
import _ddp_step_rank  # isort: skip
from lib import models  # isort: skip
import ddp_step  # isort: skip

pytestmark = pytest.mark.alone


def test_quick_changes_only_what_is_not_given(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ddp_step.py", "--quick", "--params", "2e6", "--caps", "7"])
    arguments = ddp_step.parse()
    assert (arguments.params, arguments.caps, arguments.rounds, arguments.steps) == (2e6, [7], 2, 2)


def test_of_several_runs_medians_are_kept_and_each():
    def row(impl, median_s, **figures):
        return common.Row(
            "a/b", impl, 10, 40, median_s, median_s / 2, True, percentiles_s={"p50": median_s}, figures=figures
        )

    runs = [
        [row("x", 1.0, sync_s=3.0), row("y", 4.0)],
        [row("x", 2.0, sync_s=5.0)],
        [row("x", 9.0, sync_s=4.0), row("y", 6.0)],
    ]
    assert ddp_step.of_runs(runs[:1]) == runs[0]
    x, y = ddp_step.of_runs(runs)
    assert (x.median_s, x.best_s, x.percentiles_s) == (2.0, 0.5, {"p50": 2.0})
    assert x.figures == {"sync_s": 4.0, "medians_s": [1.0, 2.0, 9.0]} and y.figures == {"medians_s": [4.0, 6.0]}
    assert y.median_s == 5.0


def run_ddp_step(tmp_path, *arguments: str) -> dict:
    path = tmp_path / "ddp_step.json"
    command = [sys.executable, str(BENCH / "ddp_step.py"), "--quick", "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


@pytest.mark.full
def test_training_steps_on_localhost(tmp_path):
    document = run_ddp_step(tmp_path, "--model", "resnet")
    rows = {row["impl"]: row for row in document["rows"]}
    assert {
        "ddp default",
        "ddp tuned",
        "c++ fp16 hook",
        "powersgd rank 1",
        "fusedcomm int8",
        "fusedcomm int4 feedback",
    } <= set(rows)
    missing = {entry["impl"] for entry in document["not_measured"] if entry["case"] == "resnet/loopback"}
    # torch 2.13's versions of these two do not run on gloo.
    assert missing <= {"pertensor hook", "perchannel hook"}
    for impl, row in rows.items():
        assert row["checked"] and list(row["percentiles_s"]) == ["p50", "p75", "p90", "p95"]
        assert 0 < row["best_s"] <= row["median_s"] == row["percentiles_s"]["p50"] <= row["percentiles_s"]["p95"]
        if impl != "compute alone":
            assert 0 <= row["figures"]["error"] <= row["figures"]["tolerance"]
    numel = rows["ddp default"]["numel"]
    for impl, per_element in {
        "ddp default": 4,
        "c++ fp16 hook": 2,
        "fusedcomm bf16": 2,
        "fusedcomm int8": 1.03,
    }.items():
        # On two ranks a rank sends each element once. The tolerance is for biases and norms, which are sent exactly,
        # and for the headers of small messages.
        assert rows[impl]["figures"]["wire_nbytes"] == pytest.approx(per_element * numel, rel=0.1)
    assert document["env"]["ranks"] == 2 and document["cases"]["resnet/loopback"]["batch"] == 1


@pytest.mark.full
@makes_hosts
def test_training_steps_on_two_hosts(tmp_path):
    document = run_ddp_step(tmp_path, "--hosts", "2", "--link", "100mbit", "--ways", "ddp default", "fusedcomm bf16")
    rows = {row["impl"]: row for row in document["rows"]}
    assert set(rows) == {"compute alone", "ddp default", "ddp tuned", "fusedcomm bf16"}
    numel = rows["ddp default"]["numel"]
    for impl, per_element in {"ddp default": 4, "ddp tuned": 4, "fusedcomm bf16": 2}.items():
        nbytes = rows[impl]["figures"]["wire_nbytes"]
        assert nbytes == pytest.approx(per_element * numel, rel=0.1)
        # A shorter time would mean that the link is not limited. A link may send bursts of 1 ms ahead of its rate.
        assert rows[impl]["best_s"] >= 0.9 * (nbytes * 8 / 100e6 - 2e-3)
    assert document["cases"]["transformer/100mbit"]["wire_nbytes_from"] == "eth0 of each host"
    bf16 = rows["fusedcomm bf16"]["figures"]
    assert bf16["bytes_ratio"] == pytest.approx(2, rel=0.1)
    assert 0.5 < bf16["of_ideal"] < 1.1


def test_percentiles_and_models():
    assert common.percentiles([3.0, 1.0, 2.0]) == pytest.approx({"p50": 2, "p75": 2.5, "p90": 2.8, "p95": 2.9})
    for name in models.MODELS:
        for numel in (300_000, 5_000_000):
            model = models.make_model(name, numel, 4)
            assert models.numel_of(model) == pytest.approx(numel, rel=0.4)
            outputs = model(model.batch(2, torch.Generator())[0])
            assert outputs.isfinite().all()


@pytest.fixture
def one_thread():
    """Gives torch one thread, as in ranks: further threads would spin between operations."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_a_model_that_waits_takes_its_time_and_no_core(one_thread):
    model = models.make_model("waiting", 300_000, 4)
    samples, _ = model.batch(500, torch.Generator())
    forward_s = models.WAIT_S * 500 * 4 * models.numel_of(model)
    began, cpu_s = time.perf_counter(), time.process_time()
    loss = model(samples).sum()
    middle = time.perf_counter()
    loss.backward()
    assert middle - began > forward_s and time.perf_counter() - middle > 2 * forward_s > 0.1
    assert time.process_time() - cpu_s < forward_s
    assert all(w.grad.equal(gradient) for w, gradient in zip(model.weights, model.gradients, strict=True))


def test_known_gradients_and_their_error(ranks):
    for error, zero in ranks.run(known_error, world_size=2):
        assert zero == 0
        assert error == pytest.approx(0.1)


def known_error(rank, world_size):
    known = _ddp_step_rank.Known(torch.nn.Linear(20, 10), None)
    return known.error_of([1.1 * mean for mean in known.mean]), known.error_of(known.mean)
