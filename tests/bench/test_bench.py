"""What the benchmarks count and report, for inputs with known results. test_make_gpu.py covers the GPU's benchmarks."""

import contextlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import HANG_S

BENCH = Path(__file__).resolve().parents[2] / "bench"


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


# ---- bench/entropy.py


@pytest.fixture
def entropy_bench(bench_modules):
    for module in ("sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(module)
    import entropy

    return entropy


@pytest.mark.full
def test_the_entropy_benchmark_runs(entropy_bench, tmp_path):
    path = tmp_path / "entropy.json"
    done = subprocess.run(
        [sys.executable, str(BENCH / "entropy.py"), "--quick", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    assert document["quick"] is True
    assert all(row["checked"] for row in document["rows"])
    assert {row["wire"] for row in document["entropy"]} == set(entropy_bench.WIRES)
    assert all(0 < row["coded_bits"] < row["wire_bits"] for row in document["entropy"])
    assert {(way["source"], way["stream"]) for way in document["break_even"]} == {
        (source, stream) for source in ("digits", "characters", "gaussian") for stream in entropy_bench.STREAMS
    }
    missing = {entry["impl"] for entry in document["not_measured"]}
    assert missing | set(document["packages"]) == {"zstandard", "lz4"}
    assert all(f"pip install {package}" in done.stdout for package in missing)


def test_entropy_of_known_distributions(entropy_bench):
    entropy = entropy_bench.entropy
    assert entropy(torch.zeros(100, dtype=torch.uint8)) == 0
    assert entropy(torch.arange(256).to(torch.uint8).repeat(3)) == 8
    halves = torch.tensor([7] * 8 + [1] * 4 + [250] * 2 + [0, 3])
    assert entropy(halves) == 1.875  # 1/2, 1/4, 1/8, 1/16, 1/16
    assert entropy(torch.tensor([0, 65535, 0, 65535])) == 1
    # Two constant runs, and a shorter run with two symbols.
    assert entropy(torch.tensor([5, 5, 5, 5, 9, 9, 9, 9, 1, 2]), run=4) == pytest.approx(0.2)


def test_entropy_counts_every_section_of_the_wire(entropy_bench):
    codes, zeros = torch.arange(-127.0, 128, 2), torch.zeros(128)
    grads = torch.cat([codes, zeros, 2 * codes, zeros]).repeat(8)
    bits = entropy_bench.section_bits("int8", entropy_bench.pack("int8", grads), len(grads))
    # Half of the codes are 0. The 128 odd codes share the other half.
    assert bits["codes"] == pytest.approx(0.5 * 1 + 0.5 * 8)
    # The scales are 3F800000, 0, 40000000 and 0 in turn. Two bytes are always 0. One byte is 80 in a quarter of the
    # scales. One byte is 3F, 0, 40 and 0 in turn.
    quarter = 0.25 * 2 + 0.75 * math.log2(4 / 3)
    assert bits["scales"] == pytest.approx((quarter + 1.5) / 128)


def test_bf16_planes_fit_together_again(entropy_bench):
    every_symbol = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.uint8)
    exponents, rest = entropy_bench.split_planes(every_symbol)
    assert torch.equal(entropy_bench.merge_planes(exponents, rest), every_symbol)
    bits = entropy_bench.section_bits("bf16", every_symbol, 1 << 16)
    assert (bits["exponent, one table"], bits["sign and mantissa"], bits["whole symbol"]) == (8, 8, 16)
    exponents, rest = entropy_bench.split_planes(torch.tensor([-1.5], dtype=torch.bfloat16).view(torch.uint8))
    assert (exponents.item(), rest.item()) == (127, 0xC0)


def test_break_even_by_hand(entropy_bench):
    """On two ranks a rank sends, compresses and decompresses one byte for each byte of a bucket."""
    rates = entropy_bench.Rates(16, 0.5, compress_bytes_s=1e9, decompress_bytes_s=2e9)

    def gain(gbit, threads, overlap, ranks=2):
        return entropy_bench.gain(rates, gbit * 1e9 / 8, ranks, threads, overlap)

    # 1 Gbit/s: 8 ns on the wire, 4 when coded; 1 ns to compress and 0.5 to decompress
    assert gain(1, 1, True) == pytest.approx(2)
    assert gain(1, 1, False) == pytest.approx(8 / 5.5)
    # 10 Gbit/s: 0.8 ns on the wire, 0.4 when coded; 1.5 ns of coding, 0.375 with four threads
    assert gain(10, 1, True) == pytest.approx(0.8 / 1.5)
    assert gain(10, 4, True) == pytest.approx(2)
    assert gain(10, 4, False) == pytest.approx(0.8 / 0.775)
    # Four ranks send 1.5 bytes: 12 ns on the wire, 6 when coded; 1 + 0.75 ns of coding
    assert gain(1, 1, False, ranks=4) == pytest.approx(12 / 7.75)
    # Coding takes 1.5 ns. With overlap that must not exceed the time of a byte, which is 1.5 ns at 16/3 Gbit/s. Without
    # overlap it must not exceed the saved half of a byte, which is 1.5 ns at 8/3 Gbit/s.
    assert entropy_bench.break_even_gbit(rates, 2, 1, True) == pytest.approx(16 / 3)
    assert entropy_bench.break_even_gbit(rates, 2, 4, False) == pytest.approx(4 * 8 / 3)
    for overlap in (True, False):
        assert gain(entropy_bench.break_even_gbit(rates, 2, 1, overlap), 1, overlap) == pytest.approx(1)
    grown = entropy_bench.Rates(16, 1.0, 1e12, 1e12)
    assert entropy_bench.break_even_gbit(grown, 2, 1, True) == 0

    rows = entropy_bench.break_even({("int8", "slow"): grown, ("int8", "good"): rates}, ranks=2)
    way = {(row["overlap"], row["threads"], row["link_gbit"]): row for row in rows}[True, 1, 1]
    assert (way["coder"], way["gain"], way["beside_bf16"]) == ("good", pytest.approx(2), pytest.approx(2))


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
