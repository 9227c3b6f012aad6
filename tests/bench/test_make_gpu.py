"""`make gpu` and `make gpus` without a GPU: plans, dry runs, and how parts are run that the tests make."""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from patience import HANG_S

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.full
def test_dry_run_of_everything_in_two_calls(tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("tqdm")  # for bench/codec.py, which has the expressions that kernels are compared with
    before = {path: path.stat().st_mtime_ns for path in (BENCH / "results").iterdir()}
    said = []
    command = [sys.executable, str(BENCH / "_gpu.py"), "--dry-run", "--seconds", "inf", "--folder", str(tmp_path)]
    for call in ("1", "2"):
        done = subprocess.run(
            [*command, "--call", call],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            env={**os.environ, "OUT": str(tmp_path / "out")},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "DRY RUN" in done.stdout
        said.append(done.stdout)
    left = 'left: hooks-2-ranks, steps. To run: make gpu ARGS="--call 2 --dry-run"'
    assert left in said[0] and "left: " not in said[1]
    assert "(an earlier call)" not in said[0] and said[1].count("(an earlier call)") == 3
    assert {path: path.stat().st_mtime_ns for path in (BENCH / "results").iterdir()} == before
    assert not (tmp_path / "out").exists()

    document = json.loads((tmp_path / "results" / "gpu.json").read_text())
    assert document["dry_run"] is True
    assert {part["state"] for part in document["parts"]} == {"ok"}
    assert all(row["checked"] for row in document["rows"])
    assert not [entry for entry in document["not_measured"] if entry["failed"]]
    ours = {row["case"] for row in document["rows"] if row["impl"].startswith("fusedcomm")}
    for op in ("pack", "unpack"):
        for wire in ("bf16", "int8"):
            assert {f"{op}/{wire}/flat", f"{op}/{wire}/10 tensors"} <= ours
    assert {"reduce/bf16/4 ranks", "reduce/int8/4 ranks", "sum/bf16/2 ranks", "sum/int8/2 ranks"} <= ours
    assert {"scale/fp32/flat", "call/256", "result/256"} <= ours
    assert {row["bench"] for row in document["rows"]} == {"kernels", "kernels-ragged", "hooks", "steps"}
    assert "fusedcomm bf16" in document["benches"]["hooks-2-ranks"]["checked"]["256"]


@pytest.mark.check
def test_the_dry_run_for_several_gpus_measures_every_way_and_ends_with_a_verdict(tmp_path):
    path = tmp_path / "gpus.json"
    command = [sys.executable, str(BENCH / "gpus.py"), "--dry-run", "--ranks", "4", "--networks", "as it is"]
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["dry_run"] is True and found["not_measured"] == []
    assert all(row["checked"] for row in found["rows"])
    sums = {row["impl"] for row in found["rows"] if row["case"] == "as it is/bucket/5000"}
    assert {"NCCL fp32", "c++ fp16 hook", "fusedcomm int4 two-shot", "fusedcomm int8 two levels"} <= sums
    assert "no-op hook, C++" in sums or "no no-op hook in C++: " in done.stdout
    steps = {row["impl"]: row["figures"]["error"] for row in found["rows"] if row["case"] == "as it is/step"}
    assert {"DDP", "GradReducer, int8", "ShardedOptimizer, int8", "FSDP2, int8, params int8"} <= set(steps)
    assert steps["FSDP2"] < 1e-6 and 1e-3 < steps["DDP, int8"] == pytest.approx(steps["GradReducer, int8"], rel=0.2)
    *_, verdict, dry_run = done.stdout.strip().splitlines()
    assert verdict.startswith("as it is: ") and " times as fast as " in verdict and dry_run.startswith("DRY RUN")


@pytest.mark.full
def test_kernels_are_compiled_ahead_of_the_tests():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(BENCH / "_compile.py"), "--capability", "90", "--most", "2"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )
    assert done.returncode == 0 and done.stdout.startswith("2 kernels for sm_90 in "), done.stdout + done.stderr


# ---- the plan


def parsed(monkeypatch, *options):
    import _gpu

    monkeypatch.setattr(sys, "argv", ["_gpu.py", *options])
    return _gpu.parse()


def test_what_a_call_runs_fits_into_nine_minutes(bench_modules, monkeypatch):
    import _gpu
    from lib import gpu_plan

    everything = []
    for call in gpu_plan.CALLS:
        arguments = parsed(monkeypatch, "--call", str(call))
        parts = _gpu.parts(arguments, Path("nowhere"))
        assert parts[0].name == "build"
        assert sum(part.limit_s for part in parts) + gpu_plan.FINISH_S <= arguments.seconds <= 9 * 60 - 15
        everything += [part.name for part in parts[1:]]
    assert everything[:2] == ["compile", "kernels-ragged"]
    assert everything[-1] == "tests-kernels" and len(gpu_plan.CALLS) == 3
    assert [part.name for part in _gpu.parts(parsed(monkeypatch), Path("nowhere"))] == ["build", *everything]
    assert parsed(monkeypatch).seconds == parsed(monkeypatch, "--parts", "hooks").seconds == math.inf


def test_every_file_with_gpu_tests_is_run_once(bench_modules):
    from lib import gpu_plan

    hooks, kernels = ([path.name for path in gpu_plan.test_files(name)] for name in ("tests-hooks", "tests-kernels"))
    assert "test_cuda.py" in hooks and not set(hooks) & set(kernels)
    assert sorted(kernels) == sorted(gpu_plan.KERNEL_TESTS)


# ---- running


def run_parts(monkeypatch, tmp_path, *parts, seconds=60.0, **env):
    """`parts`: (name, Python code, limit in seconds). Returns the document."""
    import _gpu

    made = [_gpu.Part(name, [[sys.executable, "-c", code]], limit_s) for name, code, limit_s in parts]
    monkeypatch.setattr(_gpu, "parts", lambda arguments, folder: made)
    monkeypatch.setattr(_gpu.Run, "_take_env", lambda self: {"gpu": None, "torch": "2.11.0", **env})
    _gpu.Run(argparse.Namespace(seconds=seconds, dry_run=True, folder=str(tmp_path))).run()
    return json.loads((tmp_path / "results" / "gpu.json").read_text())


def measuring(tmp_path, name, case):
    """A part that measures one case, and reports another as not measured."""
    bench = {
        "env": {},
        "by": case,
        "not_measured": [{"case": f"no {case}", "impl": "x", "reason": "", "failed": False}],
        "rows": [{"case": case}],
    }
    return name, f"open({str(tmp_path / f'{name}.json')!r}, 'w').write({json.dumps(bench)!r})", 20


def measured(document):
    """{part: the case that it has measured}. Checks that the rest of the document names the same parts and cases."""
    rows = {row["bench"]: row["case"] for row in document["rows"]}
    assert len(rows) == len(document["rows"])
    assert {entry["bench"]: entry["case"] for entry in document["not_measured"]} == {
        name: f"no {case}" for name, case in rows.items()
    }
    assert {name: bench["by"] for name, bench in document["benches"].items()} == rows
    return rows


def states(document):
    return {part["name"]: part["state"] for part in document["parts"]}


def test_a_call_adds_to_the_document_of_earlier_ones(bench_modules, monkeypatch, tmp_path):
    env = {"commit": "abc", "sources": "1", "triton": "3.6.0", "driver": "580"}
    run_parts(
        monkeypatch, tmp_path, measuring(tmp_path, "hooks", "a"), measuring(tmp_path, "kernels-ragged", "b"), **env
    )
    (tmp_path / "kernels-ragged.json").unlink()  # the next call's machine has only the document
    document = run_parts(
        monkeypatch,
        tmp_path,
        measuring(tmp_path, "hooks", "c"),
        measuring(tmp_path, "kernels", "d"),
        ("kernels-ragged", "raise SystemExit(1)", 1000),  # there is no time for it
        ("tests", "raise SystemExit(1)", 1000),
        **env,
    )
    assert measured(document) == {"hooks": "c", "kernels-ragged": "b", "kernels": "d"}
    assert states(document) == {"hooks": "ok", "kernels-ragged": "ok", "kernels": "ok", "tests": "not run"}
    assert document["env"] == {"gpu": None, "torch": "2.11.0", **env}
    assert not list(tmp_path.glob("replaced-*"))


def test_results_of_other_sources_are_not_added_to(bench_modules, monkeypatch, tmp_path, capsys):
    before = run_parts(monkeypatch, tmp_path, measuring(tmp_path, "hooks", "a"), sources="one")
    document = run_parts(monkeypatch, tmp_path, measuring(tmp_path, "kernels-ragged", "b"), sources="two")
    assert measured(document) == {"kernels-ragged": "b"}
    assert states(document) == {"kernels-ragged": "ok"}
    said = capsys.readouterr().out
    assert f"replaced, the old one is now {os.path.relpath(tmp_path, BENCH.parent)}/replaced-gpu.json" in said
    assert "sources was one and is two" in said
    assert json.loads((tmp_path / "replaced-gpu.json").read_text()) == before


def test_a_call_that_is_stopped_says_where(bench_modules, monkeypatch, tmp_path):
    stop = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    # A shell starts programs in the background with this signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_parts(monkeypatch, tmp_path, measuring(tmp_path, "hooks", "a"), ("kernels-ragged", stop, 40))
    finally:
        signal.signal(signal.SIGINT, before)
    path = tmp_path / "results" / "gpu.json"
    document = json.loads(path.read_text())
    assert measured(document) == {"hooks": "a"}
    assert states(document) == {"hooks": "ok", "kernels-ragged": "cut off"}

    # A call that was killed leaves its part as running.
    path.write_text(path.read_text().replace('"cut off"', '"running"'))
    document = run_parts(monkeypatch, tmp_path, measuring(tmp_path, "kernels", "b"))
    assert states(document) == {"hooks": "ok", "kernels-ragged": "cut off", "kernels": "ok"}


@pytest.mark.check
def test_goes_on_after_failures_and_hangs(bench_modules, monkeypatch, tmp_path):
    import _gpu

    def clock() -> float:
        """An hour later once the part that hangs has said where it is."""
        log = _gpu.log_of(tmp_path, "tests")
        return time.monotonic() + (3600 if log.exists() and "test_hangs" in log.read_text() else 0)

    monkeypatch.setattr(_gpu, "time", types.SimpleNamespace(monotonic=clock, sleep=time.sleep))
    hang = "import time; print('tests/test_x.py::test_hangs', flush=True); time.sleep(3600)"
    document = run_parts(
        monkeypatch,
        tmp_path,
        ("tests", hang, 1000),
        ("kernels", "import sys; sys.exit('no')", 1000),
        ("hooks", "pass", 1000),
        seconds=9000,
    )
    states = {part["name"]: (part["state"], part["detail"]) for part in document["parts"]}
    assert states == {
        "tests": ("timed out", "at tests/test_x.py::test_hangs"),
        "kernels": ("failed", "with exit status 1"),
        "hooks": ("ok", ""),
    }


def test_runs_nothing_after_a_failed_build(bench_modules, monkeypatch, tmp_path):
    document = run_parts(monkeypatch, tmp_path, ("build", "raise SystemExit(2)", 20), ("kernels", "pass", 20))
    assert [(part["state"], part["detail"]) for part in document["parts"]] == [
        ("failed", "with exit status 2"),
        ("not run", "the build failed"),
    ]
