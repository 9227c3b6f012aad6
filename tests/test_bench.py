"""The GPU benchmarks cannot run on a machine without a GPU, but dry runs of them can, and so they do not rot."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


@pytest.fixture
def bench_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def test_dry_run_of_everything(tmp_path):
    pytest.importorskip("triton")
    pytest.importorskip("tqdm")  # bench/codec.py, whose expressions the kernels are compared with
    before = {path: path.stat().st_mtime_ns for path in (BENCH / "results").iterdir()}
    done = subprocess.run(
        [sys.executable, str(BENCH / "_gpu.py"), "--dry-run", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OUT": str(tmp_path / "out")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DRY RUN" in done.stdout
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
    assert {"reduce/bf16/4 ranks", "reduce/int8/4 ranks", "scale/fp32/flat", "call/256", "result/256"} <= ours
    assert {row["bench"] for row in document["rows"]} == {"kernels", "kernels-ragged", "hooks", "overlap"}
    assert "fusedcomm bf16" in document["benches"]["hooks-2-ranks"]["checked"]["256"]


class Arguments:
    seconds, dry_run = 60.0, True


def run_parts(monkeypatch, tmp_path, *parts):
    """`parts`: (name, Python code, limit in seconds). Returns the document."""
    import _gpu

    made = [_gpu.Part(name, [[sys.executable, "-c", code]], limit_s) for name, code, limit_s in parts]
    monkeypatch.setattr(_gpu, "parts", lambda arguments, folder: made)
    monkeypatch.setattr(_gpu.Run, "_take_env", lambda self: {"gpu": None, "torch": "2.11.0"})
    arguments = Arguments()
    arguments.folder = str(tmp_path)
    _gpu.Run(arguments).run()
    return json.loads((tmp_path / "results" / "gpu.json").read_text())


def test_goes_on_after_failures_and_hangs(bench_modules, monkeypatch, tmp_path):
    hang = "import time; print('tests/test_x.py::test_hangs', flush=True); time.sleep(60)"
    document = run_parts(
        monkeypatch,
        tmp_path,
        ("tests", hang, 1),
        ("kernels", "import sys; sys.exit('no')", 20),
        ("hooks", "pass", 20),
    )
    states = {part["name"]: (part["state"], part["detail"]) for part in document["parts"]}
    assert states == {
        "tests": ("timed out", "at tests/test_x.py::test_hangs"),
        "kernels": ("failed", "with exit status 1"),
        "hooks": ("ok", ""),
    }


def test_keeps_what_a_stopped_part_has_measured(bench_modules, monkeypatch, tmp_path):
    bench = {"env": {}, "launches": [], "not_measured": [], "rows": [{"case": "pack"}]}
    code = f"import time; open({str(tmp_path / 'kernels.json')!r}, 'w').write({json.dumps(bench)!r}); time.sleep(60)"
    document = run_parts(monkeypatch, tmp_path, ("kernels", code, 1.5))
    assert document["rows"] == [{"bench": "kernels", "case": "pack"}]
    assert document["benches"] == {"kernels": {"launches": []}}
    assert document["parts"][0]["state"] == "timed out"


def test_runs_nothing_after_a_failed_build(bench_modules, monkeypatch, tmp_path):
    document = run_parts(monkeypatch, tmp_path, ("build", "raise SystemExit(2)", 20), ("kernels", "pass", 20))
    assert [(part["state"], part["detail"]) for part in document["parts"]] == [
        ("failed", "with exit status 2"),
        ("not run", "the build failed"),
    ]


def test_ragged_buckets_hold_every_element_once(bench_modules):
    pytest.importorskip("tqdm")
    import kernels

    for num_tensors in (10, 11, 1000):
        shape = kernels.ragged_shape(1 << 18, num_tensors)
        places = sorted(shape.lossy + shape.exact)
        assert [at for at, _ in places] == [0, *(at + numel for at, numel in places[:-1])]
        assert len(places) == num_tensors and min(numel for _, numel in places) >= 1
        assert shape.numel == 1 << 18
        assert any(at % 4 for at, _ in shape.lossy) and any(at % 4 for at, _ in shape.exact)


class FakeDevice:
    """Streams side by side, each with a clock of its own, in seconds."""

    dry_run = False

    def __init__(self):
        self.clocks, self.current = {None: 0.0}, None

    def event(self):
        device = self

        class Event:
            def record(self):
                self.time_s = device.clocks[device.current]

            def wait(self):
                device.clocks[device.current] = max(device.clocks.get(device.current, 0.0), self.time_s)

            def query(self):
                return False

            def elapsed_time(self, later):
                return (later.time_s - self.time_s) * 1e3

        return Event()

    @contextlib.contextmanager
    def on(self, stream):
        self.current = stream
        yield
        self.current = None

    def sleep(self, seconds):
        self.clocks[self.current] += seconds

    def synchronize(self):
        self.clocks = dict.fromkeys(self.clocks, max(self.clocks.values()))


def test_overlap_counts_what_ran_while_both_streams_were_busy(bench_modules):
    pytest.importorskip("tqdm")
    import overlap

    device = FakeDevice()
    products = overlap.Stream("products", lambda turn: device.sleep(1e-3), count=5)
    codecs = overlap.Stream("codec", lambda turn: device.sleep(1e-4), count=100, group=2, pause_s=3e-4)
    of_products, of_codec = overlap.run(device, products, codecs)
    assert of_products.seconds == pytest.approx([1e-3] * 4)
    assert of_codec.seconds == pytest.approx([1e-4] * 9)  # 5 ms / 0.5 ms, less the first
    assert of_codec.active == pytest.approx(9 * 0.2 / (9 * 0.5 - 0.3))


def test_a_wrong_result_fails_the_run(bench_modules, tmp_path):
    import _common

    report = _common.Report(tmp_path / "x.json")
    report.add([_common.make_row("pack", "ours", 1, 6, [1.0], True)])
    report.missing("pack", "absent", "nothing to measure", failed=False)
    report.finish()
    report.add([_common.make_row("pack", "wrong one", 1, 6, [1.0], False)])
    report.missing("pack", "broken", RuntimeError("first line\nsecond"))
    with pytest.raises(SystemExit, match="wrong results: pack wrong one; not measured: pack broken"):
        report.finish()
    assert json.loads((tmp_path / "x.json").read_text())["not_measured"][1]["reason"] == "first line"
