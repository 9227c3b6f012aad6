"""bench/timeline.py: the steps that it draws of DDP and of fusedcomm."""

import importlib.util
import json
import subprocess
import sys

import pytest
from patience import HANG_S
from test_hosts import BENCH  # first: it adds bench/ to sys.path

import timeline  # isort: skip

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


def event(name, begin_ms, end_ms, **args):
    return {"ph": "X", "name": name, "ts": begin_ms * 1e3, "dur": (end_ms - begin_ms) * 1e3, "args": args}


def of_profiler(first_ms, length_ms):
    """A step as torch.profiler shows it: two buckets, of which the second arrives last."""
    evaluate = "autograd::engine::evaluate_function: AddmmBackward0"
    times = {
        "DistributedDataParallel.forward": [(0, 0.2)],
        evaluate: [(0.2, 0.3), (0.3, 0.6)],
        "gloo:all_reduce": [(0.4, 0.8), (0.6, 0.9)],
        "Optimizer.step#SGD.step": [(0.9, 1)],
        "aten::addmm": [(0.1, 0.2)],
    }
    return [
        event(name, first_ms + begin * length_ms, first_ms + end * length_ms)
        for name, of_name in times.items()
        for begin, end in of_name
    ]


def lengths(step):
    """Milliseconds of all bars of each kind, rounded."""
    found = {}
    for bar in step.bars:
        found[bar.kind] = round(found.get(bar.kind, 0) + bar.end_ms - bar.begin_ms, 6)
    return found


def test_the_step_of_median_length_is_drawn_of_a_profile_of_ddp(tmp_path):
    path = tmp_path / "ddp.json"
    events = [*of_profiler(0, 300), *of_profiler(300, 100), *of_profiler(400, 200)]
    path.write_text(json.dumps({"traceEvents": events}))
    step = timeline.read_step(path)
    assert step.title == "DDP: 200 ms a step, of which it waits for buckets 60 ms" and step.untraced_ms is None
    assert step.length_ms == pytest.approx(200)
    # The title has the times of what is drawn, whatever other steps took.
    path.write_text(json.dumps({"traceEvents": events, "name": "DDP, tuned", "untraced_ms": 150.0}))
    assert timeline.read_step(path).title == step.title.replace("DDP", "DDP, tuned")
    assert lengths(step) == {"forward": 40, "optimizer": 20, "bucket": 140, "backward": 80, "wait": 60}
    assert [(label, len(bars)) for label, bars in timeline.rows_of(step)] == [("model", 4), ("buckets", 1), ("", 1)]


def test_a_trace_without_a_whole_step_is_refused(tmp_path):
    path = tmp_path / "ddp.json"
    path.write_text(json.dumps({"traceEvents": of_profiler(0, 100)[:-2]}))
    with pytest.raises(SystemExit, match="has no whole step"):
        timeline.read_step(path)


@pytest.mark.full
@needs_matplotlib
def test_the_plot_is_made_of_real_steps(tmp_path):
    plot = tmp_path / "timeline.png"
    command = [sys.executable, str(BENCH / "timeline.py"), "--quick", "--bucket-cap-mb", "1", "--plot", str(plot)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert plot.read_bytes().startswith(b"\x89PNG")
    for name in ("ddp", "fusedcomm"):
        step = timeline.read_step(plot.with_name(f"timeline-{name}.json"))
        assert step.title.lower().startswith(name) and f": {step.length_ms:.0f} ms a step, " in step.title
        assert step.untraced_ms > 0
        assert {"forward", "backward", "bucket", "optimizer"} <= lengths(step).keys()
        assert len([bar for bar in step.bars if bar.kind == "bucket"]) > 1


def test_options_for_training_are_refused_where_traces_are_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["timeline.py", "--traces", "a.json", "b.json", "--wire", "bf16"])
    with pytest.raises(SystemExit):
        timeline.parse()
    assert "--wire is for training" in capsys.readouterr().err
