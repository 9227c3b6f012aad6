"""What the benchmarks count and report, for inputs with known results. test_make_gpu.py covers the GPU's benchmarks."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S

BENCH = Path(__file__).resolve().parents[2] / "bench"


def test_ragged_buckets_hold_every_element_once(bench_modules):
    pytest.importorskip("tqdm")
    import kernels

    for num_tensors in (10, 11, 1000):
        shape = kernels.ragged_shape(1 << 18, num_tensors)
        lossy, exact = ([place for place in places if place[0] >= 0] for places in (shape.lossy, shape.exact))
        places = sorted(lossy + exact)
        assert [at for at, _ in places] == [0, *(at + numel for at, numel in places[:-1])]
        assert len(places) == num_tensors and min(numel for _, numel in places) >= 1
        assert shape.numel == 1 << 18
        assert any(at % 4 for at, _ in lossy) and any(at % 4 for at, _ in exact)


class FakeDevice:
    """Concurrent streams, each with its own clock in seconds."""

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
    assert of_codec.seconds == pytest.approx([1e-4] * 9)  # 5 ms / 0.5 ms, without the first
    assert of_codec.active == pytest.approx(9 * 0.2 / (9 * 0.5 - 0.3))


def test_a_wrong_result_fails_the_run(bench_modules, tmp_path):
    from lib import common

    report = common.Report(tmp_path / "x.json")
    report.add([common.make_row("pack", "ours", 1, 6, [1.0], True)])
    report.missing("pack", "absent", "nothing to measure", failed=False)
    report.finish()
    report.add([common.make_row("pack", "wrong one", 1, 6, [1.0], False)])
    report.missing("pack", "broken", RuntimeError("first line\nsecond"))
    with pytest.raises(SystemExit, match="wrong results: pack wrong one; not measured: pack broken"):
        report.finish()
    assert json.loads((tmp_path / "x.json").read_text())["not_measured"][1]["reason"] == "first line"


def test_a_processor_is_named_with_its_generation(bench_modules):
    import _steps_report
    from lib import common

    x86 = "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Intel(R) Xeon(R) Processor\n\n"
    name = common.cpu_name(2 * x86)
    assert name == "Intel(R) Xeon(R) Processor (family 6, model 207)"
    assert _steps_report.processor({"cpu": name}) == "Intel Xeon (family 6, model 207)"
    assert common.cpu_name("processor\t: 0\nmodel name\t: AMD EPYC\n") == "AMD EPYC"
    assert common.cpu_name("processor\t: 0\nCPU implementer\t: 0x41\n") == common.cpu_name("") == ""
    assert common.env()["cpu"]


@pytest.mark.full
def test_the_reducers_benchmark_checks_its_means(tmp_path):
    path = tmp_path / "reducer.json"
    sizes = ["--ranks", "2", "--parameters", "30", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "reducer_host.py"), *sizes, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 6 and all(row["checked"] for row in rows)
    assert {row["impl"] for row in rows} >= {"ddp", "fusedcomm reducer, fp32", "fusedcomm hook, bf16"}
